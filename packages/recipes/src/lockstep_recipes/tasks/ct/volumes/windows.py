"""HU windows: the channels of the images that a model sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import UsageError, did_you_mean


class HounsfieldWindow(NamedTuple):
    """The Hounsfield units that a channel shows: `center` - `width` / 2 becomes 0, `center` + `width` / 2 becomes 255.
    Values outside are clipped."""

    center: float
    width: float


# Common settings of viewing workstations: https://radiopaedia.org/articles/windowing-ct
NAMED = {
    "lung": HounsfieldWindow(-600, 1500),
    "soft_tissue": HounsfieldWindow(50, 400),
    "mediastinum": HounsfieldWindow(50, 350),
    "bone": HounsfieldWindow(400, 1800),
    "brain": HounsfieldWindow(40, 80),
}
"""Windows by name."""


def windows_of(chosen: Sequence[str | Sequence[float]]) -> tuple[HounsfieldWindow, ...]:
    """Windows from the config.

    Args:
        chosen: for each channel a name in `NAMED`, or `[center, width]` in HU.

    Raises:
        UsageError: a name is unknown, or a pair is not two finite numbers with a positive width.
    """
    return tuple(_window(choice) for choice in chosen)


def _window(choice: str | Sequence[float]) -> HounsfieldWindow:
    if isinstance(choice, str):
        if choice not in NAMED:
            remedy = f"{did_you_mean(choice, NAMED)}Known are {', '.join(NAMED)}; or give [center, width] in HU"
            raise UsageError(f"there is no HU window {choice!r}", where="task.windows", remedy=remedy)
        return NAMED[choice]
    if len(choice) != 2 or not all(math.isfinite(value) for value in choice) or choice[1] <= 0:
        remedy = "give [center, width] in HU, with a positive width"
        raise UsageError(f"{list(choice)} is not an HU window", where="task.windows", remedy=remedy)
    return HounsfieldWindow(float(choice[0]), float(choice[1]))


def windowed(slices: npt.NDArray[np.int16], windows: tuple[HounsfieldWindow, ...]) -> npt.NDArray[np.uint8]:
    """Slices as images with a channel for each window.

    Args:
        slices: int16 (..., rows, columns) in HU.

    Returns:
        uint8 (..., rows, columns, windows), rounded.
    """
    return _table(windows)[slices.view(np.uint16)]


@functools.lru_cache(maxsize=8)
def _table(windows: tuple[HounsfieldWindow, ...]) -> npt.NDArray[np.uint8]:
    """The channels of each of the 65,536 values, in the order of their bits as uint16."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.float64)
    levels = [(2 * (values - center) + width) * 255 / (2 * width) for center, width in windows]
    table: Any = np.rint(np.clip(np.stack(levels, axis=1), 0, 255)).astype(np.uint8)
    return table  # type: ignore[no-any-return]
