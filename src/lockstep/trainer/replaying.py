"""A run as it was at one of its steps, to make its steps again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lockstep.core.build import Run
from lockstep.core.errors import UsageError
from lockstep.core.parallel.world import World
from lockstep.core.task import Task
from lockstep.trainer import assemble, earlier_configs, foreign, run_record
from lockstep.watch import replay


def run_before(setup: assemble.Setup, task: Task, world: World, step: int) -> tuple[Run, Callable[[], Run | None]]:
    """See `Trainer.replaying`."""
    task = foreign.configured(task, setup.config)
    if setup.kept.is_dir():
        assemble.set_up(setup, task, world, trained=True)
    nearest = world.on_rank0(lambda: replay.nearest(setup.checkpoints, step - 1))
    world.on_rank0(lambda: _check_config_of(setup, step, nearest.step if nearest else 0))
    run = assemble.rebuilt(setup, task, world, nearest)
    if not 1 <= step <= run.stop:
        what = f"the run has the steps 1 to {run.stop}"
        raise UsageError(what, where=f"--step {step}", remedy="give one of them, as the log counts steps")
    for text in run_record.differences(setup.run_dir, task, setup.config, world):
        print(text, file=sys.stderr)

    def after() -> Run | None:
        found = world.on_rank0(lambda: replay.nearest(setup.checkpoints, step))
        is_there = found is not None and found.step == step
        return assemble.rebuilt(setup, task, world, found) if is_there else None

    return run, after


def _check_config_of(setup: assemble.Setup, step: int, first: int) -> None:
    """Check that steps after `first`, up to `step`, were made with this config.

    Raises:
        UsageError: they were made with a different one; says which keys differ, or where it changed.
    """
    change = earlier_configs.change_between(setup.run_dir, first, step)
    if change is not None:
        what = f"the config changed after step {change}, and the nearest checkpoint before step {step} is of {first}"
        raise UsageError(what, where=f"--step {step}", remedy=f"give a step up to {change}")
    file = earlier_configs.path_at(setup.run_dir, step)
    if file.parent != setup.run_dir and (
        changed := earlier_configs.differences(earlier_configs.of_step(setup.run_dir, step), setup.config)
    ):
        what = f"step {step} was made with a different config: {'; '.join(changed)}"
        raise UsageError(what, where="Trainer", remedy=f"make the Trainer with the config {file}")
