"""Find the annotations and the images in a folder of images with boxes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.readers.encodings import read_text
from lockstep_recipes.tasks.readers.input_files import find_files, with_slashes
from lockstep_recipes.tasks.readers.yaml_names import load_names
from lockstep_recipes.tasks.vision.readers.image_files import image_suffixes, is_image
from lockstep_recipes.tasks.vision.readers.image_records import EVAL, TRAIN, Split

_YAML = (".yaml", ".yml")
_OTHER_KINDS = ("captions_", "person_keypoints_", "panoptic_", "stuff_", "image_info_")
EXPECTED = (
    "give a COCO annotation file (.json), or a folder with annotations/*.json and images/ (COCO), with "
    "Annotations/*.xml and JPEGImages/ (Pascal VOC), or with data.yaml or images/ and labels/ (YOLO)"
)


@dataclass(frozen=True)
class AnnotationLayout:
    """The locations of annotations and images."""

    kind: Literal["coco", "voc", "yolo"]
    annotations: Path
    """COCO: the JSON file. VOC: the folder of the XML files. YOLO: the YAML file, or the folder."""
    images: Path
    """The folder that names of images are relative to. YOLO: not used."""
    stems: tuple[str, ...] | None = None
    """VOC: the stems of the split's images. None: all."""
    pictures: tuple[Path, ...] = ()
    """YOLO: the images."""
    whole_folders: bool = True
    """YOLO: whether the images are all images of some folders rather than a list."""
    names: tuple[str, ...] | None = None
    """YOLO: the names of the classes."""
    keypoints: tuple[int, int] | None = None
    """YOLO: the number of keypoints after each box, and of the numbers of each. None: there are none."""


def find_layout(source: str, *, key: str, split: Split, images: str | None = None) -> AnnotationLayout:
    """Find the annotations and the images of a source.

    Args:
        source: a COCO file, a YAML file of YOLO, or a folder.
        key: the config key of the source, for errors.
        split: the split to use if a folder has several.
        images: the folder of the images. None: a usual place.

    Raises:
        DataError: there is no such source, or it has no known layout.
    """
    path = Path(source)
    layout = None
    if path.is_dir():
        layout = _of_folder(path, split, images)
    elif path.is_file() and path.suffix.lower() == ".json":
        layout = _coco(path, split, images)
    elif path.is_file() and path.suffix.lower() in _YAML:
        layout = _yolo(path, path.parent, split)
    elif not path.exists():
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, neighbours)
        remedy = f"{hint}{EXPECTED[0].upper()}{EXPECTED[1:]}"
        raise DataError(f"{key}: no such file or folder", where=source, remedy=remedy)
    if layout is None:
        part = "training" if split == "train" else "evaluation"
        raise DataError(f"{key}: there are no {part} images with boxes", where=source, remedy=EXPECTED)
    return layout


def evaluation_part(train: str) -> str | None:
    """The source of evaluation data that belongs to a source of training data, for a config without `data.eval`.

    Returns:
        the same source, if it has a training split and an evaluation split, or names a split that cannot be read
        (reading it then raises the error). Otherwise None.
    """
    path = Path(train)
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() in _YAML):
        return None
    try:
        layouts = [
            _of_folder(path, split, None) if path.is_dir() else _yolo(path, path.parent, split)
            for split in ("train", "eval")
        ]
    except DataError:
        return train
    return train if all(layouts) and layouts[0] != layouts[1] else None


def _words(split: Split) -> tuple[str, ...]:
    return TRAIN if split == "train" else EVAL


def _of_folder(folder: Path, split: Split, images: str | None) -> AnnotationLayout | None:
    names = {name.lower(): folder / name for name in sorted(os.listdir(folder), reverse=True)}
    inner = names.get("annotations", folder)
    inner = inner if inner.is_dir() else folder
    suffixes = {Path(name).suffix.lower() for name in os.listdir(inner) if not name.startswith(".")}
    if ".xml" in suffixes:
        place = Path(images) if images else names.get("jpegimages") or names.get("images") or folder
        return _voc(folder, inner, place, split)
    described = [path for name, path in sorted(names.items()) if path.suffix.lower() in _YAML and _is_yolo(path)]
    if described:
        return _yolo(described[0], folder, split)
    if ".json" in suffixes:
        file = _json_of(inner, split)
        return None if file is None else _coco(file, split, images)
    if (folder / "labels").is_dir() and (folder / "images").is_dir():
        return _yolo(None, folder, split)
    for word in _words(split):
        if (folder / word).is_dir():
            return _of_folder(folder / word, split, images)
    return None


# ---- COCO


def _json_of(folder: Path, split: Split) -> Path | None:
    """The annotation file of a split: the one whose name contains that of the split, or the only one."""
    files = [name for name in sorted(os.listdir(folder)) if name.lower().endswith(".json") and name[0] != "."]
    files = [name for name in files if not name.lower().startswith(_OTHER_KINDS)]
    for word in _words(split):
        found = [name for name in files if re.search(rf"(^|[^a-z]){word}([^a-z]|$)", name.lower())]
        if found:
            return folder / next((name for name in found if name.startswith("instances")), found[0])
    others = EVAL if split == "train" else TRAIN
    named = any(re.search(rf"(^|[^a-z]){word}([^a-z]|$)", name.lower()) for word in others for name in files)
    return folder / files[0] if len(files) == 1 and not named else None


def _coco(file: Path, split: Split, images: str | None) -> AnnotationLayout:
    if images is not None:
        return AnnotationLayout("coco", file, Path(images))
    stem = re.sub(r"^instances_", "", file.stem)
    above = file.parent.parent
    places = [above / "images" / stem, above / stem]
    places += [base / word for base in (above / "images", above) for word in _words(split)]
    places += [file.parent / "images", above / "images"]
    return AnnotationLayout("coco", file, next((place for place in places if _holds_images(place)), file.parent))


def _holds_images(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in entries)


# ---- Pascal VOC


def _voc(folder: Path, annotations: Path, images: Path, split: Split) -> AnnotationLayout | None:
    lists = folder / "ImageSets" / "Main"
    if not lists.is_dir():
        return AnnotationLayout("voc", annotations, images)
    for word in (*_words(split), *(("trainval",) if split == "train" else ())):
        path = lists / f"{word}.txt"
        if path.is_file():
            stems = tuple(line.split()[0] for line in read_text(path).splitlines() if line.strip())
            return AnnotationLayout("voc", annotations, images, stems=stems)
    return None


# ---- YOLO


def _is_yolo(path: Path) -> bool:
    """True if a YAML file describes a data set. Also true for an unreadable file with the usual name: reading it then
    reports the error."""
    try:
        content = load_names(read_text(path))
    except (DataError, ValueError, yaml.YAMLError):
        return path.stem.lower() == "data"
    return isinstance(content, dict) and ("names" in content or isinstance(content.get("train"), str | list))


def _yolo(file: Path | None, folder: Path, split: Split) -> AnnotationLayout | None:
    content = {} if file is None else _yolo_file(file)
    names = None if file is None else _yolo_names(content, file)
    if names is None and (folder / "classes.txt").is_file():
        names = tuple(line.strip() for line in read_text(folder / "classes.txt").splitlines() if line.strip())
    words = ("train",) if split == "train" else ("val", "valid", "test")
    given = next((content[word] for word in words if content.get(word)), None)
    places: Sequence[Path]
    if given is not None:
        root = folder / str(content.get("path") or "")
        places = [_yolo_place(str(item), root, folder) for item in (given if isinstance(given, list) else [given])]
    elif file is not None and any(content.get(word) for word in ("train", "val", "valid", "test")):
        return None
    else:
        inner = [folder / "images" / word for word in _words(split)]
        inner += [folder / word / "images" for word in _words(split)]
        parts = [folder / "images" / word for word in (*TRAIN, *EVAL)]
        places = [place for place in inner if place.is_dir()][:1]
        if not places and not any(part.is_dir() for part in parts):
            places = [folder / "images"]
    if not places:
        return None
    where = file or folder
    pictures = tuple(path for place in places for path in _yolo_images(place, where))
    whole = all(place.is_dir() for place in places)
    points = None if file is None else _keypoints(content, file)
    kept: dict[str, Any] = {"pictures": pictures, "whole_folders": whole, "names": names, "keypoints": points}
    return AnnotationLayout("yolo", where, folder, **kept)


def _yolo_file(file: Path) -> Mapping[str, Any]:
    try:
        content = load_names(read_text(file))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"this is not readable as YAML: {error}", where=str(file), remedy=EXPECTED) from error
    if not isinstance(content, dict):
        raise DataError("this is not a YAML file with `names`, `train` and `val`", where=str(file), remedy=EXPECTED)
    return content


def _yolo_names(content: Mapping[str, Any], file: Path) -> tuple[str, ...] | None:
    names = content.get("names")
    if isinstance(names, dict) and sorted(names) == list(range(len(names))):
        names = [names[number] for number in range(len(names))]
    distinct = set(map(str, names)) if isinstance(names, list) and None not in names else ()
    if names is None or (distinct and len(distinct) == len(names)):
        return None if names is None else tuple(str(name) for name in names)
    what = f"`names` is {names!r}"
    raise DataError(what, where=str(file), remedy="give a list of distinct names, or names by number from 0")


def _keypoints(content: Mapping[str, Any], file: Path) -> tuple[int, int] | None:
    """The number of keypoints of each object, and of the numbers of each: `kpt_shape`. None: there are none."""
    shape = content.get("kpt_shape")
    if shape is None:
        return None
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(part) is int for part in shape)):
        remedy = "write kpt_shape: [POINTS, 2], or [POINTS, 3] with visibility"
        raise DataError(f"`kpt_shape` is {shape!r}", where=str(file), remedy=remedy)
    return shape[0], shape[1]


def _yolo_place(item: str, root: Path, folder: Path) -> Path:
    """A folder or list of images. Files written by Roboflow contain `../train/images` but mean `train/images`."""
    tried = [root / item, folder / item, folder / item.removeprefix("../")]
    return next((path for path in tried if path.exists()), tried[0])


def _yolo_images(place: Path, where: Path) -> list[Path]:
    if place.is_dir():
        return find_files([str(place)], image_suffixes())
    if not place.is_file():
        raise DataError(f"there is no {place}, which the data set names", where=str(where), remedy="correct the path")
    lines = [line.strip() for line in read_text(place).splitlines()]
    names, _ = with_slashes(place.parent, [line for line in lines if line])
    return [place.parent / name for name in names]
