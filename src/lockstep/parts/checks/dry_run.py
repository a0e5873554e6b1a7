"""Before the first step of a new run: try the loss and the evaluation on a few samples. This leaves no trace.

Without it, a fault in the evaluation would show only after an epoch, and a loss that is a mean would never show.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.core import metric_sync, task_checks
from lockstep.core.checkpoint import store
from lockstep.core.data import same_samples
from lockstep.core.data.loader import Loader, MicroBatch
from lockstep.core.data.order import EvaluationPlan, MicroBatchPlan, StepPlan
from lockstep.core.data.randomness import restored_generators, seed_forward
from lockstep.core.errors import DataError, UsageError, did_you_mean, number_of
from lockstep.core.evaluate import check_names, measure, predicted, split
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import private_of
from lockstep.core.parallel.world import World
from lockstep.parts.checks.same_output import check_same_output
from lockstep.parts.checks.unlike_halves import unlike_order

if TYPE_CHECKING:
    from lockstep.core.task import Task

_SAMPLES = 8
_TRAINING_DATA = "Task.train_data or Task.prepare"
_TURNS = 6  # a loss must look like a mean this often, with different samples first
_APART = 0.1  # a loss is a mean only if it differs from the sum by more than this fraction of the losses
_SUM = (
    "return the SUM over the units (reduction='sum'). For a mean with class weights, return the sum of weighted losses "
    "and, from Task.weight, the sum of the weights. A ratio over the batch (Dice, IoU, F-beta) is not such a sum, "
    "whatever its factor: return lockstep.losses.dice, or let Task.embed give `loss` the global batch; "
    "lockstep --explain global_loss"
)
_MEETING = f"{_SUM}. If samples influence each other in the model, mask the padding. `lockstep verify` names the line"
_NEAR = {"fp32": 1e-3, "fp16": 5e-3, "bf16": 2e-2}  # fraction of the losses that rounding explains, by precision


@contextlib.contextmanager
def without_trace(forward: nn.Module, world: World, compiled: bool, kind: str = "") -> Generator[None, None, None]:
    """Inside: evaluation mode, without gradients. Afterwards: training mode, and model and random states as before.

    Args:
        kind: see `restored_state`.
        compiled: whether `torch.compile` was applied to `forward`. Inside, the compiler is off, because it would
            otherwise specialise on the shapes of these few samples.
    """
    as_written = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        forward.eval()
        with restored_state(forward, kind), restored_generators(world.device), torch.no_grad(), as_written:
            yield
    finally:
        forward.train()


def look_at_losses(
    forward: nn.Module,
    loader: Loader,
    plan: StepPlan,
    *,
    most: int,
    world: World,
    precision: Precision,
    must_run: bool,
    allow_mean: bool = False,
    compares: bool = False,
) -> list[str]:
    """Check that all ranks read the same samples, and that the loss is a sum over its units.

    The loss of some samples of the first step is compared with the losses of their two halves. The samples are sorted
    first: if halves are alike, a ratio over a batch, such as Dice, looks like a sum or a mean.

    Args:
        forward: a `Forward`. All ranks call this with the same samples, so that they gather shards together.
        most: samples that evaluations compute at once, which is also the limit here.
        must_run: whether evaluations will call the loss in evaluation mode. If so, its exceptions are raised here.
        If not, they are left to the first step, which calls the loss in training mode.
        allow_mean: whether a loss that is a mean is only a warning.
        compares: whether the loss gets all samples of a global batch (`Task.embed`), so that it may compare them.

    Returns:
        warnings, if the samples change, if a mean is allowed, or if samples influence each other in the loss.

    Raises:
        UsageError: the ranks have different samples, or the loss is a mean.
    """
    indices = plan.indices(0)[0][: min(_SAMPLES, max(2, min(most, plan.micro_batch_at(0))))].tolist()
    if len(indices) < 2:
        return []
    (whole,) = read(loader, [indices])
    remarks = same_samples.check_batch(whole, loader, what="training", where=_TRAINING_DATA, world=world)
    run = partial(_losses, forward, precision=precision, must_run=must_run)
    orders = [indices]
    if whole.samples > 1:  # with on_error=skip, fewer may be readable
        orders.insert(0, [whole.indices[place] for place in unlike_order(whole.collated, whole.samples)])
    for order in orders:
        parts = [whole, *read(loader, _halves(order))]
        losses, near = run(parts)
        # A whole half may lack labels. All ranks make equally many passes, because they gather shards together.
        if not world.all_max(int(bool(losses) and not _have_units(losses, parts))):
            break
    heads = [head for head in losses[0] if _is_mean(head, losses, parts, near=near)] if losses else []
    mean = _mean_error(forward, plan, whole, losses, heads)
    coupled = "" if compares or not losses else _coupled(losses, parts, near=near)
    # A `collate` that mixes samples at random may give a mean by chance: then different samples come first, and decide
    # what it draws.
    for turn in range(1, min(_TURNS, len(order))):
        if not world.all_max(len(heads)):
            break
        turned = order[turn:] + order[:turn]
        parts = read(loader, [turned, *_halves(turned)])
        again, near = run(parts)
        heads = [head for head in heads if _is_mean(head, again, parts, near=near, alike=True)] if again else heads
    if mean is not None and heads:
        if not allow_mean:
            raise mean
        return [*remarks, f"WARNING: {mean.where}: {mean.what}: allowed by train.allow_mean_loss=true"]
    if not world.all_max(int(bool(coupled and not heads))):
        return remarks
    again, _ = run(read(loader, [order[1:] + order[:1]]), seed=1)
    drawn = not again or any(abs(again[0][head] - loss) > near * abs(loss) for head, loss in losses[0].items())
    if not coupled or drawn:  # the halves draw different random numbers than the whole
        return remarks
    return [*remarks, f"WARNING: Task.loss ({task_checks.line_of(forward.loss)}): {coupled}\n  remedy: {_MEETING}"]


def _halves(indices: Sequence[int]) -> list[Sequence[int]]:
    return [indices[: len(indices) // 2], indices[len(indices) // 2 :]]


def _losses(
    forward: nn.Module, parts: Sequence[MicroBatch], *, precision: Precision, must_run: bool, seed: int = 0
) -> tuple[list[dict[str, float]], float]:
    """The losses by head of each part, and the difference that rounding explains; empty if that is unknown."""
    if any(part.filler for part in parts):  # no sample of a part can be read
        return [], 0.0
    tensors: list[dict[str, Any]] = []
    try:
        for part in parts:
            # The same noise for the whole and for its halves, and on every rank.
            seed_forward(seed, precision.device, private_of(forward))
            with precision.autocast():
                tensors.append(forward(part.batch))
    except Exception:
        if must_run:
            raise
        return [], 0.0
    values = [loss for by_head in tensors for loss in by_head.values()]
    if not values or not all(
        isinstance(loss, Tensor) and loss.is_floating_point() and not loss.ndim for loss in values
    ):
        return [], 0.0  # the first step reports the fault
    dtypes = {one.dtype for one in [*values, *forward.parameters()] if one.is_floating_point()}
    near = max(_NEAR[precision.name], *(4 * torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize > 1))
    return [{head: float(loss) for head, loss in by_head.items()} for by_head in tensors], near


def _mean_error(
    forward: nn.Module, plan: StepPlan, part: MicroBatch, losses: Sequence[dict[str, float]], heads: list[str]
) -> UsageError | None:
    """The error for losses that are means; None if a mean is the sum, or there is none."""
    if not heads:
        return None
    samples = plan.samples(0) / (plan.world * plan.count(0))
    share = samples * _units(part, heads[0]) / part.samples
    if share < 1.5:  # a micro-batch has about one unit, so its mean is its sum
        return None
    whole, first, second = (by_head[heads[0]] for by_head in losses)
    named = f", head{'s' * (len(heads) > 1)} {' and '.join(map(repr, heads))}," if len(losses[0]) > 1 else ""
    return UsageError(
        f"it{named} returns a mean, not the SUM over its units: {part.samples} samples give {whole:.4g}, and their "
        f"two halves {first:.4g} and {second:.4g}. Lockstep divides the sum by the units of the global batch, so this "
        f"run would train with about 1/{share:.0f} of the gradient",
        where=f"Task.loss ({task_checks.line_of(forward.loss)})",
        remedy=f"{_SUM}. If the loss is intended: train.allow_mean_loss=true",
    )


def _coupled(losses: Sequence[Mapping[str, float]], parts: Sequence[MicroBatch], *, near: float) -> str:
    """How far a head's loss is from the sum over the halves; empty if rounding explains the difference."""
    whole, *halves = parts
    for head, loss in losses[0].items():
        first, second = (by_head.get(head, math.nan) for by_head in losses[1:])
        units, of_halves = _units(whole, head), sum(_units(half, head) for half in halves)
        off = abs(loss - (first + second) * units / of_halves) if of_halves else math.nan
        if not off > near * (abs(first) + abs(second)) or not math.isfinite(off):  # nor if one is NaN
            continue
        named = f" of head {head!r}" if len(losses[0]) > 1 else ""
        return (
            f"the loss{named} of a batch is not the sum over its samples: {whole.samples} samples give {loss:.4g}, and "
            f"their two halves, sorted by their labels, {first:.4g} and {second:.4g}. So this training depends on "
            "batch.micro and on the number of ranks"
        )
    return ""


class LookedAt(NamedTuple):
    """An evaluation of some samples."""

    messages: list[str]
    """Warnings for the log."""
    names: list[str] | None = None
    """Names of the results of an evaluation. None: unknown, because the metrics need more samples."""


def look_at_evaluation(
    task: Task, forward: nn.Module, loader: Loader, *, plan: EvaluationPlan, world: World, precision: Precision
) -> LookedAt:
    """Evaluate some samples, spread over the data set. Each rank evaluates them independently.

    Args:
        forward: a `Forward`. All ranks call this with the same samples, so that they gather shards together.

    Raises:
        UsageError: `Task.loss` returns a different output than `Task.predict`.
    """
    count = min(_SAMPLES, plan.micro_batch, plan.length)
    (micro_batch,) = read(loader, [[number * plan.length // count for number in range(count)]])
    metrics, update = task_checks.metrics(task)
    by_head, output = measure(task, forward, micro_batch, precision=precision, wants_output=False)
    names = [*["loss"][: len(by_head)], *(f"loss/{head}" for head in by_head if len(by_head) > 1), "samples", "bad"]
    messages = same_samples.check_batch(
        micro_batch, loader, what="evaluation", where="Task.eval_data or Task.prepare", world=world
    )
    if metrics is not None:
        if output is None:
            with precision.autocast():
                output = forward(micro_batch.batch, partial(predicted, task))
        else:
            near = _NEAR[precision.name]
            check_same_output(task, forward, micro_batch.batch, precision=precision, world=world, near=near)
        messages += _check_shape(output, len(micro_batch.indices))
        update = metric_sync.place(metrics, update, world.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metrics warn about classes that these few samples lack
            update(metrics, output, micro_batch.batch)
            try:
                values, _ = metric_sync.compute(metrics, World(0, 1, 0, world.device))
            except Exception as error:  # some metrics need more samples
                cause = f"{type(error).__name__}: {error}"
                return LookedAt(
                    [*messages, f"warning: the metrics of {number_of(count, 'sample')} cannot be computed ({cause})"]
                )
            finally:
                metrics.reset()
        check_names(values)
        names += values
        for metric in metrics.values():  # such as an AUC, which is undefined if the few samples have one class
            names += getattr(metric, "possible_results", ())
    return LookedAt(messages, names)


def check_results(chosen: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises UsageError if a key of the config names a result that `names` lack.

    Args:
        chosen: name of the result by key.
    """
    for key, result in chosen.items():
        if result not in names:
            remedy = f"{did_you_mean(result, names)}There are: {', '.join(names)}"
            raise UsageError(f"there is no metric {result}", where=key, remedy=remedy)


def check_is_evaluated(chosen: Mapping[str, str], evaluates: bool) -> None:
    """Raises UsageError if a key of the config names a result, but the run evaluates nothing."""
    for key, result in () if evaluates else chosen.items():
        left_out = key.removesuffix(".metric")  # train.stop_when must have a metric
        remedy = f"set train.eval_every_epochs or train.eval_every_steps, or remove {left_out}"
        raise UsageError(f"the run never evaluates, so there is no {result}", where=key, remedy=remedy)


def check_results_of_saved(chosen: Mapping[str, str], checkpoints: Path, world: World) -> None:
    """Raises UsageError if checkpoints hold results of evaluations, but lack a result that the config names."""
    saved = world.on_rank0(lambda: store.listed(checkpoints))
    known = sorted({name for checkpoint in saved for name in checkpoint.metrics})
    if known:
        check_results(chosen, known)


def read(loader: Loader, parts: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """A micro-batch for each list of sample indices in `parts`, prepared for epoch 0."""
    plans = [MicroBatchPlan(tuple(part), 0, False) for part in parts]
    with contextlib.closing(loader.run(lambda: plans)) as micro_batches:
        return list(micro_batches)


def _units(part: MicroBatch, head: str) -> float:
    return part.weights.get(head, 0.0) if part.weights is not None else float(part.samples)


def _have_units(losses: Sequence[Mapping[str, float]], parts: Sequence[MicroBatch]) -> bool:
    """True if all parts have units of each head, and losses that are numbers."""
    pairs = [(part, head, loss) for by_head, part in zip(losses, parts, strict=True) for head, loss in by_head.items()]
    return all(math.isfinite(loss) and _units(part, head) > 0 for part, head, loss in pairs)


def _is_mean(
    head: str, losses: Sequence[Mapping[str, float]], parts: Sequence[MicroBatch], *, near: float, alike: bool = False
) -> bool:
    """True if the loss of the whole is the mean of the losses of its halves, and not their sum.

    Args:
        losses, parts: of the whole, the first half and the second half.
        near: difference that rounding explains, as a fraction of the losses.
        alike: what to return if mean and sum are equal.
    """
    whole, *halves = (by_head.get(head, math.nan) for by_head in losses)
    units, *units_of_halves = (_units(part, head) for part in parts)
    scale = sum(map(abs, halves))
    if not (math.isfinite(whole) and 0 < scale < math.inf) or not units or not sum(units_of_halves):
        return alike
    # A weight may itself be 1 for each micro-batch, and not add up. So the losses per unit are compared.
    expected = sum(halves) * units / sum(units_of_halves)
    if not abs(whole - expected) > _APART * scale:
        return alike
    for first, second in (units_of_halves, [part.samples for part in parts[1:]], (1, 1)):
        mean = (first * halves[0] + second * halves[1]) / (first + second)
        if abs(whole - mean) <= near * scale:
            return True
    # A mean with different weights, such as those of classes, is between the means of the halves. Their sum is far
    # away.
    first, second = sorted(halves)
    return first * second > 0 and first < whole < second


def _check_shape(output: Any, count: int) -> list[str]:
    """A warning if the output has no part for each sample: predictions need the parts, evaluations do not."""
    try:
        split(output, count)
    except DataError as error:
        text = f"warning: {error.where} gave {error.what}: metrics receive it unchanged, but predictions fail"
        return [f"{text}. {error.remedy}" if error.remedy else text]
    return []
