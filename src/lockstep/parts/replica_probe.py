"""Compares the ranks of a training with each other: digests of their states, and the losses of one batch.

`lockstep verify` calls the functions. A training with `train.probe_every` calls `ReplicaProbe`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lockstep.core.checks.dry_run import without_trace
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import seed_forward
from lockstep.core.data.tensors import map_tensors, moved, moves_itself
from lockstep.core.devices import determinism
from lockstep.core.errors import TrainingError
from lockstep.core.parallel import sharded_tensor
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.step import TrainState
from lockstep.parts.digest import digests

StateDigests = dict[str, tuple[int, int, int]]
"""By tensor: its first row on this rank, the number of its rows here, and the digest of these rows."""
RankLosses = dict[str, str]
"""The losses of a batch on one rank by head, as exact hexadecimal numbers."""

_SHOWN = 8  # ranks in an error
_OF_BUFFERS = ("model", "buffer")  # how names of buffers begin in `tensors_of_state`


def tensors_of_state(state: TrainState) -> dict[str, Tensor]:
    """All tensors that ranks compare, by name: `model.`, `optimizer.`, `ema.`, and buffers of no checkpoint."""
    model = state.strategy.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, slots in state.optimizer.state.items():
        values |= {f"optimizer.{names[id(parameter)]}.{slot}": value for slot, value in slots.items()}
    if state.averages is not None:
        values |= {f"ema.{name}": value for name, value in state.averages.tensors.items()}
    values |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers() if f"model.{name}" not in values}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def digests_of(tensors: Mapping[str, Tensor]) -> StateDigests:
    """The digests of tensors, of sharded tensors those of this rank's rows."""
    shards = [sharded_tensor.local_shard(value) for value in tensors.values()]
    numbers = digests([shard.local for shard in shards])
    return {
        name: (shard.start, len(shard.local) if shard.local.ndim else 1, number)
        for name, shard, number in zip(tensors, shards, numbers, strict=True)
    }


class Difference(NamedTuple):
    """A tensor of which ranks hold the same rows with other values."""

    name: str
    ranks: tuple[int, int]
    """The first two ranks that differ."""
    who: str
    """Which ranks differ, in words."""


def differing(by_rank: Sequence[Mapping[str, tuple[int, int, int]]]) -> list[Difference]:
    """The tensors of which some ranks hold the same rows with other values, in the order of the first rank.

    Args:
        by_rank: the digests of each rank.
    """
    held: dict[tuple[str, int, int], dict[int, int]] = {}
    for rank, of_rank in enumerate(by_rank):
        for name, (start, rows, number) in of_rank.items():
            held.setdefault((name, start, rows), {})[rank] = number
    found: dict[str, Difference] = {}
    for (name, _, _), numbers in held.items():
        first_rank, first = next(iter(numbers.items()))
        other = next((rank for rank, number in numbers.items() if number != first), None)
        if other is not None:
            found.setdefault(name, Difference(name, (first_rank, other), who_differs(numbers)))
    return list(found.values())


def who_differs(values: Mapping[int, Any]) -> str:
    """Which ranks differ, in words; by majority, where more than half of them have the same value.

    Args:
        values: by rank. Not all are equal.
    """
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    most = max(groups.values(), key=len)
    if 2 * len(most) > len(values):
        others = [rank for rank in values if rank not in most]
        return f"{_ranks(others)} differ{'s' * (len(others) == 1)} from {_ranks(most)}"
    first, second, *_ = groups.values()
    return f"{_ranks([first[0], second[0]])} differ"


def _ranks(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[: _SHOWN - 1])) if len(ranks) > _SHOWN else ", ".join(map(str, ranks[:-1]))
    return f"ranks {shown} and {f'{len(ranks) - _SHOWN + 1} more' if len(ranks) > _SHOWN else ranks[-1]}"


def losses_of_one_batch(state: TrainState, batch: Any) -> list[RankLosses]:
    """The losses of rank 0's `batch` on every rank; the same list on all ranks. It leaves no trace in the training.

    Buffers are those of rank 0 before, as before the next step.
    """
    world, device = state.world, state.world.device
    batch = world.broadcast(batch)
    if world.rank and device.type != "cpu":  # it arrived on the CPU
        batch = map_tensors(
            batch,
            lambda tensor: tensor.to(device),
            lambda item: moved(item, device) if moves_itself(item) else NotImplemented,
        )
    state.strategy.sync_buffers()
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in state.forward.modules())
    with (
        determinism.same_convolutions(),  # with compute.cudnn_benchmark, each rank measures and chooses for itself
        state.strategy.inference() as forward,
        without_trace(forward, world, compiled, "probe"),
        state.precision.autocast(),
    ):
        # A model that draws in evaluation draws the same on all ranks.
        seed_forward(derive_seed(state.seed, state.step), device)
        losses = forward(batch)
    own = {head: float(loss).hex() for head, loss in losses.items()}
    of_all_ranks: list[RankLosses] = world.broadcast(world.gather(own))
    return of_all_ranks


def other_losses(losses: Sequence[RankLosses]) -> tuple[str, str] | None:
    """The first head of which ranks have other losses, and which ranks differ, in words. None: there is none."""
    for head in losses[0]:
        values = {rank: of_rank[head] for rank, of_rank in enumerate(losses)}
        if len(set(values.values())) > 1:
            return head, who_differs(values)
    return None


class ReplicaProbe:
    """Compares the ranks every few steps and before each save, and ends the training where they differ.

    Buffers that forward passes change may differ: each rank changes its own, and all get those of rank 0 before they
    are used again. torch counts most changes. Of the others (`buffer.data`) the values tell: what has changed since the
    last comparison on several ranks is no damage of one rank.

    Args:
        state: of the training.
        every: steps between two comparisons.
        tell: writes a line for people into the logs.
    """

    def __init__(self, state: TrainState, every: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self.state, self.every, self.tell = state, every, tell
        self._changing = _ChangingBuffers(state.strategy)
        tensors, of_buffers = tensors_of_state(state), self._buffer_names()
        self._buffers = digests_of({name: tensors[name] for name in of_buffers if name in tensors})
        self._micro_batch: MicroBatch | None = None
        self._compares_losses = True
        self._has_repeated = False
        self._compared_at = state.step

    def due(self) -> bool:
        """Whether a comparison follows this step, also where it is not saved."""
        return self.state.step % self.every == 0

    def after_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep a batch of the step for the next comparison, and compare the ranks, if that is due. A collective.

        Raises:
            TrainingError: on all ranks; names the rank that differs, and the first tensor.
        """
        self._micro_batch = micro_batches[0]
        if self.due():
            self._compare()

    def before_save(self) -> None:
        """Compare the ranks as `after_step` does, if that was not done for this state."""
        if self._compared_at != self.state.step:
            self._compare()

    def _compare(self) -> None:
        self._compared_at = self.state.step
        self._compare_states()
        if self._micro_batch is None or not self._compares_losses:
            return
        losses = self._losses()
        found = other_losses(losses)
        if found is None and self._has_repeated:
            return
        self._has_repeated = True
        if self._losses() != losses:  # the same lists on all ranks, so all go on alike
            self._compares_losses = False
            self.tell(
                f"warning: after step {self.state.step}, the loss of one batch changes when it is computed again: the "
                "model or its kernels are not deterministic. From here on, only the states of the ranks are compared"
            )
            return
        if found is None:
            return
        head, who = found
        shown = ", ".join(f"rank {rank}: {float.fromhex(own[head]):.17g}" for rank, own in enumerate(losses[:_SHOWN]))
        raise self._error(
            f"{who} in the {head} of one batch, though their states are the same ({shown})",
            "the device or the libraries of a rank compute other numbers: compare the machines with lockstep "
            "preflight. A Task.loss that depends on the rank cannot be compared: set train.probe_every=0",
        )

    def _losses(self) -> list[RankLosses]:
        micro_batch, is_first = self._micro_batch, self.state.world.rank == 0
        assert micro_batch is not None
        losses = losses_of_one_batch(self.state, micro_batch.batch if is_first else None)
        micro_batch.let_go()
        return losses

    def _compare_states(self) -> None:
        state, world = self.state, self.state.world
        every, of_buffers, left_out = digests_of(tensors_of_state(state)), self._buffer_names(), self._changing.names()
        before, self._buffers = self._buffers, {name: every[name] for name in of_buffers if name in every}
        compared = {name: numbers for name, numbers in every.items() if name not in left_out}
        if not state.strategy.is_sharded:  # one number of each rank tells that all is well
            total = zlib.crc32(repr(sorted(compared.items())).encode())
            if len(set(world.broadcast(world.gather(total)))) == 1:
                return
        changed = {name for name, now in self._buffers.items() if before.get(name) != now}
        by_rank = world.gather((compared, changed))
        found: list[Difference] = []
        if by_rank is not None:
            counts = Counter(name for _, names in by_rank for name in names)
            found = [one for one in differing([of_rank for of_rank, _ in by_rank]) if counts[one.name] < 2]
        found = world.broadcast(found)
        if found:
            more = f", and in {len(found) - 1} more tensors" if len(found) > 1 else ""
            raise self._error(
                f"the ranks do not hold the same state: {found[0].who} in {found[0].name}{more}",
                "look for code that changes the model or the optimizer on some ranks, and for a defective device or "
                "memory of the rank that differs",
            )

    def _buffer_names(self) -> Collection[str]:
        """The names that `tensors_of_state` may give to buffers."""
        return {f"{kind}.{name}" for name, _ in self.state.strategy.model.named_buffers() for kind in _OF_BUFFERS}

    def _error(self, what: str, remedy: str) -> TrainingError:
        where = f"step {self.state.step}, train.probe_every={self.every}"
        return TrainingError(f"{what}. This state is not saved", where=where, remedy=remedy)


class _ChangingBuffers:
    """Notes which buffers the forward passes of training change: torch counts the changes of each tensor.

    Kernels of normalisation layers change their buffers without a trace, so these count as changing.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.model = strategy.model
        self.found = {
            name
            for prefix, module in self.model.named_modules()
            if isinstance(module, _NormBase)
            for name, _ in module.named_buffers(prefix, recurse=False)
        }
        self._before: dict[str, tuple[Tensor, int]] = {}
        strategy.unwrapped.register_forward_pre_hook(self._begin)
        strategy.unwrapped.register_forward_hook(self._end)

    def names(self) -> Collection[str]:
        """The names in `tensors_of_state` of the buffers that change."""
        return {f"{kind}.{name}" for kind in _OF_BUFFERS for name in self.found}

    def _begin(self, *_: Any) -> None:
        self._before = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}

    def _end(self, *_: Any) -> None:
        for name, buffer in self.model.named_buffers():
            before, version = self._before.get(name, (None, 0))
            if buffer is not before or buffer._version != version:
                self.found.add(name)
        self._before = {}
