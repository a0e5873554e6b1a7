"""Masks of images: files next to the images, and columns of data sets."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.images.decode import image_size
from lockstep_recipes.tasks.vision.images.mask import MaskKind, as_ids, decode_mask
from lockstep_recipes.tasks.vision.readers.class_table import ClassTable, Color
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, ImageFiles, size_of_file
from lockstep_recipes.tasks.vision.readers.mask_lookup import MaskLookup
from lockstep_recipes.tasks.vision.readers.mask_pairs import ARRAYS

_FIRST = 20  # masks to inspect
_FEW = 3  # masks, below which an id that occurs once is not odd

Size = tuple[int, int]


@dataclass(frozen=True)
class MaskForm:
    """How the mask files of a source encode the class of a pixel, so that predictions can use the same encoding."""

    kind: MaskKind
    """The kind of the files."""
    ids: Mapping[str, int]
    """The id of each class, by name."""


class Masks(Protocol):
    """Masks by index. Reading is safe in forked and in spawned loader workers."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> npt.NDArray[np.int16]:
        """The class number of each pixel, or -1: (height, width).

        Raises:
            DataError: the mask cannot be read, or contains a value that is not a class. The error names mask and value.
        """
        ...

    def size(self, index: int) -> Size:
        """(height, width) in pixels, without reading the mask itself.

        Raises:
            DataError: the mask cannot be read.
        """
        ...

    def check(self) -> None:
        """Check for faults that can be found without reading the masks.

        Raises:
            DataError: there is such a fault.
        """
        ...

    def palette(self) -> Array | None:
        """The colours of the ids in the first mask: uint8 (ids, 3). None: it has none."""
        ...

    def form(self) -> MaskForm:
        """The values of the classes in the files of the source."""
        ...

    def where(self, index: int) -> str:
        """The place of a mask, for messages."""
        ...

    def digest(self) -> str:
        """Hexadecimal digits that change if a mask or its meaning changes."""
        ...


class EncodedMasks:
    """Masks in image files.

    Args:
        files: the encoded masks.
        lookup: what their values mean.
    """

    def __init__(self, files: EncodedImages, lookup: MaskLookup) -> None:
        self.files, self.lookup = files, lookup

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> npt.NDArray[np.int16]:
        where = self.where(index)
        return self.lookup(decode_mask(self.files.read(index), where=where), where=where)

    def size(self, index: int) -> Size:
        return size_of(self.files, index)

    def check(self) -> None:
        pass  # pairs were checked when the folder was read

    def palette(self) -> Array | None:
        return decode_mask(self.files.read(0), where=self.where(0)).palette if len(self) else None

    def form(self) -> MaskForm:
        first = self.lookup.meant(decode_mask(self.files.read(0), where=self.where(0)))
        kind: MaskKind = "grey" if first.palette is None else "palette"
        table = self.lookup.table
        if first.in_color or (first.palette is not None and table.masks == "colors"):
            kind = "color"
        return MaskForm(kind, {entry.name: entry.id for entry in table.classes})

    def where(self, index: int) -> str:
        return self.files.where(index)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.files.digest()}|{self.lookup.numbers()}".encode()).hexdigest()


def ids_in(files: EncodedImages, indices: Iterable[int] | None = None) -> list[int]:
    """The ids that occur in masks, by default the first 20. Empty: they are colour images."""
    found: set[int] = set()
    for index in range(min(_FIRST, len(files))) if indices is None else indices:
        mask = as_ids(decode_mask(files.read(index), where=files.where(index)))
        if mask.in_color:
            return []
        found |= set(np.unique(mask.values).tolist())
    return sorted(found)


def size_of(pictures: EncodedImages, index: int, *, whole: bool = False) -> Size:
    """(height, width) in pixels of an encoded image, upright.

    Args:
        whole: read the whole file. Otherwise only its start, which contains the size in almost all files.

    Raises:
        DataError: the file cannot be read, or is not an image.
    """
    where = pictures.where(index)
    if pictures.name(index).endswith(ARRAYS):
        height, width = decode_mask(pictures.read(index), where=where).values.shape[:2]
        return height, width
    if whole or not isinstance(pictures, ImageFiles):
        return image_size(pictures.read(index), where=where)
    return size_of_file(pictures.path(index), where=where)


def saved_as_rgb(files: EncodedImages, lookup: MaskLookup) -> list[str]:
    """A note if the first mask has ids that are saved as RGB."""
    try:
        first = decode_mask(files.read(0), where=files.where(0))
    except DataError:  # reported when the mask is needed
        return []
    is_grey = first.in_color and not lookup.meant(first).in_color
    return ["the masks are grey images that were saved as RGB: their grey values are the ids"] * is_grey


def first_palette(files: EncodedImages, table: ClassTable) -> dict[str, Color] | None:
    """The colour of each class in the palette of the first mask. None: it has none, or classes share a colour; or the
    mask cannot be read, which is reported when it is needed."""
    try:
        palette = decode_mask(files.read(0), where=files.where(0)).palette
    except DataError:
        return None
    if palette is None or any(not 0 <= entry.id < len(palette) for entry in table.classes):
        return None
    found: dict[str, Color] = {entry.name: tuple(palette[entry.id].tolist()) for entry in table.classes}
    return found if len(set(found.values())) == len(found) else None


def second_of_two_ids(files: EncodedImages) -> int | None:
    """1 or 255 if the first masks contain only 0 and this id, as most masks of one class do. Otherwise None."""
    ids = ids_in(files)
    return ids[1] if ids in ([0, 1], [0, 255]) else None


def rare_id(files: EncodedImages) -> str | None:
    """A sentence about an id that only one of the first masks contains. None: there is none."""
    found: dict[int, list[str]] = defaultdict(list)
    for index in range(min(_FIRST, len(files))):
        for value in ids_in(files, range(index, index + 1)):
            found[value].append(files.where(index))
    odd = next(((value, places[0]) for value, places in found.items() if len(places) == 1), None)
    return None if odd is None or len(files) < _FEW else f"only {odd[1]} contains {odd[0]}"
