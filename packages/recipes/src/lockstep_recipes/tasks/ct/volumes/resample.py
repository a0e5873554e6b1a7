"""Resample a volume to a different slice distance.

Exports of volume models contain a copy of this file, so it does not import anything from this package.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lockstep_recipes.tasks.ct.volumes.volume import Volume

_SAME = 1e-3  # relative difference below which distances are the same
_FINEST = 64  # maximum number of samples of the old values per new distance


def resampled(volume: Volume, distance_mm: float) -> Volume:
    """The volume with slices `distance_mm` apart, starting with its first slice. See `resampled_slices`."""
    slices, positions = resampled_slices(volume.slices, volume.positions, distance_mm)
    if slices is volume.slices:
        return volume
    return replace(volume, slices=slices, spacing=(distance_mm, *volume.spacing[1:]), positions=positions)


def resampled_slices(
    slices: npt.NDArray[np.int16], positions: npt.NDArray[np.float32], distance_mm: float
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    """Slices `distance_mm` apart, and their positions. If they already have this distance, the arguments are returned.

    Values between slices are interpolated linearly. If the new distance is larger, values are averaged with a
    triangular filter that is two new distances wide. This reduces the noise of thin slices, and uses every slice.

    Args:
        slices: (n, rows, columns).
        positions: (n) in millimetres, ascending.
        distance_mm: positive.
    """
    if len(slices) < 2 or np.abs(np.diff(positions) - distance_mm).max() < _SAME * distance_mm:
        return slices, positions
    weights = resampling_weights(positions.astype(np.float64), distance_mm)
    found = np.empty((len(weights), *slices.shape[1:]), dtype=np.int16)
    for number, row in enumerate(weights):
        used = np.flatnonzero(row)
        found[number] = np.rint(np.tensordot(row[used].astype(np.float32), slices[used].astype(np.float32), axes=1))
    return found, (distance_mm * np.arange(len(weights))).astype(np.float32)


def resampling_weights(positions: npt.NDArray[np.float64], distance_mm: float) -> npt.NDArray[np.float64]:
    """The weight of each old slice in each new slice: (new slices, old slices), with rows that add up to 1.

    Args:
        positions: (old slices) in millimetres, ascending, at least 2.
    """
    length = float(positions[-1] - positions[0])
    count = math.floor(length / distance_mm + _SAME) + 1  # a slice still counts if up to a thousandth of it is missing
    # The old values as a piecewise linear function, sampled `fine` times per new distance.
    fine = min(_FINEST, max(1, math.ceil(distance_mm / float(np.diff(positions).min()) * (1 - _SAME))))
    places = np.minimum(distance_mm / fine * np.arange((count - 1) * fine + 1), length) + positions[0]
    left = np.clip(np.searchsorted(positions, places, side="right") - 1, 0, len(positions) - 2)
    share = (places - positions[left]) / (positions[left + 1] - positions[left])
    linear = np.zeros((len(places), len(positions)))
    linear[np.arange(len(places)), left] = 1 - share
    linear[np.arange(len(places)), left + 1] += share
    away = np.abs(np.arange(len(places)) - fine * np.arange(count)[:, None])
    triangle: Any = np.maximum(0.0, 1 - away / fine)
    weights: npt.NDArray[np.float64] = triangle @ linear / triangle.sum(axis=1, keepdims=True)
    return weights
