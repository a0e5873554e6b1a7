"""The exact step: one optimizer update that is the same however its global batch was cut.

    W[k] = sum over ranks and micro-batches of w[r,m,k]          units (samples, labels, pixels) of head k
    loss = sum_k c[k] * L[r,m,k] * world / W[k]                  L: the SUM of the loss over this micro-batch's units

DDP and FSDP average gradients over `world` ranks, so the gradient is that of sum_k c[k] * (sum of L[k]) / W[k]: the mean over
the units of the whole global batch, and never a mean of means.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import MicroBatch
from lockstep.data.order import derive_seed
from lockstep.data.randomness import seed_forward
from lockstep.distributed.gradients import clip_grads, grad_norm, scale_grads
from lockstep.distributed.precision import Precision
from lockstep.distributed.strategy import Losses, Strategy, backward_roots
from lockstep.distributed.world import World
from lockstep.engine import batch_norm, heads
from lockstep.engine.ema import Ema
from lockstep.engine.out_of_memory import Guard, StepTooLarge, free_memory
from lockstep.engine.schedule import Schedule, set_lr
from lockstep.engine.unfreeze import Unfreezing
from lockstep.errors import TrainingError

SAMPLES = ""  # the key of W where the unit of every head is the sample


@dataclass
class TrainState:
    """All that changes during training, and what changes it.

    strategy: how the model is spread over ranks; it holds the module that the step calls. step: global batches consumed so far. skipped: how many of them moved no
    weight (fp16 overflow, or not one valid unit); the schedule counts `step - skipped`, the updates. averages: of the
    weights, where they are wanted. unfreezing: what is trainable when; the strategy was
    wrapped with what is trainable at `step`. guard: gives a step up that does not fit into memory. weight_heads, agreed:
    what all ranks know of the heads since this process's first step, or since other parameters train.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    precision: Precision
    schedule: Schedule
    guard: Guard
    seed: int = 0
    clip_norm: float | None = None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    must_agree_on_weights: bool = False
    averages: Ema | None = None
    unfreezing: Unfreezing | None = None
    step: int = 0
    skipped: int = 0
    weight_heads: heads.HeadNames | None = None
    agreed: heads.AgreedLosses | None = None

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.forward.parameters() if p.requires_grad]
        self.all_train = all(p.requires_grad for p in self.forward.parameters())

    @property
    def forward(self) -> nn.Module:
        """The module that the step calls."""
        return self.strategy.forward

    @property
    def world(self) -> World:
        """The ranks that train."""
        return self.strategy.world

    def unfreeze(self) -> None:
        """Make trainable what is so from this step on."""
        if self.unfreezing is not None and self.step in self.unfreezing.steps:
            self.unfreezing.apply(self.step)
            self.agreed = None
            self.rewrap()

    def rewrap(self) -> None:
        """Arrange the exchange of gradients for the parameters that are trainable now."""
        self.strategy.rewrap()
        self.guard.reset()
        self.__post_init__()

    @contextlib.contextmanager
    def guarded(self, batch: Any) -> Generator[None, None, None]:
        """Around the forward and backward passes of a step: where it does not fit into memory, it is undone on all ranks.

        Raises:
            StepTooLarge: weights, buffers and `step` are as they were.
        """
        try:
            with self.guard.step(batch, self.step, self.agreed is not None):
                yield
        except StepTooLarge:
            self.step -= 1
            self.optimizer.zero_grad(set_to_none=True)
            free_memory(self.world.device)
            self.rewrap()  # DDP waits for a backward pass that will not come
            raise


@dataclass
class StepResult:
    """What one step did on this rank. Tensors stay on the device: reading them is left to logging steps.

    totals: W by head over all ranks, or under `SAMPLES` for all heads.
    losses: loss sums by head, of each micro-batch that ran. counted: whether it counts (a filler does not).
    indices: samples of each micro-batch. bad: messages about unreadable ones.
    grad_norm: global norm before clipping, where it was computed. samples: in the global batch.
    """

    step: int
    samples: int
    totals: dict[str, float]
    indices: list[tuple[int, ...]]
    counted: list[bool]
    bad: list[str]
    losses: list[Losses] = field(default_factory=list)
    grad_norm: Tensor | None = None
    applied: bool = False


def train_step(state: TrainState, micros: Sequence[MicroBatch], samples: int, want_norm: bool = False) -> StepResult:
    """Consume one global batch and apply one update.

    Args:
        micros: this rank's micro-batches; equally many on every rank.
        samples: size of the global batch, over all ranks, from the plan.
        want_norm: compute the gradient norm also where nothing is clipped.

    Raises:
        TrainingError: loss and weight have other heads; in a process's first step, a parameter without gradient.
        StepTooLarge: see `Guard`; nothing was changed.
    """
    strategy, optimizer, scaler = state.strategy, state.optimizer, state.precision.scaler
    world = strategy.world
    state.unfreeze()
    totals = _count(state, micros, samples)  # W: by head, or one for all heads where the unit is the sample
    bad = [message for micro in micros for _, message in micro.bad]
    result = StepResult(
        state.step, samples, totals, [micro.indices for micro in micros], [not micro.filler for micro in micros], bad
    )
    state.step += 1
    if not any(totals.values()):  # nothing to learn from anywhere: every rank knows, so every rank skips
        state.skipped += 1
        return result

    rest = 1.0  # what gradients are multiplied by after the backward passes; see `_factors`
    with state.guarded(micros[0].batch) if state.guard.enabled else contextlib.nullcontext():
        if strategy.must_warm_up:
            ignored_heads = [head for head, coefficient in state.coefficients.items() if not coefficient]
            strategy.warm_up(micros[0].batch, state.precision, ignored_heads)
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            seed_forward(derive_seed(state.seed, result.step, world.data_rank, number), world.device)
            without_trace = batch_norm.without_trace(strategy.forward) if micro.filler else contextlib.nullcontext()
            with strategy.gradient_sync(last), without_trace:
                with state.precision.autocast():
                    losses: Losses = strategy.forward(micro.batch)
                losses = {head: value.to(world.device) for head, value in losses.items()}  # a constant may be elsewhere
                factors, rest = _factors(state, losses, totals, micro, 0 if micro.filler else world.data_size)
                if last and state.guard.is_pending:
                    state.guard.agree()
                checks_used = last and strategy.must_check_used
                if checks_used:
                    strategy.check_all_used({head: losses[head] for head in factors})
                scaled = {head: scaler.scale(factor) for head, factor in factors.items()}
                tensors, gradients = backward_roots(strategy, losses, scaled, last=last)
                if tensors:
                    torch.autograd.backward(tensors, gradients)
                if last and not checks_used:
                    strategy.check_reduced()
            result.losses.append({head: value.detach() for head, value in losses.items()})
    if rest != 1.0:
        scale_grads(state.parameters, rest)

    scaler.unscale_(optimizer)
    if want_norm or state.clip_norm is not None:
        result.grad_norm = grad_norm(state.parameters, strategy.shard_group)
        if state.clip_norm is not None:
            clip_grads(state.parameters, state.clip_norm, result.grad_norm)
    set_lr(optimizer, state.schedule(result.step - state.skipped))
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    result.applied = scaler.get_scale() >= scale  # fp16 lowers its scale when, and only when, it skipped
    state.skipped += not result.applied
    if state.averages is not None and result.applied:
        state.averages.update()
    return result


def _count(state: TrainState, micros: Sequence[MicroBatch], samples: int) -> dict[str, float]:
    """W by head. Where units are samples and none can be lost, the plan knows W and no rank needs to ask another."""
    for micro in micros:
        names = tuple(micro.weights or ())
        if names != state.weight_heads:
            state.weight_heads = heads.agree(state.weight_heads, names, method="Task.weight", world=state.world)
    if not state.weight_heads:
        if not state.must_agree_on_weights:
            return {SAMPLES: float(samples)}
        return {SAMPLES: state.world.data_sum([sum(micro.samples for micro in micros)])[0]}
    mine = [sum(micro.weights[head] for micro in micros if micro.weights) for head in state.weight_heads]
    return dict(zip(state.weight_heads, state.world.data_sum(mine), strict=True))


def _factors(
    state: TrainState, losses: Losses, totals: Mapping[str, float], micro: MicroBatch, world: float
) -> tuple[dict[str, Tensor], float]:
    """c[k] * world / W[k] by head, without constants of coefficient 0. Zero for a head without any unit in the global batch,
    and where `world` is zero (a filler).

    A loss of 16 bits would round its factor, by up to 0.2 % and in another way for another number of ranks. So its factor
    is a power of two, and what is left of c[k] * world / W[k] comes second: gradients are multiplied by it after the step's
    last backward pass. (With several such heads it is what is left for the first; factors of the others are relative to it.)
    """
    if SAMPLES not in totals and losses.keys() != totals.keys():
        raise TrainingError(
            f"the loss has the heads {sorted(losses)}, the weight has {sorted(totals)}",
            where="Task.loss and Task.weight",
            remedy="return the same keys from both; a single tensor is the head 'loss'",
        )
    units = set(losses) if micro.weights is None else {head for head, weight in micro.weights.items() if weight}
    if state.agreed is None:
        heads.check_coefficients(state.coefficients, losses)
        with_units = set() if micro.filler else units
        state.agreed = heads.agree_on_losses(
            losses, with_units=with_units, may_be_frozen=not state.all_train, world=state.world
        )
    if tuple(losses) != state.agreed.names:
        heads.agree(state.agreed.names, tuple(losses), method="Task.loss", world=state.world)
    whole = {head: totals.get(head, totals.get(SAMPLES, 0.0)) for head in losses}
    coefficients = {head: state.coefficients.get(head, 1.0) for head in losses}
    rest = 1.0
    if state.agreed.is_narrow:
        first = next((head for head in losses if whole[head] and coefficients[head]), None)
        rest = (
            2 * math.frexp(coefficients[first] * state.world.data_size / whole[first])[0] if first is not None else 1.0
        )
    factors = {}
    for head, value in losses.items():
        if not value.requires_grad and (not coefficients[head] or head in state.agreed.frozen):
            continue  # only looked at, or nothing of it trains
        if not value.requires_grad and not micro.filler and head in units and state.all_train:
            remedy = "compute it from the model's output, without detach(), .item() or torch.no_grad(); or give it the coefficient 0"
            raise TrainingError(
                f"the loss of head {head!r} depends on no trainable parameter", where="Task.loss", remedy=remedy
            )
        factor = coefficients[head] * world / whole[head] if whole[head] else 0.0
        factors[head] = torch.full_like(value, factor / rest)
    return factors, rest
