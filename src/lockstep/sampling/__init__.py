"""Choose the samples of an epoch, if it does not use each sample once: by weights, by labels or with a custom order."""
