"""The place of each sample: pure functions of (seed, data-set length, global batch, step). NumPy only.

The order of an epoch is a keyed pseudo-random permutation that is computed, never stored: any position of any
epoch costs the same, whether the data set holds ten samples or 10^12. If samples are grouped by length, their
lengths determine the order too, and a step costs the work of its window of the epoch, which is kept.

Source of the construction: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), the
generalised Feistel network on Z_a x Z_b with cycle walking; the round function is SplitMix64's finaliser.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUNDS = 8
_BLOCK = 8192
_WINDOW = 128  # micro-batches of a prediction that are cut together, if samples are sorted by length


def derive_seed(*words: int, state: int = 0) -> int:
    """Hash integers to a 64-bit integer. All seeds of the package come from here (SplitMix64, chained).

    Args:
        state: the hash of the words before: derive_seed(a, b, c) is derive_seed(c, state=derive_seed(a, b)).
    """
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def derive_seeds(words: npt.ArrayLike, *, state: int) -> npt.NDArray[np.uint64]:
    """`derive_seed(word, state=state)` for each of `words`, which are not negative."""
    seeds = np.array(words, np.uint64)
    seeds += np.uint64((state + 0x9E3779B97F4A7C15) & _MASK)
    seeds = (seeds ^ (seeds >> _30)) * _FIRST
    seeds = (seeds ^ (seeds >> _27)) * _SECOND
    return seeds ^ (seeds >> _31)


def _shift(half: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], key: int, size: int) -> npt.NDArray[np.uint64]:
    """One round of the Feistel network: move `half` within Z_size by a distance that depends on `other` and `key`.

    Moving back by that distance undoes the round. The distance is SplitMix64's finaliser, scaled from 32 bits to `size`
    (at most 2**31) by a multiplication, because a 64-bit division takes several times as long.
    """
    state = other ^ np.uint64(key)
    state = (state ^ (state >> _30)) * _FIRST
    state = (state ^ (state >> _27)) * _SECOND
    distance = (((state ^ (state >> _31)) >> _32) * np.uint64(size)) >> _32
    moved = half + distance
    return np.where(moved >= np.uint64(size), moved - np.uint64(size), moved)


def permute(positions: npt.ArrayLike, length: int, seed: int, epoch: int = 0) -> Indices:
    """The images of `positions` under the keyed permutation of `range(length)`.

    Args:
        positions: integers in [0, length), any shape.
        length: size of the permuted range, 1 to 2**62.
        seed, epoch: together the key; every key gives a different permutation.

    Returns:
        int64 array of the shape of `positions`. Memory and time depend on the number of positions, not on `length`.

    Raises:
        ValueError: `length` or a position is out of range.
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


class Order(Protocol):
    """The samples that an epoch draws, instead of the permutation. It may draw a sample several times."""

    length: int
    """Positions of an epoch: the number of samples that it draws."""
    digest: str
    """Differs between orders that draw different samples."""

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """The index of the sample at each position, 0 to `length` - 1: a pure function, the same on every rank."""


def at_epoch(values: Mapping[int, int], epoch: int) -> int:
    """The value of a step function of the epoch.

    Args:
        values: from an epoch, counted from 0, to the value that holds from this epoch on. It has a value for epoch 0.
        epoch: counted from 0.
    """
    return values[max(first for first in values if first <= epoch)]


class MicroBatchPlan(NamedTuple):
    """The samples of one micro-batch."""

    indices: tuple[int, ...]
    """Indices into the data set; never empty."""
    epoch: int
    """Epoch of all these samples."""
    filler: bool
    """True if no sample was left for this rank. `indices` then repeats a sample, which counts with weight zero, so that
    every rank runs the same collectives."""
    positions: tuple[int, ...] = ()
    """Positions of these samples in the epoch, if an `Order` draws them. Empty: each sample occurs once."""

    @property
    def words(self) -> tuple[int, ...]:
        """What distinguishes these samples within the epoch: the last word of the seed of each."""
        return self.positions or self.indices


def count_micro_batches(samples: int, world: int, micro_batch: int) -> int:
    """Number of micro-batches of at most `micro_batch` samples that each rank needs for `samples` over all ranks."""
    return max(1, -(-samples // (world * micro_batch)))


def split_for_rank(
    indices: Indices, epoch: int, world: int, micro_batch: int, rank: int, lengths: Indices | None = None
) -> list[MicroBatchPlan]:
    """The micro-batches of one rank. Every rank has the same number of them.

    Sizes differ by at most 1 over all ranks and micro-batches. With `lengths` (of these samples), samples of similar
    length share a micro-batch, and ranks take turns in alternating order ("snake"), so that each gets the same work.

    Args:
        indices: of the samples, (samples,); or with their positions in a second column, see `StepPlan.drawn`.
    """
    count = len(indices)
    per_rank = count_micro_batches(count, world, micro_batch)
    if lengths is not None:
        indices = indices[np.argsort(-lengths, kind="stable")]
    size, extra = divmod(count, world * per_rank)
    plans = []
    for turn in range(per_rank):
        place = world - 1 - rank if lengths is not None and turn % 2 else rank
        number = turn * world + place
        start = number * size + min(number, extra)
        mine = indices[start : start + size + (number < extra)]
        filler = not mine.size
        chosen = indices[:1] if filler else mine
        columns = [chosen.tolist()] if chosen.ndim == 1 else chosen.T.tolist()
        plans.append(MicroBatchPlan(tuple(columns[0]), epoch, filler, *map(tuple, columns[1:])))
    return plans


def group(indices: Indices, lengths: Indices | None, global_batch: int, *, seed: int, window: int) -> Indices:
    """The samples of a window of an epoch, reordered so that each global batch has samples of similar length.

    The window is sorted by length, the shortest first; samples of equal length keep their order. The sorted window is
    cut into global batches, and the batches are shuffled. The samples at the end that do not fill a batch stay there,
    and are not sorted with the others: otherwise they would be the longest samples.

    Args:
        indices: samples of the window, as the permutation of the epoch orders them; see `split_for_rank`.
        lengths: of these samples.
        global_batch: samples per step, over all ranks.
        seed: of the epoch.
        window: number of the window in the epoch, from 0. With `seed`, the key of the order of the batches.

    Raises:
        ValueError: there are no lengths.
    """
    if lengths is None:
        raise ValueError("samples cannot be grouped by length, because their lengths are not known")
    batches = len(indices) // global_batch
    if not batches:
        return indices
    whole = batches * global_batch
    by_length = np.argsort(lengths[:whole], kind="stable").reshape(batches, global_batch)
    shuffled = by_length[permute(np.arange(batches), batches, seed, window)]
    return np.concatenate([indices[shuffled.reshape(-1)], indices[whole:]])


@dataclass
class StepPlan:
    """The samples of every training step, for every rank. It has no state except a cache of the current block."""

    length: int
    """Number of samples in an epoch: those of the data set, or what `order` draws."""
    global_batch: int
    """Samples per step, over all ranks."""
    micro_batch: int
    """Most samples in a forward pass, in every epoch."""
    world: int = 1
    """Number of ranks."""
    seed: int = 0
    """Seed of the run."""
    drop_last: bool = False
    """Leave out the last, partial global batch of each epoch."""
    lengths: npt.NDArray[np.integer] | None = None
    """Length of each sample (such as tokens), if known: samples of similar length then share a micro-batch."""
    micro_by_epoch: Mapping[int, int] | None = None
    """Most samples in a forward pass from an epoch on, see `at_epoch`. `micro_batch` limits all of them."""
    group_by_length: int | None = None
    """Number of global batches in a window, whose samples are sorted by length before they are cut into the batches;
    see `group`. It needs `lengths`. None: batches are those of the permutation."""
    order: Order | None = None
    """Draws the samples of an epoch. None: a permutation, so that an epoch has each sample once."""
    _cached: tuple[int, int, Indices] | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch. At least 1 with `drop_last` too: an epoch without a step would never end."""
        return max(1, self.length // self.global_batch) if self.drop_last else -(-self.length // self.global_batch)

    def samples(self, step: int) -> int:
        """Number of samples in step `step`, over all ranks."""
        start = (step % self.steps_per_epoch) * self.global_batch
        return min(self.global_batch, self.length - start)

    def micro_batch_at(self, step: int) -> int:
        """Most samples in a forward pass of step `step`."""
        if self.micro_by_epoch is None:
            return self.micro_batch
        return min(self.micro_batch, at_epoch(self.micro_by_epoch, step // self.steps_per_epoch))

    def count(self, step: int) -> int:
        """Number of micro-batches of each rank in step `step`."""
        return count_micro_batches(self.samples(step), self.world, self.micro_batch_at(step))

    def smallest_micro_batch(self) -> tuple[int, int]:
        """Size of the smallest micro-batch of the training (without fillers), and the first step that has it."""
        sizes = []
        for epoch in self.micro_by_epoch or (0,):
            for step in (0, self.steps_per_epoch - 1):
                step += epoch * self.steps_per_epoch
                sizes.append((max(1, self.samples(step) // (self.world * self.count(step))), step))
        return min(sizes)

    def indices(self, step: int) -> tuple[Indices, int]:
        """The indices of step `step` (counted from 0) over all ranks, and its epoch."""
        drawn, epoch = self.drawn(step)
        return self._samples(drawn), epoch

    def drawn(self, step: int) -> tuple[Indices, int]:
        """The same: (samples,). If there is an `order`, (samples, 2), with the positions in the second column."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.length)
        size = self._block_size
        first, last = start // size, (stop - 1) // size
        order = self._block(epoch, first)
        if last > first:
            order = np.concatenate([order, *(self._block(epoch, number) for number in range(first + 1, last + 1))])
        return order[start - first * size : stop - first * size], epoch

    def by_rank(self, step: int) -> list[list[MicroBatchPlan]]:
        """The micro-batches of step `step`: plans[rank][micro-batch]."""
        return [self.rank_micro_batches(step, rank) for rank in range(self.world)]

    def rank_micro_batches(self, step: int, rank: int) -> list[MicroBatchPlan]:
        """The micro-batches of one rank in step `step`."""
        drawn, epoch = self.drawn(step)
        return split_for_rank(drawn, epoch, self.world, self.micro_batch_at(step), rank, self._lengths_of(drawn))

    def _samples(self, drawn: Indices) -> Indices:
        return drawn if self.order is None else drawn[:, 0]

    def _lengths_of(self, drawn: Indices) -> Indices | None:
        return None if self.lengths is None else np.asarray(self.lengths[self._samples(drawn)], dtype=np.int64)

    @property
    def _block_size(self) -> int:
        """Positions of an epoch that are computed together: a window of batches, if samples are grouped."""
        return self.group_by_length * self.global_batch if self.group_by_length else _BLOCK

    def _block(self, epoch: int, number: int) -> Indices:
        # A step takes a few dozen positions. Computing thousands at once spreads NumPy's cost per call over many steps.
        if self._cached is None or self._cached[:2] != (epoch, number):
            size = self._block_size
            places = np.arange(number * size, min((number + 1) * size, self.length))
            if self.order is None:
                order = permute(places, self.length, self.seed, epoch)
            else:
                order = np.stack([self.order(places, seed=self.seed, epoch=epoch), places], axis=1)
            if self.group_by_length:
                seed = derive_seed(self.seed, epoch)
                order = group(order, self._lengths_of(order), self.global_batch, seed=seed, window=number)
            order.flags.writeable = False  # callers get slices of it
            self._cached = (epoch, number, order)
        return self._cached[2]


@dataclass(frozen=True)
class EvaluationPlan:
    """The micro-batches of an evaluation: each sample once, and the same micro-batches for every number of ranks."""

    length: int
    """Number of samples in the data set."""
    micro_batch: int
    """Most samples in a forward pass."""
    lengths: npt.NDArray[np.integer] | None = None
    """Length of each sample, if known. Samples of similar length then share a micro-batch, and micro-batches are
    shuffled, so that ranks get about the same work."""
    limit: int | None = None
    """Evaluate at most this many samples, spread evenly over the data set: the same samples each time. None: all."""

    @property
    def count(self) -> int:
        """Number of samples that are evaluated."""
        return self.length if self.limit is None else min(self.limit, self.length)

    def index(self, place: int) -> int:
        """The sample at `place`, from 0 to `count` - 1, of those that are evaluated."""
        return place * self.length // self.count

    def first(self, count: int) -> tuple[int, ...]:
        """The indices of the first samples of the first micro-batch: at most `count`, and all of them in that batch."""
        if not self.length:
            return ()
        if self.lengths is None:
            return tuple(self.index(place) for place in range(min(count, self.micro_batch, self.count)))
        return self.by_rank(1)[0][0].indices[:count]

    def in_turns(self, rank: int, world: int) -> Iterator[MicroBatchPlan]:
        """The micro-batches of one rank, if `world` ranks take the micro-batches in turn.

        Every rank has the same number of them. After each turn the outputs of the first samples are complete, up to a
        window of samples: samples of similar length share a micro-batch only within such a window. So outputs can be
        written in the order of the samples while the others are computed. The micro-batches do not depend on `world`.
        """
        micros = self._in_windows()
        while turn := list(itertools.islice(micros, world)):
            yield MicroBatchPlan(turn[rank], 0, False) if rank < len(turn) else MicroBatchPlan((0,), 0, True)

    def _in_windows(self) -> Iterator[tuple[int, ...]]:
        window = self.micro_batch * _WINDOW
        for start in range(0, self.length, window):
            lengths = None if self.lengths is None else self.lengths[start : start + window]
            part = EvaluationPlan(min(window, self.length - start), self.micro_batch, lengths)
            for indices in part._micro_batches():
                yield tuple(start + index for index in indices)

    def _micro_batches(self) -> list[tuple[int, ...]]:
        """The samples of each micro-batch of a single process, in its order."""
        order = np.arange(self.count) * self.length // max(self.count, 1)  # see `index`
        if self.lengths is not None:
            order = order[np.argsort(-np.asarray(self.lengths[order], dtype=np.int64), kind="stable")]
        micros = [
            tuple(order[start : start + self.micro_batch].tolist()) for start in range(0, self.count, self.micro_batch)
        ]
        if self.lengths is not None and micros:
            micros = [micros[place] for place in permute(np.arange(len(micros)), len(micros), seed=0)]
        return micros

    def per_rank(self, world: int) -> int:
        """Number of micro-batches of each of `world` ranks."""
        return math.ceil(math.ceil(self.count / self.micro_batch) / world)

    def by_rank(self, world: int) -> list[list[MicroBatchPlan]]:
        """plans[rank][micro-batch], the same number for each of `world` ranks.

        Each rank gets a consecutive part of the micro-batches of a single process.
        """
        micros = self._micro_batches()
        per_rank = self.per_rank(world)
        ranks: list[list[MicroBatchPlan]] = []
        for rank in range(world):
            mine: Sequence[tuple[int, ...]] = micros[rank * per_rank : (rank + 1) * per_rank]
            fillers = [MicroBatchPlan((0,), 0, True)] * (per_rank - len(mine))
            ranks.append([MicroBatchPlan(indices, 0, False) for indices in mine] + fillers)
        return ranks
