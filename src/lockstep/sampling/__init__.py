"""The samples that an epoch draws, where it does not draw each once: by weights, labels or an order of one's own."""
