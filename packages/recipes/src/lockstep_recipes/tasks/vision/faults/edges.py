"""How well the outlines of masks and boxes follow the edges of their image: finds those that are turned or mirrored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
_SIDE = 256
_LOOSE = 3
"""Pixels by which outlines may be away from their edge."""
_MOST = 300
"""Images of a split that are compared, without --all."""
_FEW = 5
_SHORT = 40
"""Pixels of an outline that are too few for a judgement."""
_FOLLOWS = 1.4
"""Outlines follow edges in this data if edges are usually stronger there by this factor than at moved outlines."""
_CHANCE = 1.15
"""The same factor, for a target that does not fit."""
_RARE = 0.1
_JUDGED, _NEARLY_ALL = 10, 0.9
"""Images, and the share of them that must agree, for a judgement of a whole split."""


def turned_by_exif(data: ImageView) -> Iterator[DataFinding]:
    """Images that EXIF data turns, with a mask or boxes of the same shape that it does not turn."""
    for split, one in data.facts:
        if one.orientation == 1 or not _has_target(split, one):
            continue
        same_shape = one.orientation < 5 or one.size[0] == one.size[1]
        if not same_shape:  # the shapes show which it is, and the recipe follows them
            continue
        pair = _edges_and_target(split, one.index)
        if pair is None:
            continue
        own, other = _at_outline(*pair), _at_outline(pair[0], turned(pair[1], one.orientation))
        image = partial(drawn, split, one.index)
        what = (
            f"EXIF data turns the image (orientation {one.orientation}), but not its {_kind(split)}, of the same shape"
        )
        remedy = "save the image upright without EXIF data, and check its annotations"
        if other > _BETTER * own and other > _CLEAR:
            what += ": its outlines fit the image as stored"
            yield DataFinding("error", "exif-turned", one.file, what, remedy, image)
        elif own < _BETTER * other or own < _CLEAR:
            yield DataFinding(
                "warning", "exif-orientation", one.file, f"{what}: which is right is unknown", remedy, image
            )


@dataclass(frozen=True)
class Fit:
    """How strong the edges of an image are at the outlines of its target, compared with the whole image."""

    facts: ImageFacts
    own: float
    mirrored: dict[str, float]
    """The same, for the target mirrored and upside down."""
    exchanged: float
    """The same, for the target with x and y exchanged. 0: the image is not square."""
    shifted: list[float]
    """The same, for the target moved to the sides."""
    is_loose: bool
    """True if edges are near the outlines, but not at them."""

    @property
    def is_chance(self) -> bool:
        """True if moved outlines would fit as well."""
        return self.own < _CHANCE * float(np.mean(self.shifted)) and not self.is_loose


def _fits(split: ImageSplit) -> list[Fit]:
    """The fits of the opened images. Empty if outlines do not follow edges in this data."""
    found = _measured(split)
    usual = [fit.own / max(float(np.mean(fit.shifted)), 1e-9) for fit in found]
    return found if len(found) >= _FEW and np.median(usual) > _FOLLOWS else []


def _measured(split: ImageSplit) -> list[Fit]:
    """The fits of the opened images, computed once."""
    if split.extent.is_short:
        return []
    kept: list[Fit] | None = split.__dict__.get("fits")
    if kept is None:
        facts = [one for one in split.facts if one.error is None and one.orientation == 1 and _has_target(split, one)]
        if split.extent.samples is not None:
            facts = facts[:: max(1, -(-len(facts) // _MOST))]
        found = [_fit(split, one) for one in facts]
        split.__dict__["fits"] = kept = [fit for fit in found if fit is not None]
    return kept


def _fit(split: ImageSplit, one: ImageFacts) -> Fit | None:
    pair = _edges_and_target(split, one.index)
    if pair is None:
        return None
    edges, target = pair
    if (target[1:] != target[:-1]).sum() + (target[:, 1:] != target[:, :-1]).sum() < _SHORT:
        return None
    own = _at_outline(edges, target)
    turns = {name: _at_outline(edges, turned(target, way)) for name, way in _MIRRORS.items()}
    exchanged = _at_outline(edges, target.T) if target.shape[0] == target.shape[1] else 0.0
    far = max(4, min(target.shape) // 8)
    moves = [(down, across) for down in (-far, 0, far) for across in (-far, 0, far) if down or across]
    moved = [np.roll(target, move, (0, 1)) for move in moves]
    shifted = [_at_outline(edges, one) for one in moved]
    is_loose = False
    if own < _CHANCE * float(np.mean(shifted)):
        blurred = _blurred(edges, _LOOSE)
        chance = float(np.mean([_at_outline(blurred, one) for one in moved]))
        is_loose = _at_outline(blurred, target) > _CHANCE * chance
    return Fit(one, own, turns, exchanged, shifted, is_loose) if own else None


def mirrored(data: ImageView) -> Iterator[DataFinding]:
    """Targets that fit a mirrored image much better, in data whose other targets fit their images."""
    for split in data.splits:
        for fit in _fits(split):
            if way := _mirror(fit):
                what, remedy = (
                    f"the {_kind(split)} fit the image only if they are {way}",
                    "turn the annotation, or the image",
                )
                image = partial(drawn, split, fit.facts.index)
                yield DataFinding("error", "mirrored-target", fit.facts.file, what, remedy, image)


def _mirror(fit: Fit) -> str | None:
    """How the target must be turned to fit its image. None: it fits as it is, or no turn helps."""
    way = max(fit.mirrored, key=fit.mirrored.__getitem__)
    best = fit.mirrored[way]
    return way if fit.is_chance and best > _BETTER * fit.own and best > max(fit.shifted) else None


def exchanged(data: ImageView) -> Iterator[DataFinding]:
    """Splits whose targets fit nearly all images better with x and y exchanged."""
    for split in data.splits:
        fits = [fit for fit in _measured(split) if fit.exchanged]
        better = [fit for fit in fits if fit.exchanged > fit.own]
        if len(fits) < _JUDGED or len(better) < _NEARLY_ALL * len(fits):
            continue
        own, other = (float(np.median(values)) for values in zip(*((f.own, f.exchanged) for f in fits), strict=True))
        if other > _CHANCE * own and other > _CHANCE * float(np.median([np.mean(fit.shifted) for fit in fits])):
            what = f"the {_kind(split)} fit {len(better)} of {len(fits)} images better if x and y are exchanged"
            remedy = "exchange x and y, width and height in all annotations"
            file, image = better[0].facts.file, partial(drawn, split, better[0].facts.index)
            yield DataFinding("error", "exchanged-axes", file, what, remedy, image, len(fits))


def misfits(data: ImageView) -> Iterator[DataFinding]:
    """Targets whose outlines are as far from edges as if they were moved: of a different image, or shifted."""
    for split in data.splits:
        fits = _fits(split)
        odd = [fit for fit in fits if fit.is_chance and fit.own < max(fit.shifted)]
        odd = [fit for fit in odd if _mirror(fit) is None]
        if len(odd) > _RARE * len(fits):
            continue
        for fit in odd:
            what = f"the outlines of the {_kind(split)} do not follow the image, as those of the others do"
            remedy = "do they belong to a different image, or are they shifted? Look at it"
            image = partial(drawn, split, fit.facts.index)
            yield DataFinding("warning", "misfit-target", fit.facts.file, what, remedy, image)


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


def _edges_and_target(split: ImageSplit, index: int) -> tuple[Array, Array] | None:
    """The strength of edges and the target, at a smaller size. None: they cannot be compared."""
    target = target_map(split, index)
    try:
        pixels = split.pixels(index)
    except DataError:
        return None
    if target is None or target.shape != pixels.shape[:2]:
        return None
    step = max(1, round(max(target.shape) / _SIDE))
    return _strength(pixels[::step, ::step].mean(axis=2)), target[::step, ::step]


def _strength(grey: Array) -> Array:
    """The size of the gradient, averaged over neighbours and divided by its mean."""
    down, across = np.abs(np.diff(grey, axis=0, append=grey[-1:])), np.abs(np.diff(grey, axis=1, append=grey[:, -1:]))
    found = _blurred(down + across, 1)
    return found / max(float(found.mean()), 1e-9)


def _blurred(values: Array, radius: int) -> Array:
    """The means over squares around each value."""
    width = 2 * radius + 1
    padded = np.pad(values, radius, mode="edge")
    lines = np.add.reduce([padded[place : place + values.shape[0]] for place in range(width)])
    result: Array = np.add.reduce([lines[:, place : place + values.shape[1]] for place in range(width)]) / width**2
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
