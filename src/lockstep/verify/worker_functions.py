"""The functions that workers run: a training, an evaluation or predictions by the ordinary engine."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, Preempted, UsageError
from lockstep.trainer import Trainer
from lockstep.verify.comparable_task import ComparableTask, TaskChanges
from lockstep.verify.compare import last_checkpoint
from lockstep.verify.recorder import RecorderOptions, Recording, TrainingRecorder

_CHECKPOINT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class TrainingRun:
    """A training that is to be made."""

    name: str
    world: int
    """Number of ranks."""
    config: Mapping[str, Any]
    """As `RunConfig` reads it."""
    folder: str
    """Its run directory. In the directory of an earlier training, it resumes that training."""
    changes: TaskChanges | None = None
    """What is changed in the task; None: nothing."""
    record: RecorderOptions | None = None
    """What is recorded; None: samples and losses alone."""
    stop_at: int | None = None
    """Stop and save after this step, as after a signal."""
    kill: tuple[int, int] | None = None
    """(rank, step): send SIGKILL to that rank after that step, once there is a checkpoint."""
    until: tuple[float, float] | None = None
    """(share, least): stop when the loss above `least` is at most this share of what it was in the first step."""


@dataclass
class Answer:
    """What a function returned on one rank, or how it failed."""

    value: Any = None
    """What the function returned."""
    error: str | None = None
    """The text of the error; None where the function returned."""
    known: bool = False
    """Whether the error is a `LockstepError`, whose text is written for users."""
    refused: bool = False
    """Whether the config was refused."""


def train(run: TrainingRun) -> Recording:
    """Train on this rank as `run` says."""
    recording = _train(run)
    gc.collect()  # ends the loader workers and frees the hooks of this training
    return recording


def _train(run: TrainingRun) -> Recording:
    trainer = Trainer(run.config, run_dir=run.folder, quiet=True)
    task = ComparableTask(trainer.task(), run.changes or TaskChanges())
    recorder = TrainingRecorder(
        task, run.record or RecorderOptions(), lambda step: _after_step(run, recorder.recording.losses, step)
    )
    with contextlib.suppress(Preempted):
        trainer.fit(task, recorder)
    return recorder.recording


def _after_step(run: TrainingRun, losses: Sequence[float], step: int) -> None:
    """Kill this rank or stop the training, where `run` says so for this step."""
    if run.kill is not None and step == run.kill[1] and os.environ["RANK"] == str(run.kill[0]):
        # Steps may be faster than the writing of a checkpoint, and resuming from nothing would show little.
        deadline = time.monotonic() + _CHECKPOINT_TIMEOUT_S
        while not last_checkpoint(run.folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if run.stop_at is not None and step >= run.stop_at:
        raise Preempted
    if run.until is not None:
        share, least = run.until
        if losses[-1] - least <= share * (losses[0] - least):  # the loss of the global batch is the same on all ranks
            raise Preempted


def answering(function: Callable[..., Any], *arguments: Any) -> Answer:
    """Call `function`, and return its result or its error. Tracebacks go to stderr, which is verify.log."""
    try:
        return Answer(function(*arguments))
    except LockstepError as error:
        traceback.print_exc()
        return Answer(error=str(error), known=True, refused=isinstance(error, UsageError))
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(error=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def evaluate(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> dict[str, float]:
    """Evaluate the newest checkpoint in `folder` with the engine."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    return trainer.evaluate(ComparableTask(trainer.task(), changes))


def predict(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> list[dict[str, Any]]:
    """Predict all evaluation data with the engine and the newest checkpoint in `folder`.

    Returns:
        The predictions as the task describes them, on rank 0; an empty list on other ranks.
    """
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = ComparableTask(trainer.task(), changes)
    presenter = task.presenter(task)
    return [presenter.describe(output) for output in trainer.predict(task) or []]


def data_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Number of training samples and of evaluation samples (0 without evaluation data)."""
    task = Trainer(config, quiet=True).task()
    data = task.eval_data()
    return len(task.train_data()), 0 if data is None else len(data)  # type: ignore[arg-type]
