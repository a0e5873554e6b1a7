"""How well the outlines of masks and boxes follow the edges of their image: finds those that are turned or mirrored."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.faults.view import ImageFacts, ImageSplit, ImageView
from lockstep_recipes.tasks.vision.images.decode import turned

_BETTER = 1.25
"""The outlines of a wrong target follow edges worse than those of the right one by this factor, at least."""
_CLEAR = 1.3
"""The strength of edges at an outline compared with that of the whole image: less is not evidence."""
_MIRRORS = {"mirrored": 2, "upside down": 4, "turned by 180 degrees": 3}
_SIDE = 512


def turned_by_exif(data: ImageView) -> Iterator[DataFinding]:
    """Images that EXIF data turns, with a mask or boxes of the same shape that it does not turn."""
    for split, one in data.facts:
        if one.orientation == 1 or not _has_target(split, one):
            continue
        same_shape = one.orientation < 5 or one.size[0] == one.size[1]
        if not same_shape:  # the shapes show which it is, and the recipe follows them
            continue
        found = _compared(split, one.index, {"as stored": one.orientation})
        if found is None:
            continue
        own, others = found
        image = partial(drawn, split, one.index)
        what = (
            f"EXIF data turns the image (orientation {one.orientation}), but not its {_kind(split)}, of the same shape"
        )
        remedy = "save the image upright without EXIF data, and check its annotations"
        if others["as stored"] > _BETTER * own and others["as stored"] > _CLEAR:
            what += ": its outlines fit the image as stored"
            yield DataFinding("error", "exif-turned", one.file, what, remedy, image)
        elif own < _BETTER * others["as stored"] or own < _CLEAR:
            yield DataFinding(
                "warning", "exif-orientation", one.file, f"{what}: which is right is unknown", remedy, image
            )


def mirrored(data: ImageView) -> Iterator[DataFinding]:
    """Targets that fit a mirrored image much better, in data whose other targets fit their images."""
    for split in (one for one in data.splits if not one.extent.is_short):
        checked = []
        for one in split.facts:
            if one.error is None and one.orientation == 1 and _has_target(split, one):
                found = _compared(split, one.index, _MIRRORS)
                checked += [] if found is None else [(one, *found)]
        if len(checked) < 5 or np.median([own for _, own, _ in checked]) < _CLEAR:
            continue
        usual = float(np.median([own for _, own, _ in checked]))
        for one, own, others in checked:
            way = max(others, key=others.__getitem__)
            if others[way] > max(_CLEAR, 0.8 * usual) and others[way] > 1.5 * own and own < 0.75 * usual:
                what = f"the {_kind(split)} fit the image only if they are {way}"
                remedy = "turn the annotation, or the image"
                yield DataFinding("error", "mirrored-target", one.file, what, remedy, partial(drawn, split, one.index))


def _kind(split: ImageSplit) -> str:
    return "mask" if split.masks is not None else "boxes"


def _has_target(split: ImageSplit, one: ImageFacts) -> bool:
    if split.annotations is not None:
        part = split.annotations.of_image(one.index)
        return bool(part.stop > part.start)
    return split.masks is not None


def target_map(split: ImageSplit, index: int) -> Array | None:
    """A number for each pixel that changes at outlines: the classes of a mask, or the boxes of an image."""
    if split.masks is not None:
        try:
            found: Array = split.masks.read(index)
        except DataError:
            return None
        return found
    height, width = (int(side) for side in split.annotations.sizes[index])
    drawn_boxes = np.zeros((height, width), np.int16)
    for number, box in enumerate(split.annotations.boxes[split.annotations.of_image(index)], 1):
        left, top, wide, high = (round(float(value)) for value in np.nan_to_num(box))
        drawn_boxes[max(top, 0) : max(top + high, 0), max(left, 0) : max(left + wide, 0)] = number
    return drawn_boxes


def _compared(split: ImageSplit, index: int, ways: dict[str, int]) -> tuple[float, dict[str, float]] | None:
    """The strength of edges at the outlines, for the target as it is and turned. None: nothing can be compared."""
    target = target_map(split, index)
    try:
        pixels = split.pixels(index)
    except DataError:
        return None
    if target is None or target.shape != pixels.shape[:2]:
        return None
    step = max(1, -(-max(target.shape) // _SIDE))
    edges = _strength(pixels[::step, ::step].mean(axis=2))
    small = target[::step, ::step]
    at = [_at_outline(edges, small)]
    for orientation in ways.values():
        changed = turned(small, orientation)
        at.append(_at_outline(edges, changed) if changed.shape == small.shape else 0.0)
    return (at[0], dict(zip(ways, at[1:], strict=True))) if at[0] or any(at[1:]) else None


def _strength(grey: Array) -> Array:
    """The size of the gradient, smoothed over the neighbours, divided by its mean."""
    down, across = np.abs(np.diff(grey, axis=0, append=grey[-1:])), np.abs(np.diff(grey, axis=1, append=grey[:, -1:]))
    found = down + across
    padded = np.pad(found, 1, mode="edge")
    smooth = sum(padded[y : y + grey.shape[0], x : x + grey.shape[1]] for y in range(3) for x in range(3))
    result: Array = smooth / max(float(smooth.mean()), 1e-9)
    return result


def _at_outline(edges: Array, target: Array) -> float:
    outline = np.zeros(target.shape, bool)
    outline[:-1] |= target[:-1] != target[1:]
    outline[:, :-1] |= target[:, :-1] != target[:, 1:]
    return float(edges[outline].mean()) if outline.any() else 0.0


def drawn(split: ImageSplit, index: int) -> Any:
    """An image with the outlines of its target in red, for the page."""
    pixels = split.pixels(index).copy()
    target = target_map(split, index)
    if target is None or target.shape != pixels.shape[:2]:
        return pixels
    wide = max(1, max(target.shape) // 200)
    outline = np.zeros(target.shape, bool)
    outline[:-wide] |= target[:-wide] != target[wide:]
    outline[:, :-wide] |= target[:, :-wide] != target[:, wide:]
    pixels[outline] = (255, 0, 0)
    return pixels
