"""Masks of images: files next to the images, and columns of data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.images.decode import image_size
from lockstep_recipes.tasks.vision.images.mask import MaskKind, decode_mask
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, ImageFiles, images_below, size_of_file
from lockstep_recipes.tasks.vision.readers.mask_lookup import MaskLookup

_FIRST = 20  # masks to inspect
IMAGES, MASKS = "images", "masks"
"""Names of the folders with images, and with their masks."""

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
        first = decode_mask(self.files.read(0), where=self.where(0))
        kind: MaskKind = "grey" if first.palette is None else "palette"
        table = self.lookup.table
        if first.in_color or (first.palette is not None and table.masks == "colors"):
            kind = "color"
        return MaskForm(kind, {entry.name: entry.id for entry in table.classes})

    def where(self, index: int) -> str:
        return self.files.where(index)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.files.digest()}|{self.lookup.numbers()}".encode()).hexdigest()


def ids_in(files: EncodedImages) -> list[int]:
    """The ids that occur in the first 20 masks. Empty: they are colour images."""
    found: set[int] = set()
    for index in range(min(_FIRST, len(files))):
        mask = decode_mask(files.read(index), where=files.where(index))
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
    if whole or not isinstance(pictures, ImageFiles):
        return image_size(pictures.read(index), where=pictures.where(index))
    return size_of_file(pictures.path(index), where=pictures.where(index))


def read_mask_folder(folder: Path, part: str = "") -> tuple[ImageFiles, ImageFiles]:
    """The images in `folder/images` and their masks in `folder/masks`, at any depth, in the order of the names.

    A mask has the name of its image; suffixes may differ.

    Args:
        part: read `folder/images/PART` and `folder/masks/PART` instead.

    Raises:
        DataError: one of the folders is missing; there is no image; an image has no mask; a mask has no image; or two
            files of a folder differ only in the suffix. The error names the file.
    """
    inside = [folder / name / part for name in (IMAGES, MASKS)]
    for place in inside:
        if not place.is_dir():
            what = f"there is no folder {place.relative_to(folder)}/"
            remedy = f"put images into {inside[0]}, and for each a mask with the same name into {inside[1]}"
            raise DataError(what, where=str(folder), remedy=remedy)
    images, masks = map(_by_stem, inside)
    if not images:
        raise DataError("there is no image", where=str(inside[0]), remedy="put images into this folder")
    _check_pairs(images, masks, inside[0], inside[1], what="image has no mask")
    _check_pairs(masks, images, inside[1], inside[0], what="mask has no image")
    pictures, of_masks = ([files[stem] for stem in sorted(images)] for files in (images, masks))
    return ImageFiles(inside[0], pictures), ImageFiles(inside[1], of_masks)


def _by_stem(folder: Path) -> dict[str, str]:
    """Names of the images below a folder, by the names without suffix."""
    found: dict[str, str] = {}
    for name in images_below(folder):
        stem = name[: name.rindex(".")]
        if stem in found:
            what = f"{found[stem]} and {Path(name).name} have the same name except for the suffix"
            raise DataError(what, where=str(folder), remedy="remove one of the two, or rename it")
        found[stem] = name
    return found


def _check_pairs(files: dict[str, str], others: dict[str, str], folder: Path, other_folder: Path, what: str) -> None:
    missing = sorted(set(files) - set(others))
    if not missing:
        return
    more = f" ({len(missing)} of {len(files)} files of this folder have none)" if len(missing) > 1 else ""
    near = did_you_mean(missing[0], sorted(set(others) - set(files))[:1000])
    remedy = f"{near}Add {other_folder / missing[0]}.png (or a different suffix), or remove the file"
    raise DataError(f"this {what}{more}", where=str(folder / files[missing[0]]), remedy=remedy)
