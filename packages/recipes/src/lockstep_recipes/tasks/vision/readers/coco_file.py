"""Annotation files in the format of COCO: a JSON object with `images`, `annotations` and `categories`.

Format: https://cocodataset.org/#format-data. Annotations become NumPy arrays while the file is read, so a file with a
million annotations takes tens of megabytes afterwards, which forked loader workers share.
"""

from __future__ import annotations

import json
import pickle
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.packed_text import PackedText
from lockstep_recipes.tasks.vision.readers.class_table import listed

_PARTS = ("images", "annotations", "categories")
_MOST_SIDE = 2**31  # pixels; a larger number cannot be the height or width of an image
_MOST = sys.float_info.max
_REPAIR = "repair or remove this entry of the file"


@dataclass(frozen=True, eq=False)
class Annotations:
    """Annotations of images. All values are those of the file.

    The annotations are sorted by image, and within an image keep the order of the file.
    """

    path: Path
    """The annotation file, or the folder of the files."""
    image_ids: Array
    """(images) int64: the id of each image in the file. Ids may have gaps."""
    file_names: PackedText
    """(images): the path of each image in the file."""
    sizes: Array
    """(images, 2) int64: height and width in pixels. 0 if the file does not contain them."""
    category_ids: Array
    """(classes) int64: the id of each class in the file, in increasing order. Ids may have gaps."""
    classes: tuple[str, ...]
    """The name of each class, in the order of `category_ids`."""
    ids: Array
    """(annotations) int64: the id of each annotation in the file."""
    images: Array
    """(annotations) int64: the index of its image in `image_ids`."""
    labels: Array
    """(annotations) int64: the index of its class in `category_ids`."""
    boxes: Array
    """(annotations, 4) float64: left, top, width and height in pixels. NaN if the file has no box."""
    area: Array
    """(annotations) float64: the area of the object in square pixels. Width x height if the file does not contain
    it."""
    crowd: Array
    """(annotations) bool: whether it marks a group of objects (`iscrowd`)."""
    starts: Array
    """(images + 1) int64: the annotations of image i have the indices starts[i] to starts[i + 1] - 1."""
    notes: tuple[str, ...] = ()
    """Remarks about how the file was read."""
    files: PackedText | None = None
    """(images): the annotation file of each image, for formats with one file per image."""
    packed: tuple[Array, Array] | None = None
    """The segmentations, if requested: the bytes of all, and the start and end of those of each annotation."""

    def of_image(self, index: int) -> slice:
        """The indices of the annotations of an image."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def segmentation(self, place: int) -> Any:
        """The `segmentation` of an annotation in the file: a list of polygons, a run-length encoding (RLE) as a dict,
        or None.

        Args:
            place: the index of the annotation, 0 to annotations - 1.
        """
        if self.packed is None:
            raise ValueError("the file was read without segmentations: call read_coco(..., segmentations=True)")
        content, bounds = self.packed
        return pickle.loads(content[bounds[place, 0] : bounds[place, 1]].tobytes())

    def where(self, place: int) -> str:
        """The place of an annotation, for messages."""
        image = int(self.images[place])
        if self.files is not None:
            return f"{self.files[image]}: box {place - self.starts[image] + 1}"
        name = self.file_names[image]
        return f"{self.path}: annotation {self.ids[place]} (of {name})"


def read_coco(path: str | Path, *, key: str, boxes: bool = True, segmentations: bool = False) -> Annotations:
    """Read and check a COCO annotation file.

    Boxes are only checked to be four numbers; the caller checks whether they are inside their image.

    Args:
        key: the config key of the file, such as `data.train`, for errors.
        boxes: whether each annotation must have a `bbox`.
        segmentations: keep the `segmentation` of each annotation.

    Raises:
        DataError: the file is missing, empty or not COCO's JSON; a section is missing or empty; an entry has no id or a
            number that is not an integer; ids occur twice; an annotation does not belong to an image, or its category
            is not declared; a box is not four numbers. The error names the file, the entry and the value.
    """
    path = Path(path)
    reader = _Reader(path, boxes=boxes, segmentations=segmentations)
    content = _load(path, key, reader.take)
    image_ids, names, category_ids, classes = _declared(content, path)
    _unique(classes, "name", "categories", path)
    order = np.argsort(category_ids, kind="stable")
    known = {"image_ids": image_ids, "file_names": PackedText(names), "sizes": _sizes(content["images"])}
    if not all("id" in entry for entry in content["images"]):
        reader.notes.append(f"{path}: images have no `id`: their `image_id` is used")
    known |= {"category_ids": category_ids[order], "classes": tuple(classes[place] for place in order)}
    return _annotations(reader, reader.places(content["annotations"]), path, known)


class CocoImages(NamedTuple):
    """The images and the categories of a COCO file, without its annotations."""

    ids: list[int]
    """(images): the id of each image in the file."""
    file_names: list[str]
    """(images): the path of each image in the file."""
    category_ids: dict[str, int]
    """The id of each category by its name."""


def read_coco_images(path: Path, *, key: str) -> CocoImages:
    """The images in a COCO file. Annotations are not needed, because files of test images do not have any.

    Args:
        key: a description of the file, for errors.

    Raises:
        DataError: the file cannot be read, or is not COCO's JSON; `images` or `categories` is missing or empty; an
            entry has no id or no name, or an id that occurs twice.
    """
    content = _load(path, key, lambda entry: None if _is_annotation(entry) else entry, ("images", "categories"))
    image_ids, names, category_ids, classes = _declared(content, path)
    return CocoImages(image_ids.tolist(), names, dict(zip(classes, category_ids.tolist(), strict=True)))


def _is_annotation(entry: Mapping[str, Any]) -> bool:
    """True if a JSON object is an annotation. Some files give images an `image_id`, too."""
    return "image_id" in entry and ("file_name" not in entry or "category_id" in entry)


def _declared(content: dict[str, Any], path: Path) -> tuple[Array, list[str], Array, list[str]]:
    """Ids and names of the images, and ids and names of the categories."""
    images, categories = content["images"], content["categories"]
    image_ids, category_ids = _ids(images, "image", path), _ids(categories, "category", path)
    names = _texts(images, image_ids, "image", "file_name", path)
    return image_ids, names, category_ids, _texts(categories, category_ids, "category", "name", path)


class _Taken(int):
    """The number of a collected annotation, which replaces it."""


class _Reader:
    """Collects annotations while the JSON is parsed, so that their dicts are never all in memory."""

    def __init__(self, path: Path, *, boxes: bool, segmentations: bool) -> None:
        self.path, self.boxes_needed = path, boxes
        self.ids, self.images, self.categories = array("q"), array("q"), array("q")
        self.boxes, self.area, self.crowd = array("d"), array("d"), array("b")
        self.segmentations = bytearray() if segmentations else None
        self.ends = array("q")
        self.notes: list[str] = []
        self.faults: dict[int, tuple[str, str]] = {}
        """Faults of annotations, by their number in this object: (where, what)."""

    def take(self, entry: dict[str, Any]) -> Any:
        """Called for each JSON object, inner ones first. An annotation is replaced by its number."""
        if not _is_annotation(entry):
            return entry
        number = len(self.ids)
        name = f"annotation {entry['id']!r}" if "id" in entry else f"an annotation of image {entry['image_id']!r}"
        for kind, values in (("id", self.ids), ("image_id", self.images), ("category_id", self.categories)):
            value = entry.get(kind)
            if type(value) is not int or not -(2**63) <= value < 2**63:
                bad = f"its {kind} is {repr(value)[:80]}, but must be an integer"
                self.faults.setdefault(number, (name, bad if kind in entry else f"it has no {kind}"))
                value = -1
            values.append(value)
        self._box(entry, number, name)
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1):
            self.faults.setdefault(number, (name, f"its iscrowd is {crowd!r}, but must be 0 or 1"))
            crowd = 0
        self.crowd.append(int(crowd))
        if self.segmentations is not None:
            self.segmentations += pickle.dumps(entry.get("segmentation"), protocol=5)
            self.ends.append(len(self.segmentations))
        return _Taken(number)

    def _box(self, entry: dict[str, Any], number: int, name: str) -> None:
        try:
            box = array("d", entry["bbox"])
        except (KeyError, TypeError, OverflowError):
            box = array("d")
        if len(box) != 4:
            if self.boxes_needed or "bbox" in entry:
                said = f"its bbox is {repr(entry['bbox'])[:80]}" if "bbox" in entry else "it has no bbox"
                self.faults.setdefault(number, (name, f"{said}, but must be [left, top, width, height] in pixels"))
            box = array("d", [float("nan")] * 4)
        self.boxes.extend(box)
        area = entry.get("area")
        if area is not None and (type(area) not in (int, float) or (type(area) is int and abs(area) > _MOST)):
            self.faults.setdefault(number, (name, f"its area is {repr(area)[:80]}, but must be a number of pixels"))
            area = None
        self.area.append(box[2] * box[3] if area is None else area)

    def places(self, entries: list[Any]) -> Array:
        """The numbers of the annotations of a file, in the order of the file.

        Raises:
            DataError: an entry is not an annotation, or a collected annotation has a fault.
        """
        for place, entry in enumerate(entries):
            if type(entry) is not _Taken:
                name = f"annotation {entry['id']!r}" if isinstance(entry, dict) and "id" in entry else "an annotation"
                where = f"{self.path}: {name} (entry {place} of annotations, counted from 0)"
                raise DataError("it has no image_id", where=where, remedy=_REPAIR)
        numbers = np.array(entries, dtype=np.int64)
        faults = [self.faults[number] for number in sorted(self.faults.keys() & set(entries))] if self.faults else []
        if faults:
            name, what = faults[0]
            raise DataError(f"{what}{more_like_this(len(faults))}", where=f"{self.path}: {name}", remedy=_REPAIR)
        return numbers


def _annotations(reader: _Reader, numbers: Array, path: Path, declared: dict[str, Any]) -> Annotations:
    category_ids, classes = declared["category_ids"], declared["classes"]

    def column(values: array[Any]) -> Array:
        return np.frombuffer(values, dtype=values.typecode)[numbers]

    ids, image_of, category_of = column(reader.ids), column(reader.images), column(reader.categories)
    _unique(ids, "id", "annotations", path)
    images, known = _look_up(image_of, declared["image_ids"])
    _refuse(ids, image_of, ~known, path, "belongs to image {}, which is not among the images of the file")
    labels, known = _look_up(category_of, category_ids)
    shown = listed([f"{number} ({name})" for number, name in zip(category_ids, classes, strict=True)])
    _refuse(ids, category_of, ~known, path, f"has category {{}}, but the file declares {shown}")
    order = np.argsort(images, kind="stable")
    notes = reader.notes
    if 0 in ids:
        notes.append(
            f"{path}: an annotation has the id 0, and pycocotools counts a detection that matches it as wrong: number "
            "annotations from 1"
        )
    packed = None
    if reader.segmentations is not None:
        ends = column(reader.ends)
        begins = np.concatenate([[0], np.frombuffer(reader.ends, dtype=np.int64)])[numbers]
        bounds = np.stack([begins, ends], axis=1)[order]
        packed = (np.frombuffer(bytes(reader.segmentations), dtype=np.uint8), bounds)
    return Annotations(
        path=path,
        ids=ids[order],
        images=images[order],
        labels=labels[order],
        boxes=np.frombuffer(reader.boxes).reshape(-1, 4)[numbers][order],
        area=column(reader.area)[order],
        crowd=column(reader.crowd)[order].astype(bool),
        starts=np.searchsorted(images[order], np.arange(len(declared["image_ids"]) + 1)),
        notes=tuple(notes),
        packed=packed,
        **declared,
    )


# ---- the sections of the file


def _load(path: Path, key: str, take: Callable[[dict[str, Any]], Any], parts: Sequence[str] = _PARTS) -> dict[str, Any]:
    """The content of the file, with lists under the keys `parts`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        what = f"{key}: cannot be read: {error.strerror}"
        raise DataError(what, where=str(path), remedy="check the path and its permissions") from error
    except UnicodeDecodeError as error:
        what = f"{key} is not JSON: it is not UTF-8 text (byte {error.start})"
        raise DataError(what, where=str(path), remedy="give a COCO annotation file") from error
    if not text.strip():
        raise DataError(f"{key}: the file is empty", where=str(path), remedy="give a COCO annotation file")
    try:
        content = json.loads(text, object_hook=take)
    except (ValueError, RecursionError) as error:
        remedy = "the file may be truncated: write it again, or download it again"
        raise DataError(f"{key} is not JSON: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(content, dict):
        kind = "a list, as in result files" if isinstance(content, list) else repr(content)[:80]
        remedy = f"give a JSON object with {', '.join(parts)}"
        raise DataError(f"{key} is {kind}, not an annotation file", where=str(path), remedy=remedy)
    for part in parts:
        entries = content.get(part)
        if not isinstance(entries, list) or not entries:
            state = "is missing" if entries is None else "is empty" if entries == [] else "is not a list"
            what = f"{key}: `{part}` {state}"
            remedy = f"give a COCO annotation file, with lists of {', '.join(parts)}"
            raise DataError(what, where=str(path), remedy=remedy)
    return content


def _ids(entries: Sequence[Any], kind: str, path: Path) -> Array:
    """The `id` of each image or category."""
    values = []
    for place, entry in enumerate(entries):
        value = entry.get("id", entry.get("image_id")) if isinstance(entry, dict) else None
        if type(value) is not int or not -(2**63) <= value < 2**63:
            what = f"its id is {value!r}, but must be an integer"
            remedy = "use integers as ids of images and categories, and in the annotations"
            raise DataError(what, where=f"{path}: {kind} entry {place}, counted from 0", remedy=remedy)
        values.append(value)
    _unique(values, "id", "images" if kind == "image" else "categories", path)
    return np.array(values, dtype=np.int64)


def _texts(entries: Sequence[Any], ids: Array, kind: str, field: str, path: Path) -> list[str]:
    values = [entry.get(field) for entry in entries]
    for number, value in zip(ids, values, strict=True):
        if not isinstance(value, str) or not value:
            what = f"its {field} is {value!r}, but must be a text"
            raise DataError(what, where=f"{path}: {kind} {number}", remedy=_REPAIR)
    return values


def _sizes(images: Sequence[dict[str, Any]]) -> Array:
    values = [[image.get("height"), image.get("width")] for image in images]
    return np.array(
        [[side if type(side) is int and 0 < side < _MOST_SIDE else 0 for side in pair] for pair in values],
        dtype=np.int64,
    )


# ---- checks of whole columns


def _unique(values: Sequence[Any] | Array, field: str, part: str, path: Path) -> None:
    _, first, counts = np.unique(np.asarray(values), return_index=True, return_counts=True)
    twice = np.sort(first[counts > 1])
    if len(twice):
        value = values[twice[0]]
        shown = repr(value) if isinstance(value, str) else str(value)
        what = f"{counts.max()} {part} have the {field} {shown}{more_like_this(len(twice))}"
        raise DataError(what, where=str(path), remedy=f"give each of the {part} a different {field}")


def _look_up(values: Array, known: Array) -> tuple[Array, Array]:
    """The index of each value in `known`, and whether it occurs there."""
    order = np.argsort(known, kind="stable")
    places = np.searchsorted(known[order], values).clip(max=len(known) - 1)
    places = order[places]
    return places, known[places] == values


def _refuse(ids: Array, values: Array, bad: Array, path: Path, what: str) -> None:
    """Raise a DataError that names the first bad annotation."""
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        said = what.format(values[first]) + more_like_this(int(bad.sum()))
        remedy = "add the missing entry to the file, or remove these annotations"
        raise DataError(f"it {said}", where=f"{path}: annotation {ids[first]}", remedy=remedy)


def more_like_this(count: int) -> str:
    return f" (and {count - 1} more like this)" if count > 1 else ""
