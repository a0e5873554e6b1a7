"""A pass outside the training: the forward and backward pass of a micro-batch, as any rank would run them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.core.data.loader import MicroBatch, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.data.randomness import restored_generators
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.strategy import Losses, Strategy
from lockstep.core.step import StepResult, TrainState, driven, forward_backward_step
from lockstep.parts.digest import digest_of_batch
from lockstep.watch.gradients import Detail, Seen, watched


class _Alone:
    """A strategy whose backward passes exchange nothing and leave no gradient."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def backward(self, losses: Losses, factors: Losses, last: bool) -> None:
        self.strategy.backward_alone(losses, factors)


@dataclasses.dataclass(frozen=True)
class Share:
    """The first micro-batch of a rank in a step, and the divisor of its losses."""

    rank: int
    """Or virtual rank, if there are any."""
    step: int
    """Counted from 0."""
    totals: Mapping[str, float]
    """W; see `StepResult.totals`."""
    number: int = 0
    """Of the micro-batch in the step."""


@contextlib.contextmanager
def _restored_numbers(task: Any) -> Generator[None, None, None]:
    """At the end, numbers and tensors in attributes of the task are restored: a loss may count its calls."""
    attributes = getattr(task, "__dict__", {})
    kept = {name: one for name, one in attributes.items() if isinstance(one, int | float | Tensor)}
    values = [(one, one.clone()) for one in kept.values() if isinstance(one, Tensor)]
    try:
        yield
    finally:
        for tensor, value in values:
            tensor.data.copy_(value)
        attributes.update(kept)


def trial(
    state: TrainState, micro_batch: MicroBatch, share: Share, leaves: Mapping[str, Tensor], *, detailed: bool = False
) -> Seen:
    """Compute the first micro-batch of a rank as that rank does. With shards, all ranks call it.

    Afterwards, model, gradients, buffers, metrics, random generators, and numbers in the task are restored.

    Args:
        leaves: of `Strategy.leaves`.
        detailed: see `Seen.detailed`.
    """
    world = dataclasses.replace(state.world, rank=share.rank, virtual_ranks=None)  # seeds depend on the number
    alone: Any = _Alone(state.strategy)
    shadow = dataclasses.replace(state, world=world, strategy=alone, metrics=None, unfreezing=None)
    result = StepResult(share.step, 0, totals=dict(share.totals), places=[0] * (share.number + 1))
    forward = state.strategy.unwrapped
    with (
        restored_state(forward, "watch"),
        _restored_numbers(getattr(forward.loss, "__self__", None)),
        restored_generators(world.device),
        watched(forward, leaves, sums=leaves if detailed else (), each=detailed, ranks=world.size) as seen,
    ):
        driven(forward_backward_step(shadow, micro_batch, result, share.number, last=False), lambda _: None)
    micro_batch.let_go()
    return seen


def detail(state: TrainState, micro_batch: MicroBatch, share: Share, leaves: Mapping[str, Tensor]) -> Detail:
    """What `trial` computes, by head and parameter, on the host."""
    batch = digest_of_batch(micro_batch.batch)
    found = trial(state, micro_batch, share, leaves, detailed=True).detailed()
    return dataclasses.replace(found, batch=batch)


def read(micro_batches: MicroBatches, plan: MicroBatchPlan, like: MicroBatch, device: torch.device) -> MicroBatch:
    """Read a micro-batch in this process, and leave the random generators unchanged.

    Args:
        like: a micro-batch of the training; this one is moved to the device like it.
    """
    with restored_generators(device):
        found = micro_batches[plan]
    found.copy = like.copy
    return found
