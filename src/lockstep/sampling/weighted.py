"""Draw samples with replacement, in proportion to weights. Needs only NumPy."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core import keywords
from lockstep.core.data.order import Indices, derive_seed, derive_seeds
from lockstep.core.errors import DataError

_DRAW = 0x3E1647  # part of the seeds of draws, so that they differ from the seeds of samples


@keywords.of_class
class WeightedSampler:
    """The order of a data set whose samples are drawn with replacement: `data.order = WeightedSampler(weights)`.

    The draw at a position is a hash of (seed, epoch, position), looked up in the cumulative sum of the weights. So it
    does not depend on other draws, and each rank computes only the draws that it needs. The probabilities are those of
    torch's `WeightedRandomSampler(weights, num_samples, replacement=True)`; the draws themselves differ.

    Args:
        weights: one number for each sample of the data set: an array, a list or a tensor. A sample is drawn with the
            probability weight / sum of all weights; with the weight 0, never.
        num_samples: the number of samples that an epoch draws. None: as many as there are weights.

    Raises:
        DataError: a weight is negative or not finite, all weights are 0, or they are not a list of numbers.
    """

    def __init__(self, weights: Any, num_samples: int | None = None) -> None:
        self.weights = checked_weights(weights)
        """(samples,) float64."""
        self.length = len(self.weights) if num_samples is None else num_samples
        """Number of samples that an epoch draws."""
        if isinstance(self.length, bool) or not isinstance(self.length, int | np.integer) or self.length < 1:
            what = f"num_samples is {num_samples!r}"
            raise DataError(what, where="WeightedSampler", remedy="give the number of draws of an epoch, 1 or more")
        self._cumulative = np.cumsum(self.weights)
        self._last = int(np.flatnonzero(self.weights)[-1])

    @functools.cached_property
    def digest(self) -> str:
        """Changes if the weights or the length change."""
        return hashlib.sha256(self.weights.astype("<f8").tobytes() + str(self.length).encode()).hexdigest()

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """The index of the sample that is drawn at each position."""
        words = derive_seeds(positions, state=derive_seed(seed, epoch, _DRAW))
        places = (words >> np.uint64(11)) * 2.0**-53 * self._cumulative[-1]  # 53 bits: as many as a float64 has
        drawn = np.searchsorted(self._cumulative, places, side="right")
        found: Indices = np.minimum(drawn, self._last).astype(np.int64)  # a product may be rounded up to the whole sum
        return found


def checked_weights(weights: Any) -> npt.NDArray[np.float64]:
    """Weights as float64: (samples,).

    Raises:
        DataError: a weight is negative or not finite, all are 0, or they are not a list of numbers.
    """
    where = "the weights of the samples"
    found = np.asarray(weights.detach().cpu().double() if hasattr(weights, "detach") else weights)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        what = f"they have the shape {found.shape} and the type {found.dtype}"
        raise DataError(what, where=where, remedy="give one number for each sample")
    found = found.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        what = f"the weight of sample {wrong[0]} is {found[wrong[0]]:g}"
        more = f" ({len(wrong):,} of {len(found):,} weights are invalid)" if len(wrong) > 1 else ""
        raise DataError(what + more, where=where, remedy="weights are finite and not negative; 0 leaves a sample out")
    with np.errstate(over="ignore"):
        total = found.sum()
    if not 0 < total < np.inf:
        what = f"the sum of the {len(found):,} weights is {total:g}"
        raise DataError(what, where=where, remedy="give at least one weight above 0, and a sum that is finite")
    return found
