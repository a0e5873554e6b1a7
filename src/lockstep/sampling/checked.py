"""A custom order of samples, which is checked before the first step and at every call."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from lockstep.core.data.order import Indices
from lockstep.core.errors import DataError, UsageError

_LOOKED_AT = 1000  # positions
_MOST_COUNTED = 1 << 21  # maximum number of draws of an epoch to count for the log
_WHERE = "the attribute `order` of the training data"
PURE = (
    "make it depend only on its arguments, position by position: for random numbers, use "
    "lockstep.WeightedSampler or hashes of (seed, epoch, position), not a generator with a state"
)


class CheckedOrder:
    """An order whose results are checked at every call.

    Args:
        order: has `length`, and is called with positions, seed and epoch; see `core.data.order.Order`.
        samples: the number of samples in the data set.
        name: its name in the log.

    Raises:
        UsageError: it is not such an object.
    """

    def __init__(self, order: Any, samples: int, name: str) -> None:
        length = getattr(order, "length", None)
        if not callable(order) or isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            what = f"it is of the type {type(order).__name__}"
            what += f", and its `length` is {length!r}" if callable(order) else ", which cannot be called"
            remedy = "an order has `length` (draws per epoch) and __call__(positions, *, seed, epoch), which "
            remedy += "returns the index of the sample at each position: lockstep --explain sampling. "
            remedy += "Or give the attribute "
            raise UsageError(what, where=_WHERE, remedy=f"{remedy}a different name")
        self.order, self.samples, self.name, self.length = order, samples, name, int(length)
        try:
            found = [self(self._looked_at, seed=0, epoch=epoch).astype("<i8").tobytes() for epoch in (0, 1)]
        except TypeError as error:
            remedy = "it is called as order(positions, seed=..., epoch=...): lockstep --explain sampling"
            raise UsageError(f"it cannot be called: {error}", where=_WHERE, remedy=remedy) from error
        own = getattr(order, "digest", "")
        about = f"{self.length} {self.samples} {own if isinstance(own, str) else ''}".encode()
        self.digest = hashlib.sha256(b"".join([about, *found])).hexdigest()
        """Changes if the length, the samples at some positions, or the order's own `digest` change."""

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """The index of the sample at each position.

        Raises:
            DataError: the order returned something else.
        """
        found = np.asarray(self.order(positions.copy(), seed=seed, epoch=epoch))
        if found.shape != positions.shape or (found.size and found.dtype.kind not in "iu"):
            what = f"for {len(positions)} positions it returns the shape {found.shape} and the type {found.dtype}"
            raise DataError(what, where=_WHERE, remedy="return one integer for each position")
        outside = np.flatnonzero((found < 0) | (found >= self.samples))
        if len(outside):
            place = outside[0]
            what = f"at position {positions[place]} of epoch {epoch} it returns sample {found[place]}, "
            what += f"but the data set has the samples 0 to {self.samples - 1}"
            raise DataError(what, where=_WHERE, remedy="return indices into the data set")
        return found.astype(np.int64)

    @property
    def _looked_at(self) -> Indices:
        """Positions spread over an epoch."""
        return np.unique(np.linspace(0, self.length - 1, min(self.length, _LOOKED_AT)).astype(np.int64))

    def check(self, seed: int) -> None:
        """Call it for some positions, for the same positions again, and for subsets of them.

        Raises:
            DataError: the results differ.
        """
        positions = self._looked_at
        first = self(positions, seed=seed, epoch=0)
        self(positions, seed=seed, epoch=1)
        again = self(positions, seed=seed, epoch=0)
        reversed_ = self(positions[::-1], seed=seed, epoch=0)[::-1]
        half = len(positions) // 2
        halves = [self(part, seed=seed, epoch=0) for part in (positions[half:], positions[:half])]
        cut = np.concatenate([halves[1], halves[0]])
        for other, when in (
            (again, "when it is called again"),
            (reversed_, "when the same positions are requested in reversed order"),
            (cut, "when fewer positions are requested at once"),
        ):
            different = np.flatnonzero(first != other)
            if len(different):
                place = different[0]
                what = f"at position {positions[place]} of epoch 0 it returns sample {first[place]}, but {when}, "
                raise DataError(f"{what}sample {other[place]}", where=_WHERE, remedy=PURE)

    def words(self, seed: int, epoch: int) -> str:
        """The log line about an epoch: the number of draws, of samples, and of distinct samples drawn."""
        text = f"{self.name}: {self.length:,} draws of {self.samples:,} samples"
        if self.length > _MOST_COUNTED:
            return text
        drawn = np.zeros(self.samples, dtype=bool)
        for start in range(0, self.length, 1 << 20):
            positions = np.arange(start, min(start + (1 << 20), self.length))
            drawn[self(positions, seed=seed, epoch=epoch)] = True
        return f"{text}, {int(drawn.sum()):,} distinct"
