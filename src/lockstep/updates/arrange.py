"""The update of a run whose task needs a special one: a loss over the global batch, or players."""

from __future__ import annotations

from lockstep.core.build import Run
from lockstep.core.task import needs_global_batch
from lockstep.updates.global_loss import GlobalLoss
from lockstep.updates.players import AlternatingTask, turns_of


def arrange(run: Run) -> None:
    """Choose the update of a run, as its task requires it.

    Raises:
        UsageError: the players of the task do not fit its model or the config.
    """
    has_players = bool(run.task.players) or isinstance(run.task, AlternatingTask)
    if run.world.tensor > 1 and (has_players or needs_global_batch(run.task)):
        run.config.parallel.without_mesh("a task with players" if has_players else "Task.embed")
    if has_players:
        run.update = turns_of(run.task, run.state, run.config).step
    elif needs_global_batch(run.task):
        run.update = GlobalLoss(run.task, run.world, run.state.precision).step
