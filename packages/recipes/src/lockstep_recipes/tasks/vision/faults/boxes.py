"""Boxes: units, sizes, duplicates, classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.faults.edges import drawn
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView

_RARE = 0.02
_EDGE = 2.0
_MANY, _SEVERAL = 50, 10
"""Boxes, and images with boxes, for a judgement of a whole split."""
_CORNER = 0.6
_SAME = 0.9
"""Intersection over union of boxes around one object."""


def _boxed(data: ImageView) -> Iterator[ImageSplit]:
    yield from (split for split in data.splits if split.annotations is not None and split.masks is None)


def bad_boxes(data: ImageView) -> Iterator[DataFinding]:
    """Boxes that are not finite, have no area, or are outside their image; and boxes in a different unit."""
    for split in _boxed(data):
        found = split.annotations
        sizes = found.sizes[found.images]
        left, top, width, height = found.boxes.T
        with np.errstate(invalid="ignore"):
            faults = {
                "has a number that is not finite": ~np.isfinite(found.boxes).all(axis=1),
                "has no area": (width <= 0) | (height <= 0),
                "is outside its image": (left + width <= 0)
                | (top + height <= 0)
                | (left >= sizes[:, 1])
                | (top >= sizes[:, 0]),
                "is in the first pixel: fractions of the image instead of pixels?": (found.boxes <= 1).all(axis=1)
                & (found.boxes >= 0).all(axis=1)
                & (sizes.max(axis=1) > 16),
                "extends beyond the edge of its image": (np.minimum(left, top) < -_EDGE)
                | (left + width > sizes[:, 1] + _EDGE)
                | (top + height > sizes[:, 0] + _EDGE),
            }
        seen = np.zeros(len(found.ids), bool)
        for number, (what, bad) in enumerate(faults.items()):
            new = bad & ~seen
            seen |= bad
            few = new.sum() <= _RARE * len(new)
            if number == 4 and not few:
                continue  # a tool that does not clip
            level, code = ("warning", "over-the-edge") if number == 4 else ("error", "bad-box")
            for place in np.flatnonzero(new).tolist():
                image = partial(drawn, split, int(found.images[place]))
                text = f"the box {_text(split, place)} {what}"
                yield DataFinding(level, code, found.where(place), text, "correct or remove the box", image)  # type: ignore[arg-type]


def odd_sizes(data: ImageView) -> Iterator[DataFinding]:
    """Boxes of a pixel or two, and boxes of the whole image, where they are rare."""
    for split in _boxed(data):
        found = split.annotations
        sizes = found.sizes[found.images][:, ::-1]
        area = found.boxes[:, 2:].prod(axis=1)
        single = ~found.crowd & (area > 0)
        tiny = single & (found.boxes[:, 2:].min(axis=1) < 2) & ~(found.boxes <= 1).all(axis=1)
        whole = single & (found.boxes[:, 2:] >= 0.995 * sizes).all(axis=1)
        for bad, code, what in ((tiny, "tiny-box", "is a pixel wide"), (whole, "whole-image", "is the whole image")):
            if bad.sum() > _RARE * len(bad):
                continue
            for place in np.flatnonzero(bad).tolist():
                text, image = f"the box {_text(split, place)} {what}", partial(drawn, split, int(found.images[place]))
                yield DataFinding("warning", code, found.where(place), text, "was it drawn by mistake?", image)


def doubled(data: ImageView) -> Iterator[DataFinding]:
    """Two boxes around one object."""
    for split in _boxed(data):
        found = split.annotations
        for index in split.opened if split.extent.is_short else range(len(split)):
            part = found.of_image(index)
            places = np.arange(part.start, part.stop)[~found.crowd[part]]
            for one, other in zip(*np.nonzero(np.triu(_overlap(found.boxes[places]) > _SAME, 1)), strict=True):
                first, second = int(places[one]), int(places[other])
                names = [found.classes[int(found.labels[place])] for place in (first, second)]
                what = f"the boxes {_text(split, first)} and {_text(split, second)} are around one object"
                code = "double-box" if names[0] == names[1] else "two-classes"
                what += f" of class {names[0]!r}" + (f" and {names[1]!r}" if names[0] != names[1] else "")
                remedy = "remove one of them: a detector would be punished for finding the object once"
                yield DataFinding("warning", code, found.where(second), what, remedy, partial(drawn, split, index))


def _overlap(boxes: Array) -> Array:
    """Intersection over union of all pairs: (n, n)."""
    begin, end = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    sides = (np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin)).clip(0)
    both, area = sides.prod(axis=2), boxes[:, 2:].prod(axis=1)
    result: Array = both / np.maximum(area[:, None] + area - both, 1e-9)
    return result


def other_size(data: ImageView) -> Iterator[DataFinding]:
    """Images of a different size than their annotations were made for."""
    for split in _boxed(data):
        for one in split.facts:
            said = tuple(int(side) for side in split.annotations.sizes[one.index])
            upright = one.size[::-1] if one.orientation >= 5 else one.size
            if one.error is None and said != upright:
                turned = " EXIF data turns it" if said == upright[::-1] else ""
                what = f"the image has {upright[0]}x{upright[1]} pixels (height x width), but its annotations say "
                remedy = "restore the annotated image, or scale its boxes and correct height and width"
                text = f"{what}{said[0]}x{said[1]}.{turned}"
                yield DataFinding("error", "other-size", one.file, text, remedy, partial(split.pixels, one.index))


def in_one_corner(data: ImageView) -> Iterator[DataFinding]:
    """Boxes that are all at the upper left: the coordinates may be of smaller images."""
    for split in _boxed(data):
        found = split.annotations
        images = len(np.unique(found.images))
        if len(found.ids) < _MANY or images < _SEVERAL:
            continue
        ends = (found.boxes[:, :2] + found.boxes[:, 2:]) / found.sizes[found.images][:, ::-1]
        across, down = ends.max(axis=0).tolist()
        if 1 / 64 < max(across, down) < _CORNER:
            what = f"all {len(found.ids):,} boxes of {images:,} images end at {across:.0%} of the width and {down:.0%} "
            what += "of the height"
            remedy = "were the boxes drawn on smaller images? Scale them to the size of the images"
            image = partial(drawn, split, int(found.images[0]))
            yield DataFinding("warning", "in-one-corner", found.where(0), what, remedy, image, len(found.ids))


def rare_box_class(data: ImageView) -> Iterator[DataFinding]:
    """Classes with a single training box, and classes that only the evaluation has."""
    splits = list(_boxed(data))
    if not splits or splits[0].name != "training":
        return
    first = splits[0].annotations
    counts = np.bincount(first.labels, minlength=len(first.classes))
    for number in np.flatnonzero(counts == 1).tolist():
        if len(first.ids) > 2 * len(first.classes):
            file = first.where(int(np.flatnonzero(first.labels == number)[0]))
            what, remedy = (
                f"the only box of class {first.classes[number]!r}",
                "add more, or join it with a similar class",
            )
            yield DataFinding("warning", "one-sample", file, what, f"{remedy}. Is its name misspelt?")
    trained = {first.classes[number] for number in np.flatnonzero(counts)}
    for split in splits[1:]:
        for number, name in enumerate(split.annotations.classes):
            places = np.flatnonzero(split.annotations.labels == number)
            if len(places) and name not in trained:
                what = f"class {name!r} has evaluation boxes, but no training box"
                file, remedy = split.annotations.where(int(places[0])), "train with boxes of this class"
                yield DataFinding("error", "never-trained", file, what, remedy)


def _text(split: ImageSplit, place: int) -> str:
    return "[" + ", ".join(f"{value:g}" for value in split.annotations.boxes[place]) + "]"
