"""Images with boxes from COCO, Pascal VOC and YOLO files, as a map-style data set of decoded images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.input_files import with_slashes
from lockstep_recipes.tasks.vision.images.decode import WHITE
from lockstep_recipes.tasks.vision.readers.box_checks import check_boxes, check_meaning
from lockstep_recipes.tasks.vision.readers.box_files import read_voc, read_yolo
from lockstep_recipes.tasks.vision.readers.box_layouts import AnnotationLayout, evaluation_part, find_layout
from lockstep_recipes.tasks.vision.readers.class_table import unknown_class
from lockstep_recipes.tasks.vision.readers.coco_file import Annotations, read_coco
from lockstep_recipes.tasks.vision.readers.decoded_images import ImageDataset
from lockstep_recipes.tasks.vision.readers.image_files import ImageFiles, missing_files, size_of_file
from lockstep_recipes.tasks.vision.readers.image_records import Split

if TYPE_CHECKING:
    from lockstep_recipes.tasks.vision.detection.options import DetectionOptions

__all__ = ["BoxedImage", "BoxedImages", "evaluation_part", "read_boxed_images"]


class BoxedImage(NamedTuple):
    """A raw sample."""

    pixels: npt.NDArray[np.uint8]
    """(height, width, channels) uint8, upright."""
    boxes: npt.NDArray[np.float32]
    """(n, 4) float32: left, top, right and bottom edge of each box in pixels of `pixels`, clipped at the edges of the
    image."""
    labels: Array
    """(n) int64: class numbers, 0 to classes - 1."""
    crowd: Array
    """(n) bool: whether a box marks a group of objects. Training does not learn these boxes as objects."""
    area: npt.NDArray[np.float32]
    """(n) float32: area of each object in square pixels of the original image, from the annotation file."""
    image_id: int | None
    """The id of the image in the annotation file. None: the image is not in a file."""
    name: str
    """The path of the image in the annotation file."""
    size: tuple[int, int]
    """(height, width) of the original image in pixels. `pixels` has this size, unless the cache reduces images."""


class BoxedImages(ImageDataset):
    """Decoded images with boxes: samples are `BoxedImage`.

    Args:
        annotations: the annotations, with the sizes of all images.
        images: the files.
        classes: the names of the classes, by class number.
        numbers: (classes of the file) the class number of each class of the file, or -1 for classes without a number.
        kept: `channels`, `levels`, `cache` and `notes` of `ImageDataset`.
    """

    sample_labels = None  # an image itself has no label: `labels` are those of the boxes

    def __init__(
        self, annotations: Annotations, images: ImageFiles, *, classes: Sequence[str], numbers: Array, **kept: Any
    ) -> None:
        super().__init__(images, **kept)
        self.annotations = annotations
        self.classes = list(classes)
        """The names of the classes, by number."""
        self.labels: Array = numbers[annotations.labels]
        """The class number of each annotation: (annotations,) int64, sorted by image."""
        ids = np.full(len(self.classes), -1, dtype=np.int64)
        ids[numbers[numbers >= 0]] = annotations.category_ids[numbers >= 0]
        self.category_ids: Array = ids
        """The number of each class in the annotation file: (classes,) int64. -1: the file does not declare the
        class."""

    def decoded(self, index: int) -> npt.NDArray[np.uint8]:
        pixels, size = super().decoded(index), self.size(index)
        if pixels.shape[:2] != size:
            raise _other_size(pixels.shape[:2], size, self.where(index), self.annotations)
        return pixels

    def __getitem__(self, index: int) -> BoxedImage:
        """A sample.

        Raises:
            DataError: the file cannot be read, is not a complete image, or its size differs from the annotations. The
                error names the file.
        """
        pixels, size = self.pixels(index), self.size(index)
        part = self.annotations.of_image(index)
        return BoxedImage(
            pixels=pixels,
            boxes=self._corners(part, pixels.shape[:2], size),
            labels=self.labels[part],
            crowd=self.annotations.crowd[part],
            area=self.annotations.area[part].astype(np.float32),
            image_id=int(self.annotations.image_ids[index]),
            name=self.annotations.file_names[index],
            size=size,
        )

    def _corners(self, part: slice, now: Sequence[int], size: tuple[int, int]) -> npt.NDArray[np.float32]:
        boxes = self.annotations.boxes[part]
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        corners = corners.clip(0, np.array([size[1], size[0]] * 2))
        corners *= np.array([now[1] / size[1], now[0] / size[0]] * 2)
        return corners.astype(np.float32)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image in pixels, without reading it."""
        height, width = self.annotations.sizes[index].tolist()
        return height, width

    @property
    def counts(self) -> Array:
        """The number of boxes of each image, crowds included: (images,) int64."""
        return np.diff(self.annotations.starts)

    def class_counts(self) -> dict[str, int]:
        """The number of boxes of each class, without crowds."""
        numbers = np.bincount(self.labels[~self.annotations.crowd], minlength=len(self.classes))
        return dict(zip(self.classes, numbers.tolist(), strict=True))

    def ground_truth(self) -> dict[str, Any]:
        """The annotations in the form of pycocotools: the content of a COCO file.

        Ids, boxes, areas and crowds are exactly those of the annotation file, including boxes that extend beyond the
        edge. It contains Python objects for each annotation: create it when needed, and drop it afterwards.
        """
        all_ = self.annotations
        names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
        image_ids, category_ids = all_.image_ids[all_.images], all_.category_ids[all_.labels]
        columns = (all_.ids, image_ids, category_ids, all_.boxes, all_.area, all_.crowd.astype(int))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        images = zip(all_.image_ids.tolist(), all_.sizes.tolist(), strict=True)
        categories = zip(all_.category_ids.tolist(), all_.classes, strict=True)
        return {
            "info": {},  # pycocotools copies this key from the ground truth to the results
            "images": [{"id": number, "height": height, "width": width} for number, (height, width) in images],
            "annotations": [dict(zip(names, row, strict=True)) for row in rows],
            "categories": [{"id": number, "name": name} for number, name in categories],
        }


def read_boxed_images(
    source: str,
    split: Split,
    options: DetectionOptions,
    *,
    classes: Sequence[str] | None = None,
    cache: CacheOptions | None = None,
    checked: bool = True,
) -> BoxedImages:
    """The images of a source, with boxes. No image is decoded here.

    | source | samples |
    |---|---|
    | `FILE.json`, or a folder with `annotations/*.json` and `images/` | COCO |
    | a folder with `Annotations/*.xml`, `JPEGImages/` and optionally `ImageSets/Main/*.txt` | Pascal VOC: `read_voc` |
    | `FILE.yaml`, or a folder with `data.yaml` or with `images/` and `labels/` | YOLO: `read_yolo` |
    | a folder with `train/`, and `val/`, `valid/` or `test/` | those of one of these folders |

    Args:
        split: the split to read if a source has several.
        options: its `images` and `eval_images`, `on_bad_boxes`, `difficult`, `channels` and `levels`.
        classes: the class names of the training data, or of the config; class numbers are indices into this list. None:
            the classes of the source: COCO by category id, VOC alphabetically, YOLO by number.
        cache: options of the disk cache of decoded images.
        checked: whether bad boxes are an error, or are left out. Otherwise they are returned.

    Raises:
        DataError: there is no such source; an image is missing; an annotation is bad (see `read_coco`, `read_voc`,
            `read_yolo` and `on_bad_boxes`), or has a class that is not in `classes`; the four numbers of most boxes
            seem to have a different meaning. The error names file, annotation and value.
    """
    key, on_bad = f"data.{split}", options.on_bad_boxes
    layout = find_layout(source, key=key, split=split, images=options.images_of(split))
    annotations = _read(layout, key=key, classes=classes, difficult=options.difficult)
    pictures = picture_files(annotations, layout.images, key)
    annotations = _with_sizes(annotations, pictures)
    notes: list[str] = []
    if checked:
        check_meaning(annotations, on_bad)
        annotations, notes = check_boxes(annotations, on_bad)
    if not len(annotations.ids):
        raise DataError(f"{key} does not contain any boxes", where=source, remedy="give a source with annotations")
    names = list(annotations.classes if classes is None else classes)
    numbers = _class_numbers(annotations, names)
    kept: dict[str, Any] = {"channels": options.channels, "levels": options.levels or WHITE}
    kept |= {"cache": cache, "notes": (*annotations.notes, *notes)}
    return BoxedImages(annotations, pictures, classes=names, numbers=numbers, **kept)


def _read(layout: AnnotationLayout, *, key: str, classes: Sequence[str] | None, difficult: bool) -> Annotations:
    if layout.kind == "coco":
        return read_coco(layout.annotations, key=key)
    if layout.kind == "voc":
        where, stems = layout.annotations, layout.stems
        return read_voc(where, layout.images, stems=stems, classes=classes, difficult=difficult)
    names = classes if layout.names is None else layout.names
    return read_yolo(layout.pictures, names, whole_folders=layout.whole_folders, keypoints=layout.keypoints)


def picture_files(annotations: Annotations, folder: Path, key: str) -> ImageFiles:
    """The images that a file names.

    Raises:
        DataError: one of them does not exist.
    """
    named = [annotations.file_names[number] for number in range(len(annotations.image_ids))]
    files = ImageFiles(folder, with_slashes(folder, named)[0])
    missing = missing_files([files.path(index) for index in range(len(files))])
    if missing:
        path = Path(files.path(missing[0]))
        there = os.listdir(path.parent) if path.parent.is_dir() else []
        more = f" ({len(missing)} of {len(files)} images are missing)" if len(missing) > 1 else ""
        hint = did_you_mean(path.name, there) if there else f"there are no files in {path.parent}. "
        what = f"{key}: there is no file {path}{more}"
        remedy = f"{hint}Give the folder that the names of the images are relative to as task.images"
        raise DataError(what, where=f"{annotations.path}: image {annotations.image_ids[missing[0]]}", remedy=remedy)
    return files


def _with_sizes(annotations: Annotations, pictures: ImageFiles) -> Annotations:
    """The annotations with the sizes of all images. Sizes that are not in the file are read from the images."""
    unknown = np.flatnonzero((annotations.sizes <= 0).any(axis=1))
    if not len(unknown):
        return annotations
    sizes = annotations.sizes.copy()
    for index in unknown.tolist():
        sizes[index] = size_of_file(pictures.path(index))
    return replace(annotations, sizes=sizes)


def _class_numbers(annotations: Annotations, classes: Sequence[str]) -> Array:
    """The index in `classes` of each class of the file, or -1.

    Raises:
        DataError: an annotation has a class that is not in `classes`.
    """
    places = {name: number for number, name in enumerate(classes)}
    numbers = np.array([places.get(name, -1) for name in annotations.classes], dtype=np.int64)
    lost = np.flatnonzero(numbers[annotations.labels] < 0)
    if len(lost):
        first = int(lost[0])
        name = annotations.classes[annotations.labels[first]]
        more = f" ({len(lost)} annotations have such classes)" if len(lost) > 1 else ""
        what = f"class {name!r} is not among the {len(classes)} classes of the training data{more}"
        remedy = unknown_class(name, classes, "Remove these annotations, or train with them")
        raise DataError(what, where=annotations.where(first), remedy=remedy)
    return numbers


def _other_size(found: Sequence[int], said: tuple[int, int], where: str, annotations: Annotations) -> DataError:
    turned = tuple(found) == said[::-1]
    why = "its EXIF data may rotate it: annotate the upright image, or remove the EXIF data. " if turned else ""
    what = f"the image has {found[0]} x {found[1]} pixels (height x width), but {annotations.path} says"
    remedy = f"{why}Boxes would be misplaced: correct height and width, or restore the annotated image"
    return DataError(f"{what} {said[0]} x {said[1]}", where=where, remedy=remedy)
