"""Before the first step of a new run: on a few samples, what training and evaluation need later. It leaves no trace.

A fault of the evaluation would otherwise show after an epoch, and a loss that is a mean never would.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import store
from lockstep.data.loader import Loader, MicroBatch
from lockstep.data.order import EvaluationPlan, MicroBatchPlan, StepPlan, count_micro_batches
from lockstep.data.randomness import seed_forward
from lockstep.distributed.buffers import restore_buffers
from lockstep.distributed.precision import Precision
from lockstep.distributed.world import World
from lockstep.engine import metric_sync, task_checks
from lockstep.engine.evaluate import measure, split
from lockstep.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from lockstep.tasks.task import Task

_SAMPLES = 8
_APART = 0.1  # of the losses: less than this is no mean instead of a sum
_NEAR = {"fp32": 1e-3, "fp16": 5e-3, "bf16": 2e-2}  # of the losses: what rounding explains


@contextlib.contextmanager
def without_trace(forward: nn.Module, world: World, compiled: bool) -> Generator[None, None, None]:
    """Evaluation mode without gradients; afterwards training mode, and buffers and random numbers as they were.

    Args:
        compiled: `torch.compile` was applied to `forward`. It is run as it was written: shapes seen here would count.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [world.device] if world.device.type == "cuda" else []
    as_written = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        forward.eval()
        with restore_buffers(forward), torch.random.fork_rng(devices), torch.no_grad(), as_written:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        forward.train()


def look_at_losses(
    forward: nn.Module,
    loader: Loader,
    plan: StepPlan,
    precision: Precision,
    must_run: bool,
) -> list[str]:
    """Whether the loss is a mean where a sum is asked for: some samples of the first step against their halves.

    Args:
        forward: a `Forward`; all ranks call this with the same samples, so that shards are gathered alike.
        must_run: raise what the loss raises in evaluation mode, because evaluations call it too; else leave it to the
            first step, which calls it in training mode.

    Returns:
        a warning, or nothing.
    """
    indices = plan.indices(0)[0][: min(_SAMPLES, max(2, plan.micro_batch))].tolist()
    if len(indices) < 2:
        return []
    half = len(indices) // 2
    micros = _read(loader, [indices, indices[:half], indices[half:]])
    if any(micro.filler for micro in micros):  # none of a half can be read
        return []
    found: list[dict[str, Any]] = []
    try:
        for micro in micros:
            seed_forward(0, precision.device)  # the same noise for the whole and for its halves, and on every rank
            with precision.autocast():
                found.append(forward(micro.batch))
    except Exception:
        if must_run:
            raise
        return []
    values = [loss for losses in found for loss in losses.values()]
    if not values or not all(map(_is_number, values)):
        return []  # the first step says what is wrong with them
    near = max(_NEAR[precision.name], *(4 * torch.finfo(loss.dtype).eps for loss in values))
    losses = [{head: float(loss) for head, loss in of_part.items()} for of_part in found]
    heads = [head for head in losses[0] if _is_mean(head, losses, micros, near)]
    if not heads:
        return []
    samples = plan.samples(0) / (plan.world * count_micro_batches(plan.samples(0), plan.world, plan.micro_batch))
    share = samples * _units(micros[0], heads[0]) / micros[0].samples
    if share < 1.5:  # of one sample, the mean is the sum
        return []
    whole, first, second = (of_part[heads[0]] for of_part in losses)
    named = f", head{'s' * (len(heads) > 1)} {' and '.join(map(repr, heads))}," if len(losses[0]) > 1 else ""
    return [
        f"WARNING: Task.loss{named} returns a mean, not the SUM over its units: {micros[0].samples} samples give "
        f"{whole:.4g}, and their two halves {first:.4g} and {second:.4g}. Lockstep divides the sum by the units of the "
        f"global batch, so this run trains with about 1/{share:.0f} of the gradient.\n"
        "  remedy: return the sum (reduction='sum'), or the mean times its number of units"
    ]


def look_at_evaluation(
    task: Task,
    forward: nn.Module,
    loader: Loader,
    plan: EvaluationPlan,
    world: World,
    precision: Precision,
    best: str | None,
) -> list[str]:
    """Evaluate some samples, spread over the data set, on every rank by itself.

    Args:
        forward: a `Forward`; all ranks call this with the same samples, so that shards are gathered alike.
        best: the name, as it is logged, of what the best checkpoint is chosen by.

    Returns:
        what should be told.

    Raises:
        UsageError: no result has the name `best`.
    """
    count = min(_SAMPLES, plan.micro_batch, plan.length)
    (micro,) = _read(loader, [[number * plan.length // count for number in range(count)]])
    metrics, update = task_checks.metrics(task)
    by_head, output = measure(task, forward, micro, precision, metrics is not None)
    names = ["loss", *(f"loss/{head}" for head in by_head if len(by_head) > 1), "samples", "bad"]
    told = []
    if metrics is not None:
        told += _shape_of(output, len(micro.indices))
        metrics.to(world.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that a few samples lack
            update(metrics, output, micro.batch)
            try:
                values, _ = metric_sync.compute(metrics, World(0, 1, 0, world.device))
            except Exception as error:  # some need more samples
                cause = f"{type(error).__name__}: {error}"
                return [*told, f"warning: the metrics of {count} samples cannot be computed ({cause})"]
            finally:
                metrics.reset()
        names += values
    check_best(best, [f"eval/{name}" for name in names])
    return told


def check_best(best: str | None, names: Sequence[str]) -> None:
    """Raises UsageError where no result is called `best`."""
    if best is not None and best not in names:
        remedy = f"{did_you_mean(best, names)}There are: {', '.join(names)}"
        raise UsageError(f"there is no metric {best}", where="checkpoint.keep_best", remedy=remedy)


def check_is_evaluated(evaluates: bool) -> None:
    """Raises UsageError where the best checkpoint is to be kept, and nothing is evaluated."""
    if not evaluates:
        remedy = "set train.eval_every_epochs or train.eval_every_steps, or checkpoint.keep_best=null"
        what = "nothing is evaluated that the best could be chosen by"
        raise UsageError(what, where="checkpoint.keep_best", remedy=remedy)


def check_best_of_saved(best: str | None, checkpoints: Path, world: World) -> None:
    """Raises UsageError where checkpoints hold results of evaluations, and none of them is called `best`."""
    saved = world.on_rank0(lambda: store.listed(checkpoints))
    known = sorted({name for checkpoint in saved for name in checkpoint.metrics})
    check_best(best if known else None, known)


def _read(loader: Loader, parts: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """A micro-batch of each of these samples, prepared for epoch 0."""
    chunks = [MicroBatchPlan(tuple(part), 0, False) for part in parts]
    with contextlib.closing(loader.run(lambda: chunks)) as micros:
        return list(micros)


def _units(micro: MicroBatch, head: str) -> float:
    return micro.weights.get(head, 0.0) if micro.weights is not None else float(micro.samples)


def _is_mean(head: str, losses: Sequence[Mapping[str, float]], micros: Sequence[MicroBatch], near: float) -> bool:
    """Whether the loss of the first is the mean of those of the two others, and not their sum."""
    whole, *halves = (of_part.get(head, math.nan) for of_part in losses)
    units, *parts = (_units(micro, head) for micro in micros)
    scale = sum(map(abs, halves))
    if not (math.isfinite(whole) and 0 < scale < math.inf) or not units or not sum(parts):
        return False
    # Where weights do not add up either (one per micro-batch), what counts is the loss per unit.
    expected = sum(halves) * units / sum(parts)
    if not abs(whole - expected) > _APART * scale:
        return False
    sizes = [micro.samples for micro in micros[1:]]
    for one, two in (parts, sizes, (1, 1)):
        mean = (one * halves[0] + two * halves[1]) / (one + two)
        if abs(whole - mean) <= near * scale:
            return True
    return False


def _is_number(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.is_floating_point() and not loss.ndim


def _shape_of(output: Any, count: int) -> list[str]:
    """A warning where outputs are not one per sample: an evaluation can do with that, predictions cannot."""
    try:
        split(output, count)
    except DataError as error:
        text = f"warning: {error.where} gave {error.what}: metrics get it as it is, but predictions fail"
        return [f"{text}. {error.remedy}" if error.remedy else text]
    return []
