"""Read boxes from one file per image, Pascal VOC (XML) or YOLO (text), as `Annotations`.

Both get ids as in a COCO file: images, annotations and classes are numbered from 1, in the order of the sorted images,
the objects in each file, and the class names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from lockstep.core.errors import DataError, did_you_mean
from lockstep.core.foreign_errors import reading
from lockstep_recipes.tasks.readers.packed_text import PackedText
from lockstep_recipes.tasks.vision.readers.class_table import unknown_class
from lockstep_recipes.tasks.vision.readers.coco_file import Annotations, more_like_this
from lockstep_recipes.tasks.vision.readers.image_files import is_image, left_out_below, size_of_file
from lockstep_recipes.tasks.vision.readers.yolo_lines import YoloLines

_NOT_LABELS = ("classes.txt", "README.txt", "README.roboflow.txt", "README.dataset.txt")


@dataclass
class _Collected:
    """Objects of many images."""

    names: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)

    def annotations(self, path: Path, classes: Sequence[str], *, notes: Sequence[str] = ()) -> Annotations:
        boxes = np.array(self.boxes, dtype=np.float64).reshape(-1, 4)
        starts = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)]).astype(np.int64)
        return Annotations(
            path=path,
            image_ids=np.arange(1, len(self.names) + 1),
            file_names=PackedText(self.names),
            sizes=np.array(self.sizes, dtype=np.int64).reshape(-1, 2),
            category_ids=np.arange(1, len(classes) + 1),
            classes=tuple(classes),
            ids=np.arange(1, len(boxes) + 1),
            images=np.repeat(np.arange(len(self.names)), self.counts),
            labels=np.array(self.labels, dtype=np.int64),
            boxes=boxes,
            area=boxes[:, 2] * boxes[:, 3],
            crowd=np.array(self.crowd, dtype=bool),
            starts=starts,
            notes=tuple(notes),
            files=PackedText(self.files),
        )


def read_voc(
    folder: Path, images: Path, *, stems: Sequence[str] | None, classes: Sequence[str] | None, difficult: bool = False
) -> Annotations:
    """Read boxes from Pascal VOC's XML files.

    VOC counts pixels from 1, and `xmax` is the last pixel of the object. So left = xmin - 1 and right = xmax: an object
    of one pixel has a width of 1. If any xmin or ymin is 0 or less, the files count from 0. Edges are then used
    unchanged, and a note reports it.

    Objects that are `difficult` are marked as crowds: training ignores them, and evaluations count neither their
    detections nor their misses. (VOC's evaluation does the same.)

    Args:
        folder: the folder of the XML files.
        images: the folder of the images. An image has the stem of its XML file.
        stems: the images of a split. None: all XML files.
        classes: names of the classes. None: the names in these files, sorted.
        difficult: treat difficult objects as ordinary ones.

    Raises:
        DataError: a file is not a VOC file, lacks its image, or has an object without a name or a box, or with a class
            that is not in `classes`; an image occurs twice in `stems`.
    """
    there = sorted(name[:-4] for name in os.listdir(folder) if name.lower().endswith(".xml") and name[0] != ".")
    wanted = there if stems is None else list(stems)
    pictures = _by_stem(images)
    if not wanted:
        raise DataError("there are no annotations (.xml)", where=str(folder), remedy="give a folder with VOC's files")
    _refuse_twice(wanted, where=folder, remedy="name each image once in the file of ImageSets/Main")
    absent = sorted(set(wanted) - set(there))
    if absent:
        what = f"{absent[0]}.xml, from the list of the split, does not exist{more_like_this(len(absent))}"
        raise DataError(what, where=str(folder), remedy="add the file, or remove the name from ImageSets/Main")
    out = _Collected()
    for stem in wanted:
        path = folder / f"{stem}.xml"
        if stem not in pictures:
            raise _no_image(path, images, stem, pictures)
        _read_xml(path, out, difficult=difficult)
        out.names.append(pictures[stem])
    names = list(classes) if classes is not None else sorted(set(out.labels))
    out.labels = _numbers(out, names)
    notes = _from_one(out)
    if stems is None and (others := pictures.keys() - set(there)):
        notes.append(f"{len(others)} images in {images} have no .xml file and are left out")
    return out.annotations(folder, names, notes=notes)


def read_yolo(
    images: Sequence[Path],
    names: Sequence[str] | None,
    *,
    whole_folders: bool = True,
    keypoints: tuple[int, int] | None = None,
) -> Annotations:
    """Read boxes from YOLO's text files, with a line for each object: `class x y width height`.

    x and y are the centre of the box. All four are fractions of the image's width and height. A line with three or more
    points (`class x y x y x y ...`) is a polygon, whose bounding box is used. With `keypoints`, a longer line is a box
    with keypoints (a pose), which are not used. An image without a text file has no
    objects. The text file of `.../images/a.jpg` is `.../labels/a.txt`.

    Args:
        images: the images.
        names: the names of the classes, by number. None: the numbers are the names.
        whole_folders: the images are all images of their folders, so each text file must belong to one of them.
        keypoints: the number of keypoints after each box, and of the numbers of each (`kpt_shape`). None: no keypoints.

    Raises:
        DataError: a line has a different form, or a class that is not in `names`; no image has a text file; a text
            file has no image; an image occurs twice.
    """
    remedy = "name each image once, and do not name a folder together with a folder or a list that contains its images"
    _refuse_twice([str(path) for path in images], where=None, remedy=remedy)
    out = _Collected()
    polygons = YoloLines(keypoints)
    without = 0
    for path in images:
        file = label_file(path)
        size = size_of_file(str(path))
        before = len(out.labels)
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except FileNotFoundError:
            without += 1
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", where=str(file), remedy="repair or remove it") from error
        for line, text in enumerate(lines, 1):
            if text.strip():
                _read_line(text.split(), size, out, where=f"{file}:{line}", names=names, polygons=polygons)
        out.names.append(str(path.absolute()))  # the images may be in several folders
        out.files.append(str(file))
        out.sizes.append(size)
        out.counts.append(len(out.labels) - before)
    polygons.check()
    if without == len(images):
        what = f"none of the {len(images)} images has a label file"
        remedy = "the labels of DIR/images/a.jpg are expected in DIR/labels/a.txt"
        raise DataError(what, where=str(images[0]) if images else None, remedy=remedy)
    notes = [f"{without} of {len(images)} images have no label file, so they have no objects"] if without else []
    if whole_folders:
        _check_labels(images)
        notes += left_out_below(sorted({path.parent for path in images}), labels=(".txt", ".json", ".yaml", ".cache"))
    classes = list(names) if names is not None else [str(number) for number in range(max(out.labels, default=-1) + 1)]
    return out.annotations(label_file(images[0]).parent, classes, notes=notes)


def label_file(picture: Path) -> Path:
    """The text file of an image in YOLO's arrangement: the last folder `images` of its path becomes `labels`."""
    parts = list(picture.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


# ---- VOC


def _read_xml(path: Path, out: _Collected, *, difficult: bool) -> None:
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, OSError) as error:
        remedy = "repair or remove the file"
        raise DataError(f"this is not readable as XML: {error}", where=str(path), remedy=remedy) from error
    before = len(out.labels)
    for number, item in enumerate(root.findall("object"), 1):
        where = f"{path}: box {number}"
        name = (item.findtext("name") or "").strip()
        if not name:
            raise DataError("the object has no name", where=where, remedy="write its class into <name>")
        corners = [_float(item, f"bndbox/{corner}", where) for corner in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = corners
        out.labels.append(name)
        out.boxes.append((left, top, right - left, bottom - top))
        out.crowd.append(not difficult and (item.findtext("difficult") or "0").strip() not in ("", "0"))
    size = root.find("size")
    height, width = ((size.findtext(side) or "") if size is not None else "" for side in ("height", "width"))
    known = height.strip().isdecimal() and width.strip().isdecimal()
    out.sizes.append((int(height), int(width)) if known else (0, 0))
    out.files.append(str(path))
    out.counts.append(len(out.labels) - before)


def _from_one(out: _Collected) -> list[str]:
    """Shift left and top edges, which VOC counts from 1. Returns a note if the files count from 0 instead."""
    from_zero = [place for place, (left, top, _, _) in enumerate(out.boxes) if left <= 0 or top <= 0]
    if not from_zero:
        out.boxes = [(left - 1, top - 1, width + 1, height + 1) for left, top, width, height in out.boxes]
        return []
    file = int(np.searchsorted(np.cumsum(out.counts), from_zero[0], side="right"))
    return [
        f"xmin or ymin is 0 or less in {len(from_zero)} boxes, the first in {out.files[file]}. Pascal VOC counts "
        "pixels from 1. These files seem to count from 0, so left = xmin and top = ymin for all boxes"
    ]


def _float(item: ElementTree.Element, name: str, where: str) -> float:
    text = item.findtext(name)
    try:
        return float(text or "")
    except ValueError as error:
        said = "is missing" if text is None else f"is {text!r}, but must be a number"
        raise DataError(f"{name} {said}", where=where, remedy="repair or remove this object") from error


def _numbers(out: _Collected, names: Sequence[str]) -> list[int]:
    places = {name: number for number, name in enumerate(names)}
    for place, label in enumerate(out.labels):
        if label not in places:
            file = int(np.searchsorted(np.cumsum(out.counts), place, side="right"))
            number = place - sum(out.counts[:file]) + 1
            what, where = f"class {label!r} is not among the {len(names)} classes", f"{out.files[file]}: box {number}"
            remedy = unknown_class(label, names, "Remove the object, or train with it")
            raise DataError(what, where=where, remedy=remedy)
    return [places[label] for label in out.labels]


# ---- YOLO


def _read_line(
    words: Sequence[str],
    size: tuple[int, int],
    out: _Collected,
    *,
    where: str,
    names: Sequence[str] | None,
    polygons: YoloLines,
) -> None:
    height, width = size
    try:
        label, *values = float(words[0]), *map(float, words[1:])
    except ValueError as error:
        what = f"the line is {' '.join(words)!r}"
        raise DataError(what, where=where, remedy="write numbers: class x y width height") from error
    if len(values) == 4 or (len(values) > 4 and polygons.is_pose(values, where)):
        x, y, w, h = values[:4]
        left, top, wide, high = x - w / 2, y - h / 2, w, h
    elif len(values) >= 6 and len(values) % 2 == 0 and not polygons.after_box:
        left, top = min(values[::2]), min(values[1::2])
        wide, high = max(values[::2]) - left, max(values[1::2]) - top
    else:
        what = f"the line has {len(words)} numbers"
        raise DataError(what, where=where, remedy=polygons.expected)
    if not label.is_integer() or label < 0 or (names is not None and label >= len(names)):
        allowed = "0 or more" if names is None else f"0 to {len(names) - 1}"
        what = f"the class is {words[0]}, but must be {allowed}"
        raise DataError(what, where=where, remedy="correct the number, or add the class to `names` of the YAML file")
    out.labels.append(int(label))
    out.boxes.append((left * width, top * height, wide * width, high * height))
    out.crowd.append(False)


def _check_labels(images: Sequence[Path]) -> None:
    """Raise DataError if a label file in one of the folders has no image."""
    known = {label_file(path) for path in images}
    for folder in sorted({file.parent for file in known}):
        there = sorted(folder.glob("*.txt")) if folder.is_dir() else []
        lost = [file for file in there if file not in known and file.name not in _NOT_LABELS]
        if lost:
            what = f"there is no image for this label file{more_like_this(len(lost))}"
            raise DataError(what, where=str(lost[0]), remedy="add the image, or remove this file")


# ---- images


def _by_stem(folder: Path) -> dict[str, str]:
    """The names of the images in a folder, by stem."""
    with reading(folder, "give the folder of the images as task.images"):
        names = sorted(os.listdir(folder))
    found: dict[str, str] = {}
    for name in filter(is_image, names):
        stem = os.path.splitext(name)[0]
        if stem in found:
            what = f"two images have the stem {stem!r}: {found[stem]} and {name}"
            raise DataError(what, where=str(folder), remedy="remove or rename one of them")
        found[stem] = name
    return found


def _no_image(path: Path, images: Path, stem: str, pictures: Iterable[str]) -> DataError:
    hint = did_you_mean(stem, pictures)
    remedy = f"{hint}Add the image, or remove this file"
    return DataError(f"there is no image for it in {images}", where=str(path), remedy=remedy)


def _refuse_twice(names: Sequence[str], *, where: Path | None, remedy: str) -> None:
    """Raise DataError if an image occurs twice: training and evaluation would count it twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"the data set names the image {twice[0]} more than once{more_like_this(len(twice))}"
        raise DataError(what, where=None if where is None else str(where), remedy=remedy)
