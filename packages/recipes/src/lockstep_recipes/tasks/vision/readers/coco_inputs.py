"""Images to predict, with their ids in a COCO file, so that rows of predictions are COCO results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.readers.input_files import with_slashes
from lockstep_recipes.tasks.vision.images.decode import WHITE
from lockstep_recipes.tasks.vision.readers.box_layouts import find_layout
from lockstep_recipes.tasks.vision.readers.boxed_images import BoxedImage
from lockstep_recipes.tasks.vision.readers.coco_file import read_coco_images
from lockstep_recipes.tasks.vision.readers.decoded_images import ImageDataset
from lockstep_recipes.tasks.vision.readers.image_files import ImageFiles, missing_files
from lockstep_recipes.tasks.vision.readers.image_records import ImageRecords, Split, unlabelled_images

_JSON = ".json"


@dataclass(frozen=True)
class CocoNumbers:
    """The ids of one COCO file. Ids of two files are never mixed: they may mean different images."""

    pictures: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """By the real path of an image: its id, and its name in the file."""
    category_ids: Mapping[str, int] | None = None
    """The id of each category by its name. None: there is no such file."""


@dataclass(frozen=True)
class RunSource:
    """Data of a run that may contain images to predict."""

    source: str
    split: Split
    images: str | None
    """The folder of its images. None: a usual location."""


class UnlabelledImages(ImageDataset):
    """Images to predict, as samples without boxes. A sample has an `image_id` only if `numbers` has the image.

    Args:
        numbers: ids and names of images.
    """

    def __init__(self, records: ImageRecords, numbers: CocoNumbers, *, channels: int, levels: int = WHITE) -> None:
        super().__init__(records.pictures, channels=channels, levels=levels, notes=records.notes)
        files, self.numbers = records.pictures, numbers
        places = [files.name(index) for index in range(len(files))]
        self._root = ""
        if isinstance(files, ImageFiles) and places:
            self._root = os.path.commonpath([os.path.dirname(os.path.abspath(place)) for place in places])

    def __getitem__(self, index: int) -> BoxedImage:
        pixels, name = self.pixels(index), self.pictures.name(index)
        below = os.path.relpath(name, self._root) if self._root else name
        image_id, name = self.numbers.pictures.get(os.path.realpath(name), (None, below))
        nothing: dict[str, Any] = {"labels": np.zeros(0, np.int64), "crowd": np.zeros(0, bool)}
        nothing |= {"boxes": np.zeros((0, 4), np.float32), "area": np.zeros(0, np.float32)}
        size = (pixels.shape[0], pixels.shape[1])
        return BoxedImage(pixels=pixels, **nothing, image_id=image_id, name=name, size=size)


def coco_inputs(
    arguments: Sequence[str], *, sources: Sequence[RunSource], channels: int, levels: int = WHITE
) -> UnlabelledImages:
    """The images that arguments name: files, folders, patterns, shards, and the images of one COCO file.

    The ids are those of the COCO file among the arguments. Without such a file, they are those of the first of
    `sources` that is a COCO file with one of these images. All other images have no id.

    Args:
        sources: the data of the run. A source that does not exist or cannot be read does not provide ids.

    Raises:
        DataError: the file is not a COCO file, or an image of it is missing; there are two such files; shards and files
            are mixed.
        UsageError: an argument does not name anything.
    """
    files = [argument for argument in arguments if argument.lower().endswith(_JSON) and os.path.isfile(argument)]
    if len(files) > 1:
        what = (
            f"there are two COCO files, {files[0]} and {files[1]}, and an image_id may mean a different image in each"
        )
        raise DataError(what, where="INPUT", remedy="predict them one after another, into separate files")
    if not files:
        records = unlabelled_images(arguments)
        return UnlabelledImages(records, _numbers_of_run(records.pictures, sources), channels=channels, levels=levels)
    paths, numbers = _of_file(Path(files[0]), [None, *(source.images for source in sources)])
    named = [path for argument in arguments for path in (paths if argument == files[0] else [argument])]
    return UnlabelledImages(unlabelled_images(named), numbers, channels=channels, levels=levels)


def _of_file(file: Path, folders: Sequence[str | None]) -> tuple[list[str], CocoNumbers]:
    """The paths of the images of a COCO file, and their numbers.

    Args:
        folders: folders that may contain the images. None: the usual ones. The first that contains the first image is
            used.
    """
    found = read_coco_images(file, key="INPUT")
    places = [find_layout(str(file), key="INPUT", split="eval", images=folder).images for folder in folders]
    found = found._replace(file_names=with_slashes(places[0], found.file_names)[0])
    folder = next((place for place in places if os.path.isfile(place / found.file_names[0])), places[0])
    paths = [os.path.join(folder, name) for name in found.file_names]
    missing = missing_files(paths)
    if missing:
        what = f"INPUT: there is no file {paths[missing[0]]} ({len(missing)} of {len(paths)} images are missing)"
        remedy = "put the images next to the file, as in images/val/, or give their folder instead of the COCO file"
        raise DataError(what, where=f"{file}: image {found.ids[missing[0]]}", remedy=remedy)
    pairs = zip(found.ids, found.file_names, strict=True)
    by_path = {os.path.realpath(path): pair for path, pair in zip(paths, pairs, strict=True)}
    return paths, CocoNumbers(by_path, found.category_ids)


def _numbers_of_run(pictures: object, sources: Sequence[RunSource]) -> CocoNumbers:
    """The ids from the first COCO file of the run that has one of the images. Only a file whose image folder contains
    one of them is read."""
    if not isinstance(pictures, ImageFiles):
        return CocoNumbers()
    real = {os.path.realpath(pictures.path(index)) for index in range(len(pictures))}
    for one in sources:
        try:
            layout = find_layout(one.source, key="data", split=one.split, images=one.images)
            below = os.path.join(os.path.realpath(layout.images), "")
            if layout.kind != "coco" or not any(path.startswith(below) for path in real):
                continue
            found = read_coco_images(layout.annotations, key="data")
        except DataError:  # a prediction does not need the training data
            continue
        by_path = {
            os.path.realpath(layout.images / name): (number, name)
            for number, name in zip(found.ids, found.file_names, strict=True)
        }
        if real & by_path.keys():
            return CocoNumbers(by_path, found.category_ids)
    return CocoNumbers()
