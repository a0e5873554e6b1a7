"""The writers of a training, with the first and the last lines of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.core import task_checks
from lockstep.core.build import Run
from lockstep.core.config.sections import training_keys
from lockstep.core.writer import RunInfo
from lockstep.parts import factory
from lockstep.parts.model_summary import idle_ranks_warning, model_summary, warm_up_warning


@contextlib.contextmanager
def opened(run: Run, git: Mapping[str, Any] | None, *, quiet: bool) -> Iterator[None]:
    """Inside, rank 0 of `run` has writers, which were given the lines on the data, the model and the schedule.

    At the end they get the warnings of the run again, for a reader who looks at the end, and are closed.

    Args:
        git: the git commit of the task's code, and whether files differ from it.
        quiet: leave out the console.
    """
    if run.world.rank == 0:
        open_writers(run, git, quiet=quiet)
    try:
        yield
    finally:
        for text in run.warnings:
            run.tell(text)
        for writer in run.writers:
            writer.close()
        run.writers.clear()  # a recorder among them may hold the run


def open_writers(run: Run, git: Mapping[str, Any] | None, *, quiet: bool) -> None:
    """Give `run` its writers, and them the first lines of the log."""
    config, state, world = run.config, run.state, run.world
    header = task_checks.presenter(run.task).log_header()
    about = RunInfo(
        name=config.name,
        folder=run.folder,
        first_step=state.step,
        last_step=run.stop,
        world_size=world.size,
        device=world.device.type,
        config=config.model_dump(by_alias=True),
        hyperparameters=training_keys(config),
        git=git,
    )
    run.writers += factory.open_writers(about, config.log.writers, quiet=quiet)
    on_mesh = world.tensor > 1 and config.parallel.strategy == "ddp"  # each tensor group holds the whole model
    sharded_over = world.replicas if state.strategy.is_sharded and not on_mesh else None
    summary = model_summary(run.model, state.optimizer, sharded_over=sharded_over, blocks=run.blocks)
    warning = warm_up_warning(state.schedule, run.stop, config.schedule.warmup_share)
    warning += idle_ranks_warning(config.batch.global_ or 1, world.replicas)
    for text in (*([header] if isinstance(header, str) else header), *summary, *run.messages, *warning):
        run.tell(text)
