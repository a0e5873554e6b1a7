"""The functions that workers run: a training, an evaluation or predictions by the ordinary engine."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.core import devices, this_process
from lockstep.core.checkpoint import files
from lockstep.core.data.order import EvaluationPlan, StepPlan
from lockstep.core.errors import LockstepError, Preempted, UsageError
from lockstep.core.parallel import device_errors
from lockstep.core.parallel.world import join_world
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify import draws
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.dependence import noted_reads
from lockstep_lab.verify.recorder import RecorderOptions, Recording, TrainingRecorder
from lockstep_lab.verify.reference import checkpoint, evaluation
from lockstep_lab.verify.reference.data import numbers, tensors
from lockstep_lab.verify.reference.sampling import draws_of

OUTPUT = "tensors of the output"
"""Key of a described prediction: see `summary`."""
_CHECKPOINT_TIMEOUT_S, _LONGEST_STEP_S = 20.0, 2.0


@dataclass(frozen=True)
class TrainingRun:
    """A training to run."""

    name: str
    world: int
    """Number of ranks."""
    config: Mapping[str, Any]
    """As `RunConfig` reads it."""
    folder: str
    """Its run directory. In the directory of an earlier training, it resumes that training."""
    changes: TaskChanges | None = None
    """The changes to the task; None: no changes."""
    record: RecorderOptions | None = None
    """What to record; None: only samples and losses."""
    stop_at: int | None = None
    """Stop and save after this step, as after a signal."""
    kill: tuple[int, int] | None = None
    """(rank, step): send SIGKILL to that rank after that step, once there is a checkpoint."""
    slow_writing: bool = False
    """Checkpoints are written only after one more step, as on a slow disk."""
    until: tuple[float, float] | None = None
    """(share, least): stop when the loss above `least` is at most this fraction of its value in the first step."""


@dataclass
class Answer:
    """The answer of a function on one rank, or its failure."""

    value: Any = None
    """The value that the function returned."""
    error: str | None = None
    """The text of the error; None if the function returned."""
    known: bool = False
    """True if the error is a `LockstepError`, whose text is written for users."""
    refused: bool = False
    """True if the config was refused."""


def train(run: TrainingRun) -> Recording:
    """Train on this rank as `run` describes."""
    if run.record is not None and run.record.dependence:
        with noted_reads() as reads:
            recording = _train(run)
        recording.reads_of_rank = reads
    else:
        recording = _train(run)
    gc.collect()  # ends the loader workers and frees the hooks of this training
    return recording


def _train(run: TrainingRun) -> Recording:
    trainer = Trainer(run.config, run_dir=run.folder, quiet=True)
    task = ComparableTask(task_of(trainer), run.changes or TaskChanges())
    config = trainer.config.model_dump(by_alias=True)
    slow_disk = SlowDisk(config["train"]["steps"] or 0)

    def after_step(step: int) -> None:
        slow_disk.step = step
        _after_step(run, recorder.recording.losses, step)

    recorder = TrainingRecorder(task, config, run.record or RecorderOptions(), after_step)
    # If training waits for each checkpoint, there is no next step to wait for.
    is_slow = run.slow_writing and config["checkpoint"]["mode"] != "sync"
    with contextlib.suppress(Preempted), slow_disk if is_slow else contextlib.nullcontext():
        trainer.fit(task, recorder)
    return recorder.recording


class SlowDisk:
    """Inside, a checkpoint of this process is written only after the next step, waiting up to 2 s for it.

    Args:
        last: the last step, which no step follows.
    """

    def __init__(self, last: int) -> None:
        self.last, self.step = last, 0
        self._write = files.write_share

    def __enter__(self) -> None:
        files.write_share = self._write_later  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        files.write_share = self._write

    def _write_later(self, *arguments: Any) -> Any:
        begun, deadline = self.step, time.monotonic() + _LONGEST_STEP_S
        while self.step < min(begun + 2, self.last - 1) and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._write(*arguments)


def _after_step(run: TrainingRun, losses: Sequence[float], step: int) -> None:
    """Kill this rank or stop the training, if `run` asks for it after this step."""
    if run.kill is not None and step == run.kill[1] and this_process.rank() == run.kill[0]:
        # Steps may be faster than the writing of a checkpoint, and resuming from nothing would show little.
        deadline = time.monotonic() + _CHECKPOINT_TIMEOUT_S
        while not checkpoint.newest(run.folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if run.stop_at is not None and step >= run.stop_at:
        raise Preempted
    if run.until is not None:
        share, least = run.until
        above = losses[0] - least  # not positive: it is unknown how far such a loss can fall
        if above > 0 and losses[-1] - least <= share * above:  # the loss of the global batch is the same on all ranks
            raise Preempted


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, a GPU computes float32 with all of its 24 bits, also in convolutions and matrix products.

    TensorFloat-32, which GPUs otherwise use in convolutions, has 11: no bound of float32 would hold.
    """
    before, of_convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = of_convolutions


def answering(function: Callable[..., Any], *arguments: Any) -> Answer:
    """Call `function`, and return its result or its error. Tracebacks go to stderr, which is verify.log."""
    try:
        with full_precision():
            return Answer(function(*arguments))
    except LockstepError as error:
        device_errors.note(error)
        traceback.print_exc()
        return Answer(error=str(error), known=True, refused=isinstance(error, UsageError))
    except Exception as error:
        device_errors.note(error)
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(error=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def evaluate(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> dict[str, float]:
    """Evaluate the newest checkpoint in `folder` with the engine."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    return trainer.evaluate(ComparableTask(task_of(trainer), changes))


def predict(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> list[dict[str, Any]]:
    """Predict all evaluation data with the engine and the newest checkpoint in `folder`.

    Returns:
        The predictions as the task describes them, with `OUTPUT`, on rank 0; an empty list on other ranks.
    """
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = ComparableTask(task_of(trainer), changes)
    presenter = task.presenter(task)
    return [{**presenter.describe(output), OUTPUT: summary(output)} for output in trainer.predict(task)]


def evaluate_by_loop(
    config: Mapping[str, Any], folder: str, changes: TaskChanges, micro_batch: int
) -> dict[str, float]:
    """Evaluate the newest checkpoint in `folder` without the engine."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = ComparableTask(task_of(trainer), changes)
    with join_world(trainer.config.device) as world:
        model = evaluation.trained_model(task, folder, config, world.device)
        return evaluation.evaluate_model(task, model, config, world.device, micro_batch=micro_batch)


def predict_by_loop(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> list[dict[str, Any]]:
    """Predict all evaluation data with the newest checkpoint in `folder`, without the engine and one sample at a time.

    Returns:
        For each sample, the prediction as the task describes it, with `OUTPUT`, and the truth under `truth`.
    """
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = ComparableTask(task_of(trainer), changes)
    presenter = task.presenter(task)
    with join_world(trainer.config.device) as world:
        model = evaluation.trained_model(task, folder, config, world.device)
        pairs = evaluation.predict_model(task, model, config, world.device)
        return [
            {"truth": presenter.truth(sample), **presenter.describe(output), OUTPUT: summary(output)}
            for sample, output in pairs
        ]


def summary(output: Any) -> list[tuple[tuple[int, ...], float, float]]:
    """Shape, mean and 2-norm of each tensor of floating-point or complex numbers in an output."""
    inexact = [tensor for tensor in tensors(output) if tensor.is_floating_point() or tensor.is_complex()]
    values = [numbers(tensor) for tensor in inexact if tensor.numel()]
    return [(tuple(value.shape), float(value.mean()), float(value.norm())) for value in values]


def planned_epochs(epochs: int, plan: Mapping[str, Any]) -> list[list[int]]:
    """The indices of all samples of the first epochs, step by step. Those of a step are sorted.

    Args:
        epochs: number of epochs.
        plan: the fields of `StepPlan`.
    """
    steps = StepPlan(**plan)
    return [
        [
            index
            for step in range(epoch * steps.steps_per_epoch, (epoch + 1) * steps.steps_per_epoch)
            for index in sorted(
                index
                for rank in steps.by_rank(step)
                for micro_batch in rank
                if not micro_batch.filler
                for index in micro_batch.indices
            )
        ]
        for epoch in range(epochs)
    ]


def planned_evaluations(length: int, micro_batch: int, world: int) -> dict[str, list[int]]:
    """The indices of all samples of an evaluation and of a prediction on `world` ranks, by description."""
    planned: dict[str, list[int]] = {}
    for words, lengths in (("", None), (" by length", np.arange(length)[::-1] % 7)):
        plan = EvaluationPlan(length, micro_batch, lengths)
        in_turns = [list(plan.in_turns(rank, world)) for rank in range(world)]
        for way, by_rank in {"an evaluation": plan.by_rank(world), "a prediction": in_turns}.items():
            planned[f"the plan of {way}{words}"] = [
                index for rank in by_rank for micro in rank if not micro.filler for index in micro.indices
            ]
    return planned


def data_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Number of training samples and of evaluation samples (0 without evaluation data)."""
    task = task_of(Trainer(config, quiet=True))
    data = task.eval_data()
    return len(task.train_data()), 0 if data is None else len(data)  # type: ignore[arg-type]


def epoch_length(config: Mapping[str, Any]) -> int:
    """Number of samples of an epoch."""
    return draws_of(task_of(Trainer(config, quiet=True)).train_data(), config).length


def planned_draws(config: Mapping[str, Any], count: int, steps: int) -> list[list[int]] | None:
    """See `draws.planned`, for `count` training samples, as `TaskChanges.train_samples` chooses them."""
    task = ComparableTask(task_of(Trainer(config, quiet=True)), TaskChanges(train_samples=count))
    return draws.planned(task.train_data(), config, steps)


def device_name(wanted: str) -> str:
    """The name of the device on which a single rank computes.

    Args:
        wanted: auto, cpu or cuda.
    """
    with join_world(wanted) as world:
        return devices.of(world.device).name()


def train_lengths(config: Mapping[str, Any], count: int | None) -> list[int]:
    """The lengths of the training samples, by the attribute `lengths` of the data set.

    Args:
        count: number of samples, as `TaskChanges.train_samples` chooses them. None: all.
    """
    data: Any = ComparableTask(task_of(Trainer(config, quiet=True)), TaskChanges(train_samples=count)).train_data()
    return [int(length) for length in data.lengths]
