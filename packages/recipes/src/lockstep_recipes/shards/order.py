"""The order of samples in shards: shards are shuffled, and samples are shuffled within windows. Needs only NumPy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.core.data.order import derive_seed, permute

Indices = npt.NDArray[np.int64]
_SHARDS, _WINDOWS = 0x05A4D5, 0x0F1D05  # words in the keys, so that shards and windows are shuffled independently


class ShardOrder:
    """The order of an epoch, as a pure function of seed, epoch and position: the same on any number of ranks.

    The shards of an epoch are permuted by (seed, epoch). The samples of all shards in this order are split into windows
    of `window` positions, and each window is shuffled. So samples at neighbouring positions are in the few shards that
    a window touches. A sample moves by less than `window` positions from its position in the sequence of shards.
    Therefore a batch combines only samples that are near each other in one shard, or in shards that are neighbours in
    this epoch.

    Args:
        counts: the number of samples of each shard.
        window: the number of positions in a window, at least 1. With 1, the samples of a shard keep their order.
    """

    is_permutation = True
    """Each sample is used once; Lockstep may handle some of the shards without it."""

    def __init__(self, counts: Sequence[int], window: int) -> None:
        self.counts, self.window = np.asarray(counts, np.int64), window
        self.begins: Indices = np.cumsum(self.counts) - self.counts
        self.length = int(self.counts.sum())
        """The number of positions of an epoch, which is the number of samples."""
        self.digest = hashlib.sha256(self.counts.astype("<i8").tobytes() + repr(window).encode()).hexdigest()
        """Changes if the numbers of samples or the window change."""
        self._kept: tuple[tuple[int, int], Indices, Indices] | None = None

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """The indices of the samples at `positions` of an epoch: int64, in the shape of `positions`.

        Raises:
            IndexError: a position is outside the epoch.
        """
        flat = np.asarray(positions, np.int64).reshape(-1)
        if flat.size and not 0 <= flat.min() <= flat.max() < self.length:
            raise IndexError(f"positions from {flat.min()} to {flat.max()} are outside range({self.length})")
        shards, ends = self._shards(seed, epoch)
        places = self._within_windows(flat, seed, epoch)
        turns = np.searchsorted(ends, places, side="right")
        chosen = shards[turns]
        found: Indices = self.begins[chosen] + places - (ends[turns] - self.counts[chosen])
        return found.reshape(np.shape(positions))

    def _shards(self, seed: int, epoch: int) -> tuple[Indices, Indices]:
        """The shards in the order of an epoch, and the number of samples up to the end of each."""
        kept = self._kept
        if kept is None or kept[0] != (seed, epoch):
            count = len(self.counts)
            shards = permute(np.arange(count), count, derive_seed(seed, _SHARDS), epoch)
            self._kept = kept = ((seed, epoch), shards, np.cumsum(self.counts[shards]))
        return kept[1:]

    def _within_windows(self, positions: Indices, seed: int, epoch: int) -> Indices:
        if self.window == 1:
            return positions
        places, windows = np.empty_like(positions), positions // self.window
        sorted_ = np.argsort(windows, kind="stable")
        numbers, begins = np.unique(windows[sorted_], return_index=True)
        for number, here in zip(numbers.tolist(), np.split(sorted_, begins[1:]), strict=False):
            first = number * self.window
            size = min(self.window, self.length - first)
            places[here] = first + permute(positions[here] - first, size, derive_seed(seed, epoch, _WINDOWS), number)
        return places
