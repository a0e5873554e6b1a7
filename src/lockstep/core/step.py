"""The exact step: one optimizer update that is the same however its global batch was split.

    W[k] = sum over ranks and micro-batches of w[r,m,k]          units (samples, labels, pixels) of head k
    loss = sum_k c[k] * L[r,m,k] * world / W[k]                  L: the SUM of the loss over this micro-batch's units

DDP and FSDP average gradients over `world` ranks. On a mesh, `world` is the number of tensor groups: the ranks of a
group have the same samples, and count once. So the gradient is that of sum_k c[k] * (sum of L[k]) / W[k]: a mean over
the units of the whole global batch, and never a mean of means.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core import batch_norm, devices, heads
from lockstep.core.data.loader import MicroBatch, one_ahead
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import seed_forward
from lockstep.core.data.tensors import map_tensors
from lockstep.core.ema import Ema
from lockstep.core.errors import TrainingError
from lockstep.core.parallel.gradients import clear_grads, clip_grads, grad_norm, scale_grads
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import Losses, Strategy, TrialPass, Waits
from lockstep.core.parallel.world import World
from lockstep.core.schedule import Schedule, set_lr
from lockstep.core.train_metrics import TrainMetrics
from lockstep.core.unfreeze import Unfreezing

SAMPLES = ""
"""The key of W if the unit of every head is the sample."""

R = TypeVar("R")
Call = Callable[[nn.Module, Any], Any]
"""From the model and a batch to the loss sums by head."""
Counting = Callable[[], dict[str, float]]
"""Waits until all ranks have counted their units, and gives W."""


@dataclass
class TrainState:
    """The state of a training on this rank: everything that a step reads or changes."""

    strategy: Strategy
    """How the model is spread over ranks. It holds the module that the step calls."""
    world: World
    """The ranks that train."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    schedule: Schedule
    seed: int = 0
    clip_norm: float | None = None
    """Largest norm of the gradient. None: gradients are not clipped."""
    coefficients: Mapping[str, float] = field(default_factory=dict)
    """Factors of the losses by head; 1 for heads that are not here."""
    must_agree_on_weights: bool = False
    """True if ranks may lose samples, and so must count them together if the unit is the sample."""
    averages: Ema | None = None
    """Moving averages of the weights, if they are wanted."""
    metrics: TrainMetrics | None = None
    """Gets the outputs of the training, if the log is to have metrics of them."""
    unfreezing: Unfreezing | None = None
    """The parameters that are trainable at each step. `strategy` is wrapped for the parameters of `step`."""
    step: int = 0
    """Global batches consumed so far."""
    skipped: int = 0
    """Steps so far that changed no weight: fp16 overflowed, or the global batch had no valid unit. The schedule counts
    updates, which are `step - skipped`."""
    weight_heads: heads.HeadNames | None = None
    """Heads of `Task.weight` that all ranks agreed on. None before the first step of this process."""
    agreed: heads.AgreedLosses | None = None
    """Facts on the losses that all ranks know. None before the first step of this process, and whenever other
    parameters begin to train."""
    changing_gradients: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Encloses each change of gradients after their exchange."""

    @property
    def forward(self) -> nn.Module:
        """The module that the step calls."""
        return self.strategy.forward

    @property
    def has_frozen(self) -> bool:
        """True if the model has parameters that do not train."""
        return any(not parameter.requires_grad for parameter in self.strategy.unwrapped.model.parameters())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return list(self.strategy.trainable.values())

    def unfreeze(self) -> None:
        """Make the parameters trainable that train from this step on."""
        if self.unfreezing is not None and self.step in self.unfreezing.steps:
            self.unfreezing.apply(self.step)
            self.agreed = None
            self.strategy.wrap(self.strategy.unwrapped)


@dataclass
class StepResult:
    """The results of one step on this rank. Tensors stay on the device: only steps that log read them."""

    step: int
    """Global batches consumed before this step."""
    samples: int
    """Samples in the global batch, over all ranks."""
    totals: dict[str, float]
    """W: units by head over all ranks; under `SAMPLES` for all heads. The first backward pass needs it."""
    indices: list[tuple[int, ...]] = field(default_factory=list)
    """Indices of the samples of each micro-batch."""
    counted: list[bool] = field(default_factory=list)
    """For each micro-batch: true if it counts. A filler does not."""
    places: list[int] = field(default_factory=list)
    """For each micro-batch: the place of its shard in `World.data_ranks`."""
    bad: list[str] = field(default_factory=list)
    """Messages about unreadable samples."""
    losses: list[Losses] = field(default_factory=list)
    """Loss sums by head, of each micro-batch that ran."""
    grad_norm: Tensor | None = None
    """Global norm of the gradient before clipping. None if it was not computed."""
    applied: bool = False
    """True if the update was applied."""
    marks: list[Any] = field(default_factory=list)
    """With several ranks: marks of the device before and after what this rank computed before gradients were exchanged;
    see `Device.mark`."""
    waits: list[tuple[Any, Any]] | None = field(default_factory=list)
    """Marks around the times in between when it waited for other ranks; see `strategy.Waits`."""
    counting: Counting | None = None
    """Gives `totals` before the first backward pass. None: they are there."""

    @classmethod
    def of(
        cls,
        step: int,
        samples: int,
        totals: dict[str, float],
        micro_batches: Sequence[MicroBatch],
        shards: int = 1,
        counting: Counting | None = None,
    ) -> StepResult:
        """The result of a step that begins, of these micro-batches of `shards` shards of the global batch."""
        result = cls(step, samples, totals, counting=counting)
        for number, micro_batch in enumerate(micro_batches):
            result.places.append(number * shards // len(micro_batches))
            result.indices.append(micro_batch.indices)
            result.counted.append(not micro_batch.filler)
            result.bad += [message for _, message in micro_batch.bad] if micro_batch.bad else []
        return result

    def wait_for_units(self, counting: Counting, device: torch.device) -> None:
        """Wait for `totals`."""
        mark = devices.of(device).mark
        before = mark()
        self.totals, self.counting = counting(), None
        self.waits = [*(self.waits or ()), (before, mark())]

    def add(self, losses: Losses, waits: Waits | None) -> None:
        """Add the losses of a micro-batch. For `waits`, see `Strategy.backward`."""
        self.losses.append({head: value.detach() for head, value in losses.items()})
        if waits is not None:
            self.marks.append(waits.ended)
            self.waits = None if waits.between is None else [*(self.waits or ()), *waits.between]


class Update(Protocol):
    """How a run consumes its global batches: `train_step`, or one of `updates/`."""

    def __call__(
        self, state: TrainState, micro_batches: Sequence[MicroBatch], samples: int, *, want_norm: bool = False
    ) -> StepResult:
        """Consume one global batch. For the arguments, see `exact_step`."""
        ...


def train_step(
    state: TrainState, micro_batches: Sequence[MicroBatch], samples: int, *, want_norm: bool = False
) -> StepResult:
    """The usual update: `exact_step` with the losses of the task."""
    return driven(exact_step(state, micro_batches, samples, want_norm=want_norm), lambda asked: None)


def exact_step(
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    samples: int,
    *,
    want_norm: bool = False,
    counts_late: bool = False,
    fillers_count: bool = False,
) -> Generator[MicroBatch | None, Call | None, StepResult]:
    """Consume one global batch and apply one update.

    It is a generator, so that others may compute the losses, such as the body of a user's own loop. It yields each
    micro-batch, inside the contexts of its forward pass, and is sent a function that gives the losses. None: the losses
    of the task. It yields None before the first forward pass, and after each backward pass.

    Args:
        micro_batches: this rank's micro-batches, equally many on every rank. Only the batch in use and the next are on
            the device.
        samples: size of the global batch, over all ranks, from the plan.
        want_norm: compute the gradient norm also if gradients are not clipped.
        counts_late: the units of a micro-batch are known only when its losses are: `weights` is set by then.
        fillers_count: the loss of a filler may have a gradient that belongs to the global batch.

    Raises:
        TrainingError: the loss and the weight have different heads; in the first step of a process, a parameter has no
            gradient; the loss or the model has frozen or unfrozen parameters.
    """
    state.unfreeze()
    known = ({SAMPLES: float(samples)}, None)
    totals, counting = known if counts_late else _count_units(state, micro_batches, samples)
    result = StepResult.of(state.step, samples, totals, micro_batches, len(state.world.data_ranks), counting)
    state.step += 1
    if counting is None and not any(totals.values()):  # no unit on any rank. All ranks know W, so all skip
        return _skipped(state, result)
    _begin(state, micro_batches, result)
    yield None
    for number, micro_batch in enumerate(one_ahead(micro_batches)):
        last = number == len(micro_batches) - 1
        if number == result.places.index(result.places[number]):
            state.strategy.begin_shard(result.places[number], result.places.count(result.places[number]))
        rest = yield from forward_backward_step(state, micro_batch, result, number, last, fillers_count)
        yield None
    state.strategy.end_shards()
    if counts_late:
        rest *= _count_late(state, micro_batches, result)
    if not any(result.totals.values()):
        return _skipped(state, result)
    parameters = state.parameters
    with state.changing_gradients():
        if rest != 1.0:
            scale_grads(parameters, rest)
        state.precision.scaler.unscale_(state.optimizer)
    if want_norm or state.clip_norm is not None:
        result.grad_norm = grad_norm(parameters, same_bits=state.world.virtual_ranks is not None)
    if state.clip_norm is not None and result.grad_norm is not None:
        with state.changing_gradients():
            clip_grads(parameters, state.clip_norm, result.grad_norm)
    result.applied = state.precision.step(state.optimizer)
    clear_grads(state.optimizer)
    state.skipped += not result.applied
    if state.averages is not None and result.applied:
        state.averages.update(state.step - state.skipped)
    return result


def forward_backward_step(
    state: TrainState,
    micro_batch: MicroBatch,
    result: StepResult,
    number: int,
    last: bool,
    fillers_count: bool = False,
) -> Generator[MicroBatch, Call | None, float]:
    """The forward and the backward pass of a micro-batch, as a part of `exact_step`. Adds its losses to `result`.

    Args:
        number: of the micro-batch in this step, from 0.
        last: whether it is the last of this step.

    Returns:
        the factor by which gradients must be multiplied after the last backward pass; see `_factors`.
    """
    strategy, precision, kept = state.strategy, state.precision, state.strategy.unwrapped.kept
    metrics = None if micro_batch.filler else state.metrics
    without_trace = batch_norm.without_trace(strategy.forward) if micro_batch.filler else contextlib.nullcontext()
    seed = seed_of(state, result.step, number, result.places)
    seed_forward(seed, state.world.device, strategy.unwrapped.private)
    with strategy.gradient_sync(last), without_trace:
        kept.is_wanted = metrics is not None and metrics.wants_output
        with precision.autocast():
            call = yield micro_batch
            losses: Losses = strategy.forward(micro_batch.batch, call)
        output = kept.take()
        losses = {head: value.to(state.world.device) for head, value in losses.items()}  # a constant may be elsewhere
        if result.counting is not None:
            result.wait_for_units(result.counting, state.world.device)
        factors, rest = _factors(state, losses, result.totals, micro_batch, fillers_count)
        result.add(losses, strategy.backward(losses, factors, last))
    if metrics is not None and output is not None:
        metrics.add(map_tensors(output, Tensor.detach), micro_batch.batch, result.places[number])
    return rest


def driven(steps: Generator[Any, Any, R], answer: Callable[[Any], Any]) -> R:
    """The value that a generator returns, when it is sent `answer(value)` for each value that it yields."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send(answer(asked))
    except StopIteration as end:
        found: R = end.value
        return found
    finally:  # if `answer` fails, what the generator holds open ends first, such as the writing of a checkpoint
        steps.close()


def seed_of(state: TrainState, step: int, number: int, places: Sequence[int]) -> int:
    """The seed of the forward pass of a micro-batch on the rank of `state.world`: equal within a tensor group.

    Args:
        number: of the micro-batch in this step, from 0.
        places: see `StepResult`.
    """
    place = places[number]
    return derive_seed(state.seed, step, state.world.data_ranks[place], number - places.index(place))


def _count_units(
    state: TrainState, micro_batches: Sequence[MicroBatch], samples: int
) -> tuple[dict[str, float], Counting | None]:
    """Count W: units by head over all ranks.

    If the unit is the sample and no sample can be lost, the plan knows W, and the ranks do not communicate. Otherwise,
    a rank that has units knows that no rank skips the step. It needs W only after its first forward pass, and gets a
    function that waits for the other ranks. A rank without units waits here.
    """
    for micro_batch in micro_batches:
        names = tuple(micro_batch.weights or ())
        if names != state.weight_heads:
            state.weight_heads = heads.agree(state.weight_heads, names, method="Task.weight", world=state.world)
    names = state.weight_heads or ((SAMPLES,) if state.must_agree_on_weights else ())
    if not names:
        return {SAMPLES: float(samples)}, None
    summed = _sum_units(state, micro_batches, names)
    has_units = any(weight for micro_batch in micro_batches for weight in _units(micro_batch).values())

    def counting() -> dict[str, float]:
        return dict(zip(names, summed(), strict=True))

    return ({}, counting) if has_units else (counting(), None)


def _units(micro_batch: MicroBatch) -> Mapping[str, float]:
    return {SAMPLES: micro_batch.samples} if micro_batch.weights is None else micro_batch.weights


def _sum_units(
    state: TrainState, micro_batches: Sequence[MicroBatch], names: Sequence[str]
) -> Callable[[], list[float]]:
    """The units of each head, over all ranks. The function that is returned waits for the other ranks."""
    units = [[0.0] * len(names) for _ in state.world.data_ranks]
    for number, micro_batch in enumerate(micro_batches):
        of_shard = units[number * len(units) // len(micro_batches)]
        for place, name in enumerate(names):
            of_shard[place] += _units(micro_batch).get(name, 0.0)
    return state.world.sum_in_order_later(units)


def _begin(state: TrainState, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
    """Give all ranks the same buffers, let the strategy warm up, and set the learning rate of the update."""
    began = state.strategy.begin_step(TrialPass(lambda: micro_batches[0].batch, state.precision, state.coefficients))
    result.marks += [] if began is None else [began]
    set_lr(state.optimizer, state.schedule(result.step - state.skipped))


def _skipped(state: TrainState, result: StepResult) -> StepResult:
    clear_grads(state.optimizer)
    state.skipped += 1
    return result


def _count_late(state: TrainState, micro_batches: Sequence[MicroBatch], result: StepResult) -> float:
    """Put W into `result`, when all micro-batches of all ranks have counted their units.

    Returns:
        the factor of the gradients, which were divided by the number of samples.
    """
    names = list(micro_batches[0].weights or ["loss"])
    result.totals = {"loss": _sum_units(state, micro_batches, names)()[0]}
    return result.samples / result.totals["loss"] if result.totals["loss"] else 1.0


def _factors(
    state: TrainState, losses: Losses, totals: Mapping[str, float], micro_batch: MicroBatch, fillers_count: bool
) -> tuple[dict[str, Tensor], float]:
    """The factor of each loss in the backward pass, and the factor of the gradients afterwards.

    The factor of a loss is c[k] * world / W[k], times the loss scale of fp16. It is zero for a filler, and for a head
    without units in the global batch. Losses that are constants and have coefficient 0 have no factor.

    A loss of 16 bits would round this factor by up to 0.2 %, depending on the number of ranks. So its factor
    is a power of two. The rest of c[k] * world / W[k] is the factor of the gradients: they are multiplied by it after
    the last backward pass of the step. With several heads, the rest is that of the first head, and the factors of the
    other heads are relative to it.

    Raises:
        TrainingError: see `_agree_on_losses`.
    """
    agreed, constants = _agree_on_losses(state, losses, totals, micro_batch)
    world = state.strategy.divisor
    units = {head: totals.get(head, totals.get(SAMPLES, 0.0)) for head in losses}
    coefficients = {head: state.coefficients.get(head, 1.0) for head in losses}
    rest = 1.0
    if agreed.is_narrow:
        first = next((head for head in losses if units[head] and coefficients[head]), None)
        if first is not None:
            rest = 2 * math.frexp(coefficients[first] * world / units[first])[0]
    factors = {}
    for head, value in losses.items():
        if head in constants:
            continue
        counts = bool(units[head]) and (not micro_batch.filler or fillers_count)
        factor = coefficients[head] * world / units[head] if counts else 0.0
        factors[head] = state.precision.scaler.scale(torch.full_like(value, factor / rest))
    return factors, rest


def _agree_on_losses(
    state: TrainState, losses: Losses, totals: Mapping[str, float], micro_batch: MicroBatch
) -> tuple[heads.AgreedLosses, set[str]]:
    """Check the heads of losses, and in the first step of a process agree on them with the other ranks.

    Returns:
        facts that all ranks know; and the heads whose losses are constants, because they are only logged, or none of
        their parameters is trainable.

    Raises:
        TrainingError: the loss and the weight have different heads, a coefficient belongs to no head, or a loss with
            units depends on no trainable parameter.
    """
    if SAMPLES not in totals and losses.keys() != totals.keys():
        raise TrainingError(
            f"the loss has the heads {sorted(losses)}, the weight has {sorted(totals)}",
            where="Task.loss and Task.weight",
            remedy="return the same keys from both; a single tensor is the head 'loss'",
        )
    weights = micro_batch.weights
    with_units = set(losses) if weights is None else {head for head, weight in weights.items() if weight}
    with_units = set() if micro_batch.filler else with_units
    if state.agreed is None:
        heads.check_coefficients(state.coefficients, losses)
        state.agreed = heads.agree_on_losses(
            losses, with_units=with_units, may_be_frozen=state.has_frozen, world=state.world
        )
    if tuple(losses) != state.agreed.names:
        heads.agree(state.agreed.names, tuple(losses), method="Task.loss", world=state.world)
    only_logged = set()
    for head, value in losses.items():
        if value.requires_grad:
            continue
        if not state.coefficients.get(head, 1.0) or head in state.agreed.frozen:
            only_logged.add(head)
        elif head in with_units and not state.has_frozen:
            raise TrainingError(
                f"the loss of head {head!r} depends on no trainable parameter",
                where="Task.loss",
                remedy="compute it from the model's output, without detach(), .item() or torch.no_grad(); "
                "or give it the coefficient 0",
            )
    return state.agreed, only_logged
