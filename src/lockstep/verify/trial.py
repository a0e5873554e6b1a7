"""One training or evaluation that checks look at: what is asked of the ranks, and what each of them answers."""

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
from lockstep.verify.adjusted import Adjusted, Adjustment
from lockstep.verify.compare import last_checkpoint
from lockstep.verify.witness import Seen, Watch, Witness

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Trial:
    """A training.

    config: as `RunConfig` reads it. folder: its run directory; a trial that names an earlier one's goes on from its checkpoint.
    stop_at: stop and save after this step, as on a signal. kill: (rank, step): SIGKILL that rank after that
    step, when there is a checkpoint. until: (share, least):
    stop as soon as the loss above `least` is this share of the first step's.
    """

    name: str
    world: int
    config: Mapping[str, Any]
    folder: str
    adjustment: Adjustment | None = None
    watch: Watch | None = None
    stop_at: int | None = None
    kill: tuple[int, int] | None = None
    until: tuple[float, float] | None = None


@dataclass
class Answer:
    """What one rank says of a trial. value: what it found. error: the text of what it failed with; known: in our own words;
    refused: because of the config."""

    value: Any = None
    error: str | None = None
    known: bool = False
    refused: bool = False


def fit(trial: Trial) -> Seen:
    """Train as `trial` says, on this rank."""
    seen = _fit(trial)
    gc.collect()  # loader workers and hooks go with the training
    return seen


def _fit(trial: Trial) -> Seen:
    trainer = Trainer(trial.config, run_dir=trial.folder, quiet=True)
    task = Adjusted(trainer.task(), trial.adjustment or Adjustment())
    witness = Witness(task, trial.watch or Watch(), lambda step: _after(trial, witness.seen.losses, step))
    with contextlib.suppress(Preempted):
        trainer.fit(task, witness)
    return witness.seen


def _after(trial: Trial, losses: Sequence[float], step: int) -> None:
    """End, where the trial is to end after this step."""
    if trial.kill is not None and step == trial.kill[1] and os.environ["RANK"] == str(trial.kill[0]):
        deadline = (
            time.monotonic() + _PATIENCE_S
        )  # steps may be faster than a write: what is resumed from its beginning shows little
        while not last_checkpoint(trial.folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if trial.stop_at is not None and step >= trial.stop_at:
        raise Preempted
    if trial.until is not None:
        share, least = trial.until
        if losses[-1] - least <= share * (losses[0] - least):  # of the global batch: the same on all ranks
            raise Preempted


def answering(function: Callable[..., Any], *arguments: Any) -> Answer:
    """What `function` returns or raises, as an `Answer`."""
    try:
        return Answer(function(*arguments))
    except LockstepError as error:
        traceback.print_exc()  # into verify.log
        return Answer(error=str(error), known=True, refused=isinstance(error, UsageError))
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(error=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def evaluate(config: Mapping[str, Any], folder: str, adjustment: Adjustment) -> dict[str, float]:
    """The engine's evaluation of a trial's newest checkpoint."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    return trainer.evaluate(Adjusted(trainer.task(), adjustment))


def predict(config: Mapping[str, Any], folder: str, adjustment: Adjustment) -> list[dict[str, Any]]:
    """The engine's predictions by a trial's newest checkpoint, as the task describes them, for all evaluation data; on rank 0."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = Adjusted(trainer.task(), adjustment)
    presenter = task.presenter(task)
    return [presenter.describe(output) for output in trainer.predict(task) or []]


def sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Samples of the training data, and of the evaluation data (0 where there is none)."""
    task = Trainer(config, quiet=True).task()
    data = task.eval_data()
    return len(task.train_data()), 0 if data is None else len(data)  # type: ignore[arg-type]
