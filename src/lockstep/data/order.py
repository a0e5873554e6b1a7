"""Which sample goes where: pure functions of (seed, data-set length, global batch, step). NumPy only.

The order of an epoch is a keyed pseudo-random permutation that is computed, never stored: any position of any
epoch costs the same, whether the data set holds ten samples or 10^12.

Source of the construction: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), the
generalised Feistel network on Z_a x Z_b with cycle walking; the round function is SplitMix64's finaliser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_ROUNDS = 8
_BLOCK = 8192


def derive_seed(*words: int, state: int = 0) -> int:
    """Hash integers to one 64-bit integer; the only source of seeds in the package (SplitMix64, chained).

    Args:
        state: what the words before gave: mix(a, b, c) is mix(c, state=mix(a, b)).
    """
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _shift(half: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], key: int, size: int) -> npt.NDArray[np.uint64]:
    """Move `half` within Z_size by a distance that `other` and `key` give: one round. Undone by moving back.

    The distance is SplitMix64's finaliser, scaled from 32 bits to `size` (at most 2**31) by a multiplication: a 64-bit
    division takes several times as long.
    """
    state = other ^ np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    distance = (((state ^ (state >> np.uint64(31))) >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)
    moved = half + distance
    return np.where(moved >= np.uint64(size), moved - np.uint64(size), moved)


def permute(positions: npt.ArrayLike, length: int, seed: int, epoch: int = 0) -> Indices:
    """Where the keyed permutation of `range(length)` sends `positions`.

    Args:
        positions: integers in [0, length), any shape.
        length: size of the permuted range, 1 to 2**62.
        seed, epoch: together the key; every key gives another permutation.

    Returns:
        int64 array of the shape of `positions`; memory and time depend on `positions` alone.
    """
    if not 1 <= length <= 1 << 62:
        raise ValueError(f"length is {length}; a permutation needs 1 to 2**62 places")
    outside = np.asarray(positions)
    if outside.size and not 0 <= outside.min() <= outside.max() < length:
        raise ValueError(f"positions from {outside.min()} to {outside.max()} are outside of range({length})")
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    keys = [derive_seed(seed, epoch, number) for number in range(_ROUNDS)]
    places = np.atleast_1d(np.asarray(positions, dtype=np.uint64)).copy()
    flat = places.reshape(-1)
    outside = np.arange(flat.size)
    while outside.size:  # cycle walking: rows * columns exceeds `length` by less than `rows`
        left, right = np.divmod(flat[outside], np.uint64(columns))
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = _shift(left, right, key, rows)
            else:
                right = _shift(right, left, key, columns)
        flat[outside] = left * np.uint64(columns) + right
        outside = outside[flat[outside] >= length]
    return places.astype(np.int64).reshape(np.shape(positions))


class MicroBatchPlan(NamedTuple):
    """The samples of one micro-batch.

    indices: data-set indices, never empty.
    epoch: of all of them.
    filler: True where no sample was left for this place: `indices` then repeats one sample, with weight zero,
        so that every rank runs the same collectives.
    """

    indices: tuple[int, ...]
    epoch: int
    filler: bool


def micro_batches(samples: int, world: int, micro_batch: int) -> int:
    """How many forward passes of at most `micro_batch` samples each rank needs for `samples` together."""
    return max(1, -(-samples // (world * micro_batch)))


def cut(
    indices: Indices, epoch: int, world: int, micro_batch: int, lengths: Indices | None = None
) -> list[list[MicroBatchPlan]]:
    """Cut one global batch into equally many micro-batches for every rank.

    Sizes differ by at most one over all ranks and micro-batches. With `lengths` (of these samples), similar lengths
    share a micro-batch, and ranks take turns in reversing order ("snake") so that each gets the same amount of work.

    Returns:
        chunks[rank][micro]
    """
    return [split_for_rank(indices, epoch, world, micro_batch, rank, lengths) for rank in range(world)]


def split_for_rank(
    indices: Indices, epoch: int, world: int, micro_batch: int, rank: int, lengths: Indices | None = None
) -> list[MicroBatchPlan]:
    """The micro-batches of one rank, as `cut` gives them; costs nothing for the others."""
    count = len(indices)
    per_rank = micro_batches(count, world, micro_batch)
    if lengths is not None:
        indices = indices[np.argsort(-lengths, kind="stable")]
    size, extra = divmod(count, world * per_rank)
    chunks = []
    for turn in range(per_rank):
        place = world - 1 - rank if lengths is not None and turn % 2 else rank
        number = turn * world + place
        start = number * size + min(number, extra)
        mine = indices[start : start + size + (number < extra)]
        filler = not mine.size
        chunks.append(MicroBatchPlan(tuple((indices[:1] if filler else mine).tolist()), epoch, filler))
    return chunks


@dataclass
class StepPlan:
    """The samples of every training step, for every rank. State: none, but for a cache of the current block.

    Args:
        length: samples in the data set.
        global_batch: samples per step, over all ranks.
        micro_batch: most samples in one forward/backward.
        world: number of ranks.
        seed: of the run.
        drop_last: leave out the last, partial global batch of each epoch instead of training it.
        lengths: length of each sample (tokens, slices), where known: groups similar ones.
    """

    length: int
    global_batch: int
    micro_batch: int
    world: int = 1
    seed: int = 0
    drop_last: bool = False
    lengths: npt.NDArray[np.integer] | None = None
    _cached: tuple[int, int, Indices] | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """At least one where there are samples: an epoch that drops everything would never end."""
        return max(1, self.length // self.global_batch) if self.drop_last else -(-self.length // self.global_batch)

    def samples(self, step: int) -> int:
        """How many samples step `step` consumes, over all ranks."""
        start = (step % self.steps_per_epoch) * self.global_batch
        return min(self.global_batch, self.length - start)

    def smallest_micro_batch(self) -> tuple[int, int]:
        """Samples of the smallest micro-batch of an epoch that is no filler, and the first step with such a micro-batch."""
        sizes = []
        for step in (0, self.steps_per_epoch - 1):
            count = self.samples(step)
            sizes.append((max(1, count // (self.world * micro_batches(count, self.world, self.micro_batch))), step))
        return min(sizes)

    def indices(self, step: int) -> tuple[Indices, int]:
        """The global batch of step `step` (counted from 0) and its epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.length)
        first, last = start // _BLOCK, (stop - 1) // _BLOCK
        blocks = [self._block(epoch, number) for number in range(first, last + 1)]
        order = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return order[start - first * _BLOCK : stop - first * _BLOCK], epoch

    def chunks(self, step: int) -> list[list[MicroBatchPlan]]:
        """The micro-batches of step `step`: chunks[rank][micro]."""
        return [self.rank_micro_batches(step, rank) for rank in range(self.world)]

    def rank_micro_batches(self, step: int, rank: int) -> list[MicroBatchPlan]:
        """The micro-batches of one rank in step `step`."""
        indices, epoch = self.indices(step)
        lengths = None if self.lengths is None else np.asarray(self.lengths[indices], dtype=np.int64)
        return split_for_rank(indices, epoch, self.world, self.micro_batch, rank, lengths)

    def _block(self, epoch: int, number: int) -> Indices:
        # A step takes a few dozen positions; computing thousands at once divides NumPy's cost per call by as much.
        if self._cached is None or self._cached[:2] != (epoch, number):
            places = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, self.length))
            order = permute(places, self.length, self.seed, epoch)
            order.flags.writeable = False  # slices of it are handed out
            self._cached = (epoch, number, order)
        return self._cached[2]


@dataclass(frozen=True)
class EvaluationPlan:
    """How a data set is cut for evaluation: into micro-batches that are the same for every world size, each sample once.

    Args:
        length: samples in the data set.
        micro_batch: most samples in one forward pass.
        lengths: length of each sample, where known: similar ones share a micro-batch, and micro-batches are shuffled, so that
            ranks get about the same work.
    """

    length: int
    micro_batch: int
    lengths: npt.NDArray[np.integer] | None = None

    def chunks(self, world: int) -> list[list[MicroBatchPlan]]:
        """chunks[rank][micro], equally many for every rank: consecutive runs of the micro-batches that one process would take in turn."""
        order = (
            np.arange(self.length)
            if self.lengths is None
            else np.argsort(-np.asarray(self.lengths, dtype=np.int64), kind="stable")
        )
        micros = [
            tuple(order[start : start + self.micro_batch].tolist()) for start in range(0, self.length, self.micro_batch)
        ]
        if self.lengths is not None and micros:
            micros = [micros[place] for place in permute(np.arange(len(micros)), len(micros), seed=0)]
        per_rank = -(-len(micros) // world)
        ranks: list[list[MicroBatchPlan]] = []
        for rank in range(world):
            mine: Sequence[tuple[int, ...]] = micros[rank * per_rank : (rank + 1) * per_rank]
            fillers = [MicroBatchPlan((0,), 0, True)] * (per_rank - len(mine))
            ranks.append([MicroBatchPlan(indices, 0, False) for indices in mine] + fillers)
        return ranks
