"""Check boxes: whether their numbers have the meaning of the format, and whether each box is inside its image."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from lockstep.core.errors import DataError, number_of
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.readers.coco_file import Annotations

OnBadBoxes = Literal["raise", "skip"]
_MOST_AREA = float(np.finfo(np.float32).max)
_EDGE = 1.0  # pixels that a box may extend beyond the edge of its image without a note
_FEWEST = 20  # from this many boxes, a fraction is meaningful for the whole file
_FEW = 3  # with fewer boxes than `_FEWEST`, at least this many must be suspect
_MANY = 0.1  # fraction of suspect boxes from which the file is suspect
_CLOSE = 0.01  # relative difference of areas that are equal up to rounding
_TINY = 4  # pixels: up to this longer side of an image, a box of a pixel is plausible


def check_meaning(annotations: Annotations, on_bad: OnBadBoxes) -> None:
    """Raise DataError if the numbers of boxes seem to have a different meaning than in the format.

    This is the case if boxes seem to be fractions of the image (see `_are_shares`), if many boxes extend beyond the
    edge of their image, if most areas are those of boxes of left, top, right and bottom, or if most areas are larger
    than the box. Many means a tenth, or half of fewer than 20 boxes. `skip` accepts everything except boxes that are
    certainly fractions of the image, or certainly left, top, right and bottom.
    """
    boxes, sizes = annotations.boxes, annotations.sizes[annotations.images]
    sound = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] > 0).all(axis=1)
    shares = _are_shares(boxes, sizes) & sound
    if shares.any() and (shares[sound].all() or (sound.sum() >= _FEWEST and shares.sum() > _MANY * sound.sum())):
        what = "are inside the first pixel of their image"
        remedy = (
            "are these fractions of width and height, from 0 to 1 (normalised)? Multiply them by the size in pixels"
        )
        raise _suspect(annotations, shares, int(sound.sum()), what, remedy)
    sound &= (annotations.area > 0) & (abs(boxes).max(axis=1, initial=0) < _MOST_AREA**0.5)
    number = int(sound.sum())
    if number < _FEW:
        return
    many = _MANY if number >= _FEWEST else 0.5
    boxes, sizes, area = boxes[sound], sizes[sound][:, ::-1], annotations.area[sound]
    start, third = boxes[:, :2], boxes[:, 2:]
    over = (start < -_EDGE).any(axis=1) | (start + third > sizes + _EDGE).any(axis=1)
    between, product = (third - start).prod(axis=1), third.prod(axis=1)
    as_corners = (third > start).all(axis=1)
    area_of_corners = as_corners & (abs(area - between) <= _CLOSE * between) & (area < (1 - _CLOSE) * product)
    coco = annotations.files is None
    are_corners = coco and (as_corners & (third <= sizes + _EDGE).all(axis=1)).mean() > 1 - _MANY
    too_large = area > (1 + _CLOSE) * product + 1
    if over.mean() > many and (are_corners or on_bad == "raise"):
        fault, what = over, "extend beyond the edge of their image by more than a pixel"
    elif coco and area_of_corners.mean() > 0.5:
        fault, what, are_corners = area_of_corners, "have the area of a box of left, top, right and bottom", True
    elif too_large.mean() > 0.5 and on_bad == "raise" and number >= _FEWEST:
        fault, what = too_large, "have an area that is larger than width x height"
    else:
        return
    whole = np.zeros(len(sound), dtype=bool)
    whole[np.flatnonzero(sound)[fault]] = True
    raise _suspect(annotations, whole, number, what, _meaning_remedy(annotations, corners=bool(are_corners)))


def _are_shares(boxes: Array, sizes: Array) -> Array:
    """True for boxes that seem to be fractions of their image, from 0 to 1: (n,) bool.

    This means that all four numbers are 1 or less, or the box ends in the first pixel (VOC files contain corners), and
    the image has more than a few pixels.

    Args:
        boxes: (n, 4): left, top, width and height.
        sizes: (n, 2): height and width of the image in pixels.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        within = (abs(boxes) <= 1).all(axis=1) | (
            (boxes[:, :2] + boxes[:, 2:] <= 1) & (boxes[:, :2] >= -1) & (boxes[:, 2:] > 0)
        ).all(axis=1)
    is_large: Array = sizes.max(axis=1, initial=0) > _TINY
    return within & is_large


def _suspect(annotations: Annotations, fault: Array, number: int, what: str, remedy: str) -> DataError:
    """An error about the boxes with `fault` (annotations,), among `number` boxes."""
    first = int(np.flatnonzero(fault)[0])
    what = f"{fault.sum()} of {number} boxes {what}, the first at {annotations.where(first)}"
    return DataError(f"{what}: {_box_text(annotations, first)}", where=str(annotations.path), remedy=remedy)


def _meaning_remedy(annotations: Annotations, *, corners: bool) -> str:
    if corners:
        return "are these left, top, right, bottom? COCO has left, top, width, height. Convert them"
    meant = "a COCO bbox is left, top, width, height in pixels of the image. "
    if annotations.files is not None:
        meant = ""
        if annotations.files[0].endswith(".txt"):
            meant = "YOLO's numbers are fractions of the image, from 0 to 1: are these pixels? "
    return f"{meant}Check the numbers. If they are correct, task.on_bad_boxes=skip accepts them"


def _box_text(annotations: Annotations, place: int, fault: str = "") -> str:
    box = ", ".join(f"{value:g}" for value in annotations.boxes[place])
    height, width = annotations.sizes[annotations.images[place]]
    fault = f" {fault}" if fault else ""
    return f"[{box}]{fault} (left, top, width, height; area {annotations.area[place]:g}; image {width} x {height})"


def check_boxes(annotations: Annotations, on_bad: OnBadBoxes) -> tuple[Annotations, list[str]]:
    """The annotations without bad boxes, and notes."""
    boxes, sizes = annotations.boxes, annotations.sizes[annotations.images]
    (left, top), (width, height) = boxes[:, :2].T, boxes[:, 2:].T
    with np.errstate(invalid="ignore", over="ignore"):  # boxes may have NaN, infinity and huge numbers
        right, bottom = left + width, top + height
        faults = {
            "has a number that is not finite": ~np.isfinite(boxes).all(axis=1) | ~(abs(annotations.area) <= _MOST_AREA),
            "has no area": (width <= 0) | (height <= 0) | (annotations.area < 0),
            "is outside its image": (right <= 0) | (bottom <= 0) | (left >= sizes[:, 1]) | (top >= sizes[:, 0]),
        }
        over = (np.minimum(left, top) < -_EDGE) | (right > sizes[:, 1] + _EDGE) | (bottom > sizes[:, 0] + _EDGE)
    bad = np.logical_or.reduce(list(faults.values()))
    over &= ~bad
    notes = []
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        fault = next(what for what, found in faults.items() if found[first])
        if on_bad == "raise":
            raise _bad_box(annotations, first, fault, others=int(bad.sum()) - 1)
        notes.append(
            f"{number_of(bad.sum(), 'bad box', 'is', 'are')} left out. The first, {annotations.where(first)}, {fault}"
        )
    if over.any():
        notes.append(
            f"{number_of(over.sum(), 'box', 'extends', 'extend')} beyond the edge of the image by more than a "
            "pixel, the first at "
            f"{annotations.where(int(np.flatnonzero(over)[0]))}. Training clips them at the edge"
        )
    return (_only(annotations, ~bad) if bad.any() else annotations), notes


def _bad_box(annotations: Annotations, place: int, fault: str, *, others: int) -> DataError:
    more = f" (and {others} more bad boxes)" if others else ""
    what = f"the box {_box_text(annotations, place, fault)}{more}"
    remedy = "repair or remove it, or set task.on_bad_boxes=skip to leave out such boxes"
    return DataError(what, where=annotations.where(place), remedy=remedy)


def _only(annotations: Annotations, kept: Array) -> Annotations:
    """The annotations that are kept, of all images."""
    images = annotations.images[kept]
    starts = np.searchsorted(images, np.arange(len(annotations.image_ids) + 1))
    rows = {name: getattr(annotations, name)[kept] for name in ("ids", "labels", "boxes", "area", "crowd")}
    return replace(annotations, images=images, starts=starts, **rows)
