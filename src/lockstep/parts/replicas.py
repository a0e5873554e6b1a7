"""Comparisons of the ranks of a training: digests of their states, and the losses of one batch."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import seed_forward
from lockstep.core.data.tensors import map_tensors, moved, moves_itself
from lockstep.core.parallel import sharded_tensor
from lockstep.core.step import TrainState
from lockstep.parts import determinism
from lockstep.parts.checks.dry_run import without_trace
from lockstep.parts.digest import Digest, digests

StateDigests = dict[str, tuple[int, int, Digest]]
"""By tensor: its first row on this rank, the number of its rows here, and the digest of these rows."""
RankLosses = dict[str, str]
"""The losses of a batch on one rank by head, as exact hexadecimal numbers."""

_SHOWN = 8  # ranks in an error


def tensors_of_state(state: TrainState) -> dict[str, Tensor]:
    """All tensors that ranks compare, by name: `model.`, `optimizer.`, `ema.`, and buffers outside checkpoints."""
    model = state.strategy.unwrapped.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, slots in state.optimizer.state.items():
        values |= {f"optimizer.{names[id(parameter)]}.{slot}": value for slot, value in slots.items()}
    if state.averages is not None:
        values |= {f"ema.{name}": value for name, value in state.averages.tensors.items()}
    values |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers() if f"model.{name}" not in values}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def digests_of(tensors: Mapping[str, Tensor]) -> StateDigests:
    """The digests of tensors; for sharded tensors, those of this rank's rows.

    If a rank holds only some columns, their numbers follow the name: `model.a[:, 0:4]`.
    """
    shards = {name: sharded_tensor.local_shard(value) for name, value in tensors.items()}
    shards = {f"{n}[:, {s.columns.start}:{s.columns.stop}]" if s.columns else n: s for n, s in shards.items()}
    found = digests({name: shard.local for name, shard in shards.items()})
    return {
        name: (shard.start, len(shard.local) if shard.local.ndim else 1, found[name]) for name, shard in shards.items()
    }


class ReplicaDifference(NamedTuple):
    """A tensor with rows that ranks hold with different values."""

    name: str
    ranks: tuple[int, int]
    """The first two ranks that differ."""
    who: str
    """The ranks that differ, in words."""


def differing(by_rank: Sequence[Mapping[str, tuple[int, int, Digest]]]) -> list[ReplicaDifference]:
    """The tensors with rows that some ranks hold with different values, in the order of the first rank.

    Args:
        by_rank: the digests of each rank.
    """
    held: dict[tuple[str, int, int], dict[int, Digest]] = {}
    for rank, of_rank in enumerate(by_rank):
        for name, (start, rows, number) in of_rank.items():
            held.setdefault((name, start, rows), {})[rank] = number
    found: dict[str, ReplicaDifference] = {}
    for (name, _, _), numbers in held.items():
        first_rank, first = next(iter(numbers.items()))
        other = next((rank for rank, number in numbers.items() if number != first), None)
        if other is not None:
            found.setdefault(name, ReplicaDifference(name, (first_rank, other), who_differs(numbers)))
    return list(found.values())


def differing_ranks(values: Mapping[int, Any]) -> list[int]:
    """The ranks that differ from the majority; all ranks without a majority; none if all are equal.

    Args:
        values: by rank.
    """
    value, most = collections.Counter(values.values()).most_common(1)[0]
    if most == len(values):
        return []
    return [rank for rank, one in values.items() if one != value or 2 * most <= len(values)]


def who_differs(values: Mapping[int, Any]) -> str:
    """The ranks that differ, in words; by majority, if more than half of them have the same value.

    Args:
        values: by rank. Not all are equal.
    """
    others = differing_ranks(values)
    if len(others) < len(values):
        rest = [rank for rank in values if rank not in others]
        return f"{_ranks(others)} differ{'s' * (len(others) == 1)} from {_ranks(rest)}"
    first, *ranks = values
    return f"{_ranks([first, next(rank for rank in ranks if values[rank] != values[first])])} differ"


def _ranks(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[: _SHOWN - 1])) if len(ranks) > _SHOWN else ", ".join(map(str, ranks[:-1]))
    return f"ranks {shown} and {f'{len(ranks) - _SHOWN + 1} more' if len(ranks) > _SHOWN else ranks[-1]}"


def losses_of_one_batch(state: TrainState, batch: Any) -> list[RankLosses]:
    """The losses of rank 0's `batch` on every rank; the same list on all ranks. It leaves no trace in the training.

    Before it, all ranks get the buffers of rank 0, as before the next step.
    """
    world, device = state.world, state.world.device
    batch = world.broadcast(batch)
    if world.rank and device.type != "cpu":  # it arrived on the CPU
        batch = map_tensors(
            batch,
            lambda tensor: tensor.to(device),
            lambda item: moved(item, device) if moves_itself(item) else NotImplemented,
        )
    state.strategy.begin_step()
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in state.forward.modules())
    with (
        determinism.same_convolutions(),  # with compute.cudnn_benchmark, each rank measures and chooses independently
        state.strategy.inference() as forward,
        without_trace(forward, world, compiled, "probe"),
        state.precision.autocast(),
    ):
        # A model that draws in evaluation makes the same draws on all ranks.
        seed_forward(derive_seed(state.seed, state.step), device, forward.private)
        losses = forward(batch)
    own = {head: float(loss).hex() for head, loss in losses.items()}
    of_all_ranks: list[RankLosses] = world.broadcast(world.gather(own))
    return of_all_ranks


def other_losses(losses: Sequence[RankLosses]) -> tuple[str, str] | None:
    """The first head whose loss differs between ranks, and the ranks, in words. None: there is none."""
    for head in losses[0]:
        values = {rank: of_rank[head] for rank, of_rank in enumerate(losses)}
        if len(set(values.values())) > 1:
            return head, who_differs(values)
    return None
