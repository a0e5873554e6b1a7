"""The writers of a training, with the first lines of the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core import task_checks
from lockstep.core.build import PreparedRun
from lockstep.core.config.sections import RunConfig, training_keys
from lockstep.core.task import Task
from lockstep.core.writer import RunInfo, Writer, tell
from lockstep.parts import factory
from lockstep.parts.model_summary import idle_ranks_warning, model_summary, warm_up_warning


def open_writers(
    config: RunConfig, folder: Path, task: Task, prepared: PreparedRun, git: Mapping[str, Any] | None, *, quiet: bool
) -> list[Writer]:
    """The writers, after they were given the lines on the data, the model and the schedule. None but on rank 0.

    Args:
        folder: the run directory.
        git: the git commit of the task's code, and whether files differ from it.
        quiet: leave out the console.
    """
    state, built = prepared.state, prepared.built
    world = state.world
    if world.rank:
        return []
    header = task_checks.presenter(task).log_header()
    run = RunInfo(
        name=config.name,
        folder=folder,
        first_step=state.step,
        last_step=prepared.stop,
        world_size=world.size,
        device=world.device.type,
        config=config.model_dump(by_alias=True),
        hyperparameters=training_keys(config),
        git=git,
    )
    writers: list[Writer] = [*factory.open_writers(run, config.log.writers, quiet=quiet)]
    sharded_over = world.size if state.strategy.is_sharded else None
    summary = model_summary(built.model, state.optimizer, sharded_over=sharded_over, blocks=built.blocks)
    warning = warm_up_warning(state.schedule, prepared.stop, config.schedule.warmup_share)
    warning += idle_ranks_warning(config.batch.global_ or 1, world.size)
    for text in (*([header] if isinstance(header, str) else header), *summary, *built.messages, *warning):
        tell(writers, text)
    return writers
