"""Overlapping windows, and their disjoint cores, which together cover each pixel of an image once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lockstep.core.data.dataset import member_of
from lockstep_recipes.tasks.vision.images.geometry import Region
from lockstep_recipes.tasks.vision.use_images import windows_along


class Tile(NamedTuple):
    """A window of an image."""

    window: Region
    """(top, left, height, width) in pixels of the image: the input of the model."""
    core: Region
    """(top, left, height, width) in pixels of the image: the region of the window whose result is used."""


class Window(NamedTuple):
    """A raw evaluation sample: a window of an image."""

    pixels: npt.NDArray[np.uint8]
    """(height, width, channels) of the window."""
    mask: npt.NDArray[np.int16] | None
    """(height, width) of the window; None if the classes are not known."""
    name: str
    """The name of the image."""
    tile: Tile
    size: tuple[int, int]
    """(height, width) of the whole image in pixels."""


def tiles(size: tuple[int, int], *, side: int, overlap: float) -> list[Tile]:
    """The windows of an image, row by row. The core of a window ends in the middle of its overlap with the next.

    Source: the overlap-tile strategy of Ronneberger et al., arXiv:1505.04597, figure 2; at the border of the image,
    windows are moved inwards, while the paper mirrors the image.

    Args:
        size: (height, width) of the image in pixels.
        side: height and width of a window. If a side of the image is shorter, the window covers it.
        overlap: the minimum overlap of neighbours, as a fraction of `side`.
    """
    rows, columns = (windows_along(length, side, overlap) for length in size)
    return [
        Tile((row[0], column[0], row[1], column[1]), (row[2], column[2], row[3], column[3]))
        for row in rows
        for column in columns
    ]


class Windows(Dataset[Window]):
    """The windows of all images of a data set, image by image.

    Args:
        images: samples with `pixels` and `mask`.
        sizes: (height, width) of each image in pixels.
        side, overlap: as for `tiles`.
    """

    def __init__(self, images: Any, sizes: Sequence[tuple[int, int]], *, side: int, overlap: float) -> None:
        self.pictures, self.sizes = images, sizes
        self.tiles = [tiles(size, side=side, overlap=overlap) for size in sizes]
        self.first = np.cumsum([0, *(len(of_picture) for of_picture in self.tiles)])
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> Window:
        number, place = self._place(index)
        if self._last is None or self._last[0] != number:  # neighbours are read one after another
            self._last = (number, self.pictures[number])
        sample = self._last[1]
        tile = self.tiles[number][place]
        top, left, height, width = tile.window
        inside = (slice(top, top + height), slice(left, left + width))
        mask = None if sample.mask is None else sample.mask[inside]
        return Window(sample.pixels[inside], mask, sample.name, tile, sample.pixels.shape[:2])

    def where(self, index: int) -> str:
        """The file of a window's image, and the position of the window in it."""
        number, place = self._place(index)
        top, left, height, width = self.tiles[number][place].window
        where = member_of(self.pictures, "where", str)(number)
        return f"{where}, window of {height} x {width} pixels at row {top}, column {left}"

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        return number, index - int(self.first[number])
