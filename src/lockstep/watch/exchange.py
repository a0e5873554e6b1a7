"""The exchange of gradients is linear: its result must be the mean of its inputs, which signed sums verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.parallel import sharded_tensor
from lockstep.core.step import TrainState
from lockstep.watch.gradients import Seen
from lockstep.watch.signed_sums import SIGNS, signed_sums, stacked

_TIMES = 16.0
"""An exchange may differ by this many roundings of its number format, each as large as the gradient's norm."""
_LEAST_FP16 = 2.0**-24
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Checked:
    """The result of a step's exchange."""

    name: str = ""
    """The first parameter whose gradient is not the mean of the ranks' inputs; empty: there is none."""
    factor: float = 1.0
    """Of the gradients after the exchange: they are unscaled and clipped."""
    bound: float = 0.0
    """For the signed sums of this parameter."""


def check(
    state: TrainState, own: Seen, names: Sequence[str], mine: Sequence[str], micro_batches: int, reduced_in: str | None
) -> Checked:
    """Compare the reduced gradients with the ranks' inputs, with one small reduction. All ranks make the same call.

    A signed sum of a mean is the mean of the signed sums. Rounding adds an error of random sign to each element, whose
    signed sum is about eps * |gradient|_2 * sqrt(ranks). Below a format's smallest normal number, it also adds about
    this number to each element. An error of one bit below that is not detected.

    Args:
        own: this rank's results, with its sums over all micro-batches.
        names: of the examined parameters, the same on all ranks.
        mine: those whose gradients this rank sums up after the exchange. Ranks that hold the same rows share the work:
        their digests show that they have the same bits.
        micro_batches: of each rank in this step.
        reduced_in: `parallel.reduce_dtype`, the number format of the exchange, if it differs from that of the
        gradients.
    """
    world, nothing = state.world.size, [0.0] * (SIGNS + 1)
    given = dict(zip(own.sums, stacked(list(own.sums.values())), strict=True))
    reduced = _reduced(state, mine)
    flat: list[float] = []
    for name in names:
        *sums, square = given.get(name, nothing)
        flat += [*(one / world for one in sums), square**0.5 / world, *reduced.get(name, nothing)[:SIGNS]]
    total = state.world.all_sum(flat)
    width = 2 * SIGNS + 1
    rows = [total[start : start + width] for start in range(0, len(total), width)]
    formats = {*own.dtypes.values(), *(one.dtype for one in _grads(state).values())}
    found = [torch.finfo(of) for of in formats | ({_FORMATS[reduced_in]} if reduced_in else set())]
    rounding = _TIMES * max((of.eps for of in found), default=0.0) * (world * micro_batches) ** 0.5
    # For fp16, the smallest number of all: its subnormal numbers are never flushed to zero.
    least = max((min(of.tiny, _LEAST_FP16) for of in found), default=0.0)
    floors = [_TIMES * least * world * micro_batches * own.sizes[name] ** 0.5 for name in names]
    return _judge(names, rows, rounding, floors)


def _judge(names: Sequence[str], rows: Sequence[Sequence[float]], rounding: float, floors: Sequence[float]) -> Checked:
    """Compare rows of: means of signed sums, the mean of the norms, and signed sums after the exchange.

    A gradient that was not finite before the exchange says nothing about it. The loop ends such a training.
    """
    bounds = [rounding * row[SIGNS] + floor for row, floor in zip(rows, floors, strict=True)]
    finite = [
        one for one in zip(names, rows, bounds, floors, strict=True) if all(map(math.isfinite, one[1][: SIGNS + 1]))
    ]
    pairs = [
        (one, two, bound) for _, row, bound, _ in finite for one, two in zip(row[:SIGNS], row[SIGNS + 1 :], strict=True)
    ]
    factor, unsure = _factor(pairs)
    for name, row, before, floor in finite:
        bound = abs(factor) * before + floor
        for one, two in zip(row[:SIGNS], row[SIGNS + 1 :], strict=True):
            if not abs(two - factor * one) <= bound + unsure * abs(one):  # also true of NaN
                return Checked(name, factor, bound)
    return Checked(factor=factor)


def _factor(pairs: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The factor on the gradients after the exchange, and its uncertainty.

    It is the median over the sums that are far above their rounding, so that a wrong gradient does not affect it; then
    the least squares of the sums that agree with it.

    Args:
        pairs: sums before and after the exchange, and the bound of the first.
    """
    clear = [(a, b, bound) for a, b, bound in pairs if abs(a) > 100 * bound] or list(pairs)
    ratios = sorted((b / a, bound / abs(a)) for a, b, bound in clear if a)
    if not ratios:
        return 1.0, 0.0
    middle, near = ratios[len(ratios) // 2]
    agree = [(a, b, bound) for a, b, bound in clear if abs(b - middle * a) <= 2 * abs(middle) * (bound + near * abs(a))]
    square = sum(a * a for a, _, _ in agree)
    if not square:
        return middle, 0.0
    factor = sum(a * b for a, b, _ in agree) / square
    return factor, 4 * abs(factor) * (sum(bound * bound for _, _, bound in agree) / square) ** 0.5


def _grads(state: TrainState) -> dict[str, Tensor]:
    named = state.strategy.trainable.items()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _reduced(state: TrainState, names: Sequence[str]) -> dict[str, list[float]]:
    """The signed sums of the gradients with these names that this rank holds."""
    sums, grads = {}, _grads(state)
    for name in grads.keys() & set(names):
        shard = sharded_tensor.local_shard(grads[name])
        sums[name] = signed_sums(shard.local, shard.start * _row(shard.shape))
    return dict(zip(sums, stacked(list(sums.values())), strict=True))


def _row(shape: Sequence[int]) -> int:
    """Elements of a row."""
    return int(torch.Size(shape[1:]).numel())


def wrong_shards(state: TrainState, found: Checked, gradient: Tensor | None, shards: int, mine: int) -> list[int]:
    """The shards of a parameter whose reduced gradient is wrong. All ranks make the same call.

    Args:
        gradient: this rank's whole input. None: this rank has none of this parameter.
        shards: number of shards of rows.
        mine: the number of this rank's shard.
    """
    world = state.world
    parameter = state.strategy.trainable[found.name]
    rows, row = int(parameter.shape[0]) if parameter.ndim else 1, _row(parameter.shape)
    each = -(-rows // shards)  # as torch.chunk splits
    flat: list[float] = []
    for number in range(shards):
        first, last = min(number * each, rows) * row, min((number + 1) * each, rows) * row
        part = torch.zeros(SIGNS + 1) if gradient is None else signed_sums(gradient.reshape(-1)[first:last], first)
        flat += [one / world.size for one in part.tolist()[:SIGNS]]
    expected = world.all_sum(flat)[mine * SIGNS : (mine + 1) * SIGNS]
    held = _reduced(state, [found.name]).get(found.name, [0.0] * SIGNS)[:SIGNS]
    is_wrong = any(not abs(b - found.factor * a) <= 2 * found.bound for a, b in zip(expected, held, strict=True))
    of_ranks: list[bool] = world.broadcast(world.gather(is_wrong))
    return [rank for rank, wrong in enumerate(of_ranks) if wrong]
