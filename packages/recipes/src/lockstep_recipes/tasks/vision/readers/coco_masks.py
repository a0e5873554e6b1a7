"""Draw masks from the polygons and run-length encodings (RLE) of a COCO annotation file.

Format: https://cocodataset.org/#format-data. pycocotools draws the regions, as it does for COCO's own evaluation.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError, number_of
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.readers.class_table import (
    ClassEntry,
    ClassesOption,
    ClassTable,
    read_class_table,
    unknown_class,
)
from lockstep_recipes.tasks.vision.readers.coco_file import Annotations
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, add_file
from lockstep_recipes.tasks.vision.readers.mask_files import MaskForm, Size, size_of
from lockstep_recipes.tasks.vision.readers.mask_lookup import IGNORED

BACKGROUND = "background"
"""The class of pixels that no annotation covers."""
_SMALLEST_POLYGON = 6  # numbers: three points
_LARGEST = 1e9  # coordinate: pycocotools uses 32-bit integers
_UNKNOWN = -2
_TINY = 4  # pixels: up to this longer side of an image, a point in the first pixel is plausible
_REPAIR = "repair or remove this annotation"


def class_table(
    annotations: Annotations, classes: ClassesOption, ignore: Sequence[Any], *, names: Sequence[str] | None
) -> ClassTable:
    """The categories of a file that are classes, and those that are ignored.

    Args:
        classes: `task.classes`. None: `background`, and the categories by id. A category may itself have this name.
        ignore: `task.ignore`: names or ids of categories.
        names: the classes of the training data, for evaluation data, which may lack ignored categories.

    Raises:
        DataError: `classes` cannot be read, or `ignore` has an unknown name.
    """
    ids = annotations.category_ids.tolist()
    own = [ClassEntry(name, number) for name, number in zip(annotations.classes, ids, strict=True)]
    if BACKGROUND not in annotations.classes:
        own.insert(0, ClassEntry(BACKGROUND, max(ids) + 1))
    table = ClassTable(tuple(own), where=str(annotations.path)) if classes is None else read_class_table(classes)
    categories = {entry.name: entry for entry in own}
    further = [name for name in ignore if isinstance(name, str) and name not in table.names]
    beside = [categories[name] for name in further if name in categories]
    rest = [item for item in ignore if item not in further or (names is None and item not in categories)]
    return replace(table, ignored=(*table.ignored, *beside)).with_ignored(rest, where="task.ignore")


def category_numbers(annotations: Annotations, table: ClassTable, names: Sequence[str]) -> Array:
    """The class number of each category, or -1 if its pixels are ignored: (categories,) int16.

    Args:
        table: which categories are classes, and which are ignored.
        names: the classes; the numbers are indices into this list.

    Raises:
        DataError: an annotation has a category that is neither among `names` nor ignored.
    """
    ignored = {entry.name for entry in table.ignored}
    ignored_ids = {entry.id for entry in table.ignored if entry.color is None}

    def number(name: str, category: int) -> int:
        if name in table.names and name in names:
            return names.index(name)
        return IGNORED if name in ignored or category in ignored_ids else _UNKNOWN

    pairs = zip(annotations.classes, annotations.category_ids.tolist(), strict=True)
    numbers = np.array([number(name, category) for name, category in pairs], dtype=np.int16)
    unknown = np.flatnonzero(numbers[annotations.labels] == _UNKNOWN)
    if len(unknown):
        place = int(unknown[0])
        name = annotations.classes[int(annotations.labels[place])]
        what = f"category {name!r} is not among the {len(names)} classes ({number_of(len(unknown), 'annotation')})"
        remedy = unknown_class(name, names, f"Ignore it: task.ignore=[{name}]; or train with it")
        raise DataError(what, where=annotations.where(place), remedy=remedy)
    return numbers


class CocoMasks:
    """Masks drawn from annotations.

    Pixels without annotation are `background`, or ignored if there is no such class. Annotations of groups (`iscrowd`)
    are drawn first, then all others in the order of the file. If annotations overlap, the later one is visible.

    Args:
        annotations: read with segmentations.
        numbers: the class number of each category, or -1: (categories,).
        background: the class number of pixels without annotation, or -1.
        images: the images of the annotations, for sizes that the file lacks.
    """

    def __init__(self, annotations: Annotations, numbers: Array, *, background: int, images: EncodedImages) -> None:
        self.annotations, self.numbers, self.background = annotations, numbers, background
        self.pictures = images

    @classmethod
    def of_classes(
        cls, annotations: Annotations, table: ClassTable, *, names: Sequence[str] | None, images: EncodedImages
    ) -> CocoMasks:
        """Masks in which class numbers are indices into `names`, or into the classes of `table` if it is None.

        Raises:
            DataError: an annotation has a category that is neither a class nor ignored.
        """
        names = table.names if names is None else list(names)
        background = names.index(BACKGROUND) if BACKGROUND in names else IGNORED
        return cls(annotations, category_numbers(annotations, table, names), background=background, images=images)

    def __len__(self) -> int:
        return len(self.annotations.image_ids)

    def read(self, index: int) -> npt.NDArray[np.int16]:
        size, found = self.size(index), self.annotations
        columns = np.full(size[::-1], self.background, dtype=np.int16)  # column by column in memory, as in pycocotools
        part = found.of_image(index)
        for place in (part.start + np.argsort(~found.crowd[part], kind="stable")).tolist():
            try:
                region = _region(found.segmentation(place), size)
            except _Fault as fault:
                raise fault.error(found.where(place)) from None
            np.copyto(columns, self.numbers[found.labels[place]], where=region.T)
        return np.ascontiguousarray(columns.T)

    def size(self, index: int) -> Size:
        height, width = (int(side) for side in self.annotations.sizes[index])
        return (height, width) if height and width else size_of(self.pictures, index)

    def check(self) -> None:
        """Check every segmentation, without drawing it.

        Raises:
            DataError: a segmentation is missing; a polygon has fewer than three points, or a coordinate that is not a
                finite number; a segmentation is outside its image; an RLE belongs to an image of a different size; or
                most polygons seem to be fractions of their image. The error names the annotation.
        """
        found = self.annotations
        size, last = (0, 0), -1
        shares: list[int] = []
        for place, image in enumerate(found.images.tolist()):
            size, last = (size if image == last else self.size(image)), image
            segmentation = found.segmentation(place)
            try:
                _check(segmentation, size)
            except _Fault as fault:
                raise fault.error(found.where(place)) from None
            if isinstance(segmentation, list) and max(size) > _TINY and max(map(max, segmentation)) <= 1:
                shares.append(place)
        if shares and 2 * len(shares) > len(found.images):
            what = f"{len(shares)} of {len(found.images)} segmentations are inside the first pixel of their image"
            remedy = "are the points fractions of width and height, from 0 to 1 (normalised)? Multiply them by the size"
            raise DataError(what, where=found.where(shares[0]), remedy=f"{remedy} in pixels")

    def palette(self) -> Array | None:
        return None

    def form(self) -> MaskForm:
        """The categories by their ids, and the background by 0, or by the next free number if a category has 0."""
        ids = dict(zip(self.annotations.classes, self.annotations.category_ids.tolist(), strict=True))
        return MaskForm("palette", {BACKGROUND: 0 if 0 not in ids.values() else max(ids.values()) + 1} | ids)

    def where(self, index: int) -> str:
        found = self.annotations
        return f"{found.path}: image {found.image_ids[index]} ({found.file_names[index]})"

    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.numbers.tolist()}|{self.background}|".encode())
        add_file(digest, self.annotations.path, name=self.annotations.path.name)
        return digest.hexdigest()


class _Fault(Exception):
    """A fault of a segmentation."""

    def __init__(self, what: str, remedy: str = _REPAIR) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy

    def error(self, where: str) -> DataError:
        return DataError(self.what, where=where, remedy=self.remedy)


def _region(segmentation: Any, size: Size) -> npt.NDArray[np.bool_]:
    """The pixels of an annotation: (height, width) bool, column by column in memory."""
    _check(segmentation, size)
    remedy = "pip install pycocotools"
    coco = optional("pycocotools.mask", "pycocotools is needed to draw polygons", remedy=remedy)
    try:
        if isinstance(segmentation, list):
            encoded = coco.merge(coco.frPyObjects(segmentation, *size))
        elif isinstance(segmentation["counts"], list):
            encoded = coco.frPyObjects(segmentation, *size)
        else:
            encoded = {"size": list(size), "counts": segmentation["counts"].encode()}
        with warnings.catch_warnings():  # pycocotools 2.0.11 does not support the newest NumPy array protocol
            warnings.filterwarnings("ignore", "__array__", DeprecationWarning)
            region: npt.NDArray[np.bool_] = coco.decode(encoded).view(np.bool_)
    except (ValueError, TypeError) as error:
        raise _Fault(f"its segmentation cannot be drawn: {error}") from error
    return region


def _check(segmentation: Any, size: Size) -> None:
    if not segmentation:
        remedy = "a file with only boxes is for detection; for segmentation, each annotation needs polygons or an RLE"
        raise _Fault("it has no segmentation", remedy)
    if isinstance(segmentation, list):
        _check_polygons(segmentation, size)
    elif isinstance(segmentation, dict) and {"size", "counts"} <= set(segmentation):
        _check_rle(segmentation, size)
    else:
        what = f"its segmentation is {str(segmentation)[:80]!r}"
        raise _Fault(what, "give a list of polygons, or an RLE with `size` and `counts`")


def _check_polygons(polygons: list[Any], size: Size) -> None:
    inside = False
    for number, polygon in enumerate(polygons):
        if not isinstance(polygon, list):
            remedy = "give a list of polygons: [[x1, y1, x2, y2, x3, y3, ...], ...]"
            raise _Fault(f"its polygon {number} is {polygon!r}", remedy)
        if len(polygon) < _SMALLEST_POLYGON:
            points = "point" if len(polygon) // 2 == 1 else "points"
            what = f"its polygon {number} has {len(polygon) // 2} {points}: {polygon}"
            raise _Fault(what, "a polygon needs at least three points: repair it, or remove it")
        if len(polygon) % 2:
            what = f"its polygon {number} has {len(polygon)} numbers, which are not pairs of x and y"
            raise _Fault(what)
        xs, ys = polygon[::2], polygon[1::2]
        try:
            left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
            is_number = math.isfinite(sum(polygon)) and max(-left, right, -top, bottom) < _LARGEST
        except TypeError:
            is_number = False
        if not is_number:
            bad = next(value for value in polygon if type(value) not in (int, float) or not abs(value) < _LARGEST)
            raise _Fault(f"its polygon {number} has the coordinate {bad!r}")
        inside |= right > 0 and left < size[1] and bottom > 0 and top < size[0]
    if not inside:
        corner = f"from ({min(polygons[0][::2])}, {min(polygons[0][1::2])})"
        what = f"it is outside its image of {size[1]}x{size[0]} pixels (width x height): {corner}"
        raise _Fault(what)


def _check_rle(rle: dict[str, Any], size: Size) -> None:
    if rle["size"] != list(size):
        what = f"its RLE has {rle['size']} pixels, but its image {list(size)} (height, width)"
        raise _Fault(what)
    counts = rle["counts"]
    if not isinstance(counts, list | str):
        raise _Fault(f"the counts of its RLE are {counts!r}")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if not all(type(run) is int and run >= 0 for run in runs):
        raise _Fault("the counts of its RLE are not all integers of 0 or more")
    if sum(runs) != size[0] * size[1]:
        what = f"the counts of its RLE add up to {sum(runs)}, but its image has {size[0] * size[1]} pixels"
        raise _Fault(what)


def _runs(counts: str) -> list[int]:
    """The lengths of the runs in a compressed RLE. A damaged text gives wrong numbers, which are checked later.

    Source: `rleFrString` in https://github.com/cocodataset/cocoapi/blob/master/common/maskApi.c. Each character has
    five bits; the sixth means that the number continues. From the fourth number, the values are differences to the
    number two before.
    """
    runs: list[int] = []
    value = place = 0
    for letter in counts:
        bits = ord(letter) - 48
        value |= (bits & 31) << place
        place += 5
        if not bits & 32:
            value -= (bits & 16) << (place - 4)  # the sign
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = place = 0
    return runs
