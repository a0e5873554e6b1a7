"""What joins a training: the Parts and writers that its config names, with the first and last lines of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.core import plugins, task_checks
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.config.sections import training_keys
from lockstep.core.errors import UsageError
from lockstep.core.part import Part
from lockstep.core.writer import RunInfo, Writer
from lockstep.parts import factory
from lockstep.parts.model_summary import idle_ranks_warning, model_summary, warm_up_warning
from lockstep.trainer import device_notes

GROUP = "lockstep.parts"  # of entry points


def make_parts(entries: Sequence[str | Mapping[str, Any]]) -> list[Part]:
    """The Parts that a config names, in their order.

    Args:
        entries: each an entry point of the group `lockstep.parts` or FILE.py:Class; or a mapping with such a `kind`
            and the arguments of the class.

    Raises:
        UsageError: there is no such Part, or its class does not take these arguments.
    """
    parts = []
    for entry in entries:
        arguments = {} if isinstance(entry, str) else dict(entry)
        name = entry if isinstance(entry, str) else str(arguments.pop("kind"))
        kind = plugins.named_class(name, Part, group=GROUP, key="train.parts")
        try:
            parts.append(kind(**arguments))
        except Exception as error:
            raise UsageError(
                f"{kind.__name__} cannot be made: {type(error).__name__}: {error}",
                where=f"train.parts: {name}",
                remedy="give the arguments of its constructor next to `kind`: {kind: FILE.py:Class, ARGUMENT: VALUE}",
            ) from error
    return parts


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
    notes = device_notes.lines(config, world.device)
    for text in (*notes, *([header] if isinstance(header, str) else header), *summary, *run.messages, *warning):
        run.tell(text)


class Recorder(BuiltInPart):
    """Records a training on every rank, and leaves no trace in it: a Part that gets the entries of the log, too."""

    def join(self, run: Run) -> None:
        """Learn which run it is, before it begins."""

    def record(self, entry: Mapping[str, float]) -> None:
        """Take an entry of the log; see `Writer.record`."""

    def close(self) -> None:
        """The training has ended, or has failed."""


class Entries(Writer):
    """Gives a recorder the entries of the log."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def record(self, entry: Mapping[str, float]) -> None:
        self.recorder.record(entry)

    def close(self) -> None:
        self.recorder.close()
