"""A data set of decoded images: encoded images of any source, a decoder, and an optional cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lockstep.cache_folder import cache_root
from lockstep.core.data.cache_options import CacheOptions
from lockstep_recipes.tasks.vision.images.cache import DecodedCache, folder_name
from lockstep_recipes.tasks.vision.images.decode import WHITE, decode
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages
from lockstep_recipes.tasks.vision.readers.image_records import ImageRecords

_DECODERS = ("pillow", "simplejpeg")


class DecodedImage(NamedTuple):
    """A raw sample."""

    pixels: npt.NDArray[np.uint8]
    """(height, width, channels) uint8, upright."""
    label: int
    """The class number, or -1 if it is unknown."""
    name: str
    """The name of the image in its source."""


class ImageDataset(Dataset[Any]):
    """Decoded images, from which data sets make samples with labels, masks or boxes. The cache does not change samples.

    Args:
        images: the encoded images.
        channels: 1 (grey) or 3 (RGB).
        levels: the value that becomes white in grey images of 16 bits.
        cache: with a cache, images are decoded only in the first epoch. None: each image is decoded whenever it is
            read.
        notes: remarks about how the source was read.
    """

    def __init__(
        self,
        images: EncodedImages,
        *,
        channels: int = 3,
        levels: int = WHITE,
        cache: CacheOptions | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.pictures, self.channels, self.levels = images, channels, levels
        self.notes = tuple(notes)
        """Remarks about how the source was read."""
        self.cache = None if cache is None else open_cache(images, channels=channels, levels=levels, options=cache)
        """The cache, whose `summary` is a line for the log. None: there is no cache."""

    def __len__(self) -> int:
        return len(self.pictures)

    def decoded(self, index: int) -> npt.NDArray[np.uint8]:
        """The pixels of an image, from its file: (height, width, channels) uint8, upright.

        Raises:
            DataError: the file cannot be read, or is not a complete image. The error names the file.
        """
        data = self.pictures.read(index)
        return decode(data, channels=self.channels, levels=self.levels, where=self.where(index))

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        """The same, from the cache if it contains the image."""
        return self.decoded(index) if self.cache is None else self.cache.pixels(index, lambda: self.decoded(index))

    def where(self, index: int) -> str:
        """The place of an image, for messages."""
        return self.pictures.where(index)


class DecodedImages(ImageDataset):
    """Decoded images with class numbers: samples are `DecodedImage`."""

    def __init__(
        self, records: ImageRecords, *, channels: int = 3, levels: int = WHITE, cache: CacheOptions | None = None
    ) -> None:
        super().__init__(records.pictures, channels=channels, levels=levels, cache=cache, notes=records.notes)
        self.records, self.labels = records, records.labels

    def __getitem__(self, index: int) -> DecodedImage:
        return DecodedImage(self.pixels(index), int(self.records.labels[index]), self.pictures.name(index))


class Digested(Protocol):
    """Images with a digest that changes if an image changes."""

    def __len__(self) -> int: ...

    def digest(self) -> str: ...


def open_cache(records: Digested, *, channels: int, options: CacheOptions, levels: int = WHITE) -> DecodedCache:
    """The cache of the decoded images of a source, in Lockstep's cache folder.

    Its name changes with the location and the files of the source, and with the versions of the decoders, whose pixels
    may differ by a level.
    """
    versions = [_version(name) for name in _DECODERS]
    versions += [
        found for found in [_version("pillow-heif")] if found
    ]  # without it, the cache of earlier versions stays valid
    versions += [] if levels == WHITE else [str(levels)]
    digest = hashlib.sha256(repr((records.digest(), len(records), versions)).encode()).hexdigest()
    folder = cache_root() / folder_name(digest, channels=channels, shorter_side=options.shorter_side)
    return DecodedCache(folder, len(records), channels=channels, options=options)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
