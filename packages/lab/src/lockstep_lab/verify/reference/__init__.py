"""The same training by plain torch: samples, learning rates, gradients, updates, evaluations, predictions.

Nothing here imports the engine, the loader or the checkpoints of this package, so a fault in these cannot also affect
the reference. What a task returns, what a config contains and what a checkpoint holds is read here independently, as
documented in `docs/tasks.md`, `docs/config.md`, `docs/step.md` and `docs/checkpoints.md`.
"""
