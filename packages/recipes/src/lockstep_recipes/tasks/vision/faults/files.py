"""Files that cannot be opened, or hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.vision.faults.view import ImageView


def refused(data: ImageView) -> Iterator[DataFinding]:
    """What the task itself refuses."""
    yield from data.refused


def unreadable(data: ImageView) -> Iterator[DataFinding]:
    """Files that are missing, empty, truncated, or not images."""
    for split in data.splits:
        for one in split.facts:
            if one.error is not None:
                remedy = "repair or remove the file; or set data.on_error=skip to train without it"
                yield DataFinding("error", "unreadable", one.file, one.error, remedy)


def blank(data: ImageView) -> Iterator[DataFinding]:
    """Images of one value, and images of one pixel."""
    for split, one in data.facts:
        image = partial(split.pixels, one.index)
        height, width = one.size
        if min(height, width) <= 1:
            what, remedy = f"the image has {width}x{height} pixels", "replace it with the whole image, or remove it"
            yield DataFinding("error", "one-pixel", one.file, what, remedy, image)
        elif one.low == one.high:
            what, remedy = f"all pixels have the value {one.low:g}", "export the image again, or remove it"
            yield DataFinding("warning", "blank-image", one.file, what, remedy, image)
