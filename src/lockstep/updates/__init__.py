"""Updates other than the usual one, for tasks that want them: alternating optimizers, a loss over the global batch.
`arrange.py` chooses the `update` of a run."""
