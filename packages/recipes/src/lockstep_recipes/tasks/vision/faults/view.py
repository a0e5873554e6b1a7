"""What finders get of a data set of images: its splits, and facts of the files that are opened."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding, Extent
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.images.decode import WHITE, decode, orientation_of
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages

_DRAFT = 128
"""Pixels of the side to which JPEG files are decoded for facts, at least."""
_THUMBNAIL = 16
_TINT = 3
"""Differences of red, green and blue in a grey JPEG file."""
_TIFF_BITS = 258


@dataclass(frozen=True)
class ImageFacts:
    """What one file shows."""

    index: int
    """The sample of its split."""
    file: str
    length: int
    """Bytes of the file."""
    digest: bytes
    """Of the whole file."""
    error: str | None = None
    """Why it cannot be opened. None: it can, and the following is known."""
    format: str = ""
    """PIL's name: JPEG, PNG, ..."""
    mode: str = ""
    """PIL's name: L, RGB, P, CMYK, I;16, ..."""
    size: tuple[int, int] = (0, 0)
    """(height, width) as the file stores it, before EXIF turns it."""
    orientation: int = 1
    """EXIF's, 1 (upright) to 8."""
    low: float = 0
    high: float = 0
    """The smallest and the largest value of all channels."""
    levels: Array | None = None
    """The different values of an image of 16 bits; of others None."""
    spread: float = 0
    """The standard deviation of the pixels, as a share of their range."""
    thumbnail: Array | None = None
    """(16, 16) float32 grey, upright: for comparisons of images."""
    frames: int = 1
    bits: int = 8
    """Of a channel in the file."""
    alpha: tuple[int, int] | None = None
    """The smallest and the largest value of an alpha channel."""
    is_grey: bool = True
    """True if red, green and blue are equal everywhere, whatever the mode."""


@dataclass
class ImageSplit:
    """The images of a split, with what belongs to them."""

    name: str
    """`training` or `evaluation`."""
    pictures: EncodedImages
    extent: Extent
    labels: Array | None = None
    """Class numbers: (images,). None: images have no label."""
    masks: Any = None
    """A `readers.mask_files.Masks`, or None."""
    annotations: Any = None
    """A `readers.coco_file.Annotations`, or None."""
    classes: Sequence[str] = ()
    """By class number. They are those of the training data, unless the task refuses the split."""
    levels: int = WHITE
    """The value that becomes white in grey images of 16 bits."""

    def __len__(self) -> int:
        return len(self.pictures)

    def class_of(self, index: int) -> str | None:
        """The name of an image's class. None: it has none."""
        return None if self.labels is None or self.labels[index] < 0 else self.classes[self.labels[index]]

    @property
    def class_counts(self) -> Array | None:
        """The number of images of each class: (classes,). None: images have no labels."""
        if self.labels is None:
            return None
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))

    @cached_property
    def opened(self) -> list[int]:
        """The samples to open, spread over the split."""
        most = self.extent.samples
        return list(range(len(self)) if most is None or most >= len(self) else np.arange(most) * len(self) // most)

    @cached_property
    def facts(self) -> list[ImageFacts]:
        """The facts of the samples that are opened."""
        found, left = [], self.extent.bytes
        for index in map(int, self.opened):
            one = facts_of(self.pictures, index)
            found.append(one)
            left = None if left is None else left - one.length
            if left is not None and left < 0:
                break
        return found

    def pixels(self, index: int) -> Array:
        """An image for the page: uint8 (height, width, 3), upright."""
        where = self.pictures.where(index)
        return decode(self.pictures.read(index), channels=3, levels=self.levels, where=where)


@dataclass
class ImageView:
    """A data set of images."""

    splits: Sequence[ImageSplit]
    """The training data, and the evaluation data if there is some."""
    refused: Sequence[DataFinding] = ()
    """What the task itself refuses."""

    @property
    def facts(self) -> Iterator[tuple[ImageSplit, ImageFacts]]:
        """The facts of all splits, of files that can be opened."""
        for split in self.splits:
            for one in split.facts:
                if one.error is None:
                    yield split, one


def facts_of(pictures: EncodedImages, index: int) -> ImageFacts:
    """The facts of one image, whatever its state."""
    where = pictures.where(index)
    try:
        data = pictures.read(index)
    except DataError as error:
        return ImageFacts(index, where, 0, b"", error.what)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if not data:
        return ImageFacts(index, where, 0, digest, "the file is empty")
    try:
        known = _decoded(data)
    except Exception as error:  # PIL's readers raise many kinds of errors
        return ImageFacts(index, where, len(data), digest, f"{type(error).__name__}: {error}")
    return ImageFacts(index, where, len(data), digest, None, **known)


def _decoded(data: bytes) -> dict[str, Any]:
    from PIL import Image

    with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
        warnings.simplefilter("ignore")
        known: dict[str, Any] = {"format": image.format or "", "mode": image.mode, "size": image.size[::-1]}
        known["orientation"] = orientation_of(image)
        known["frames"] = getattr(image, "n_frames", 1)
        known["bits"] = _bits(image, data)
        image.draft(None, (_DRAFT, _DRAFT))
        image.load()
        bands = image.getbands()
        if "A" in bands:
            known["alpha"] = image.getchannel("A").getextrema()
        wide = image.mode.startswith(("I", "F"))
        grey = image if wide else image.convert("L")
        values = np.asarray(grey, dtype=np.float32 if wide else None)
        if wide:
            known["levels"] = np.unique(np.asarray(image))
        limits = [grey.getextrema()] if wide or image.mode == "P" else image.getextrema()
        limits = limits if isinstance(limits[0], tuple) else [limits]
        known["low"], known["high"] = min(low for low, _ in limits), max(high for _, high in limits)
        known["spread"] = float(values.std()) / ((known["high"] - known["low"]) or 1 if wide else 255)
        small = grey.convert("F") if wide else grey
        small = small.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
        known["thumbnail"] = np.asarray(small, dtype=np.float32)
        known["is_grey"] = wide or _is_grey(image)
    return known


def _is_grey(image: Any) -> bool:
    from PIL import Image

    small = image.convert("RGB").resize((_DRAFT, _DRAFT), Image.Resampling.BOX)
    red, green, blue = np.asarray(small, dtype=np.int16).reshape(-1, 3).T  # pairs: `ptp` takes ten times as long
    return max(int(np.abs(one - other).max()) for one, other in ((red, green), (green, blue), (red, blue))) <= _TINT


def _bits(image: Any, data: bytes) -> int:
    """Bits of each channel in the file."""
    if image.format == "PNG":
        return data[24]
    found = image.tag_v2.get(_TIFF_BITS, (8,)) if image.format == "TIFF" else (8,)
    return int(found[0])
