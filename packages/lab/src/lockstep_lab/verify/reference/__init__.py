"""The same training by plain torch: samples, learning rates, gradients, updates, evaluations, predictions.

Nothing here imports the engine, the loader or the checkpoints of this package. So a fault in these does not move the
judge along with the accused. What a task returns, what a config says and what a checkpoint holds is read here anew,
from their documentation: `docs/tasks.md`, `docs/config.md`, `docs/step.md` and `docs/checkpoints.md`.
"""
