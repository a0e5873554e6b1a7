"""What a task wants besides the ordinary step: a loss over the global batch, or players that update in turn."""

from __future__ import annotations

from lockstep.core.build import Run
from lockstep.core.task import needs_global_batch
from lockstep.updates.global_loss import GlobalLoss
from lockstep.updates.players import AlternatingTask, turns_of


def arrange(run: Run) -> None:
    """Let the steps of a run be as its task wants them.

    Raises:
        UsageError: the players of the task do not fit its model or the config.
    """
    has_players = bool(run.task.players) or isinstance(run.task, AlternatingTask)
    if run.world.tensor > 1 and (has_players or needs_global_batch(run.task)):
        run.config.parallel.without_mesh("a task with players" if has_players else "Task.embed")
    if needs_global_batch(run.task):
        run.state.first_pass = GlobalLoss(run.task, run.world, run.state.precision)
    if has_players:
        run.step = turns_of(run.task, run.state, run.config).step
