"""Masks that are all background: the colours of their images show whether objects are missing in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.faults.edges import drawn
from lockstep_recipes.tasks.vision.faults.masks import MaskFacts, checked
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView

_RARE = 0.1
_SIDE = 64
"""Rows and columns of pixels of an image that are compared."""
_ENOUGH = 8
"""Masks with objects that are needed to learn colours."""
_TELLS = 1.5
"""Colours tell objects from background if they are more frequent there by this factor."""
_LIKE_OTHERS = 0.6
"""The share of objects that an empty mask lacks, compared with the share in masks with objects."""


def empty(data: ImageView) -> Iterator[DataFinding]:
    """Masks without a labelled pixel, masks of one class where that is rare, and empty masks of images with objects."""
    for split in (one for one in data.splits if one.masks is not None):
        found = checked(split)[0]
        single = [one for one in found if (one.counts > 0).sum() == 1]
        for one in found:
            if not one.counts.any():
                what, remedy = "all pixels are ignored: nothing is labelled", "label it, or remove the image"
                yield DataFinding("error", "nothing-labelled", one.file, what, remedy, partial(split.pixels, one.index))
        blank = [one for one in single if one.counts[0]]
        judged = None if split.extent.is_short or not blank else _missing(split, found, blank)
        for one, share, usual in judged or []:
            what = f"all pixels are {split.classes[0]!r}, but {share:.0%} of them have the colours of objects; "
            what += f"in masks with objects it is {usual:.0%}"
            remedy = "label the objects, or remove the image"
            yield DataFinding("warning", "unlabelled-objects", one.file, what, remedy, partial(drawn, split, one.index))
        others = single if judged is None else [one for one in single if not one.counts[0]]
        if len(others) <= max(1, _RARE * len(found)) and len(found) > 2 * len(others):
            for one in others:
                name = split.classes[int(one.counts.argmax())]
                what, remedy = f"all pixels are {name!r}", "is the mask complete? Label it, or remove the image"
                yield DataFinding("warning", "one-class-mask", one.file, what, remedy, partial(drawn, split, one.index))


def _missing(
    split: ImageSplit, found: list[MaskFacts], blank: list[MaskFacts]
) -> list[tuple[MaskFacts, float, float]] | None:
    """Blank masks of images with the colours of objects, with the share of such pixels there, and the usual one.

    None: colours do not tell objects from background here.
    """
    full = [one for one in found if one.counts[0] and one.counts[1:].any()]
    read = [(one, _colours_and_mask(split, one.index)) for one in full]
    known = [(colours, mask > 0) for _, pair in read if pair is not None for colours, mask in [pair]]
    if len(known) < _ENOUGH:
        return None
    counts = np.stack(
        [[np.bincount(colours[place], minlength=512) for place in (~mask, mask)] for colours, mask in known]
    )
    total = counts.sum(axis=0)
    inside, outside, usual = [], [], []
    for (colours, mask), own in zip(known, counts, strict=True):
        like_objects = _is_object(total - own)[colours]
        inside += [float(like_objects[mask].mean())] if mask.any() else []
        outside += [float(like_objects[~mask].mean())] if not mask.all() else []
        usual.append(float(like_objects.mean()))
    if not inside or not outside or np.median(inside) < _TELLS * np.median(outside):
        return None
    typical, missing = float(np.median(usual)), []
    for one in blank:
        pair = _colours_and_mask(split, one.index)
        share = 0.0 if pair is None else float(_is_object(total)[pair[0]].mean())
        if share > _LIKE_OTHERS * typical:
            missing.append((one, share, typical))
    return missing


def _is_object(counts: Array) -> Array:
    """True for each colour that is more frequent in objects than in the background, by a clear factor: (512,)."""
    background, objects = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    result: Array = objects > _TELLS * background
    return result


def _colours_and_mask(split: ImageSplit, index: int) -> tuple[Array, Array] | None:
    """The colours of some pixels as numbers below 512, and their classes. None: they cannot be compared."""
    try:
        pixels, mask = split.pixels(index), split.masks.read(index)
    except DataError:
        return None
    if pixels.shape[:2] != mask.shape:
        return None
    rows, columns = ((2 * np.arange(_SIDE) + 1) * length // (2 * _SIDE) for length in mask.shape)
    small, classes = pixels[rows[:, None], columns] // 32, mask[rows[:, None], columns]
    colours = (small.astype(np.int64) * (64, 8, 1)).sum(axis=2)
    return colours[classes >= 0], classes[classes >= 0]
