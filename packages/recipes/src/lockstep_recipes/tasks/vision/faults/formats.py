"""Files whose format hides something: transparency, frames, more bits than are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.vision.faults.view import ImageFacts, ImageSplit, ImageView

_RARE = 0.2
"""A format that fewer files have stands out."""
_DARK = 31
"""16 bits in RGB are read as their upper 8: 12-bit values end here."""


def odd_format(data: ImageView) -> Iterator[DataFinding]:
    """Transparent, CMYK and grey images among others."""
    remedy = "save all images in one format, as the model will see them later"
    kinds: dict[str, Callable[[ImageFacts], bool]] = {
        "transparent": lambda one: one.alpha is not None and one.alpha[0] < 255,
        "cmyk": lambda one: one.mode == "CMYK",
    }
    known = {
        "transparent": "the image is partly transparent: its hidden colours are what the model sees",
        "cmyk": "the image has CMYK colours, which are converted without a colour profile",
    }
    everything = list(data.facts)
    for code, is_such in kinds.items():
        found = [(split, one) for split, one in everything if is_such(one)]
        if found and len(found) <= max(1, _RARE * len(everything)):
            for split, one in found:
                image = partial(split.pixels, one.index)
                yield DataFinding("warning", code, one.file, known[code], remedy, image)


def several_frames(data: ImageView) -> Iterator[DataFinding]:
    """Animations and stacks: the first frame is read, the others are not."""
    for split, one in data.facts:
        if one.frames > 1:
            what, remedy = f"the file has {one.frames} images, and only the first is read", "save each as its own file"
            yield DataFinding("warning", "several-frames", one.file, what, remedy, partial(split.pixels, one.index))


def dark_rgb(data: ImageView) -> Iterator[DataFinding]:
    """RGB files of 16 bits that hold 12 bits or fewer: PIL reads the upper 8 bits, which are almost all 0."""
    for split, one in data.facts:
        if one.bits == 16 and one.mode.startswith("RGB") and 0 < one.high <= _DARK:
            what = f"RGB of 16 bits whose values use few bits: {int(one.high) + 1} levels are left of them"
            remedy = "scale the values to the whole range, and save them with 8 bits"
            yield DataFinding("error", "few-levels", one.file, what, remedy, partial(split.pixels, one.index))


def other_range(data: ImageView) -> Iterator[DataFinding]:
    """Grey images of 16 bits above the range of the training images, or with few levels of it."""
    for split, one in data.facts:
        if one.levels is None or not one.mode.startswith("I"):
            continue
        if one.high > split.levels:
            what = f"the grey value {one.high:g} is above {split.levels}, which is white in the training images"
            remedy = "set task.levels, or save the image in the range of the others"
            yield DataFinding("error", "above-white", one.file, what, remedy)
        elif (left := _levels_left(split, one)) <= _DARK < len(one.levels):
            what = f"its grey values end at {one.high:g}: {left} of {len(one.levels)} levels are left after 8 bits"
            remedy = f"white is {split.levels} for all images (task.levels): save this image in the range of the others"
            yield DataFinding("warning", "few-levels", one.file, what, remedy, partial(split.pixels, one.index))


def _levels_left(split: ImageSplit, one: ImageFacts) -> int:
    assert one.levels is not None
    return len(set((one.levels.astype(int) * 255 // split.levels).tolist()))


def floats(data: ImageView) -> Iterator[DataFinding]:
    """Floating-point images, which the recipes refuse."""
    for _, one in data.facts:
        if one.mode == "F":
            what, remedy = "the pixels are floating-point numbers", "save the image with 8 or 16 bits a channel"
            yield DataFinding("error", "floating-point", one.file, what, remedy)
