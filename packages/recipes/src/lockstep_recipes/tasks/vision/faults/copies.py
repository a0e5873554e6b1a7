"""Images that are equal byte by byte: with different labels, or in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.vision.faults.view import ImageView

_MOST_BYTES = 1 << 30


def equal_images(data: ImageView) -> Iterator[DataFinding]:
    """Groups of equal images. The head of a log has its own lines on them."""
    if any(split.extent.is_short for split in data.splits):
        return
    parts = [part for split in data.splits if (part := duplicates.samples_of(split)) is not None]
    groups, twice, _ = duplicates.equal_images(parts, sum(map(len, data.splits)), _MOST_BYTES)
    for first_item, *others in [*twice, *groups.items.values()]:
        first = data.splits[first_item.part]
        same = first.pictures.where(first_item.row)
        what = f"equal byte by byte to {same}"
        for item in others:
            split = data.splits[item.part]
            file, image = split.pictures.where(item.row), partial(split.pixels, item.row)
            one, other = first.class_of(first_item.row), split.class_of(item.row)
            if one is not None and other is not None and one != other:
                names = f"{other!r} and {one!r}"
                remedy = "decide which label is right, and remove the other file"
                yield DataFinding("error", "label-conflict", file, f"{what}, with the classes {names}", remedy, image)
            if split is not first:
                remedy = "remove it from one of the two: its result does not count as that of a new image"
                yield DataFinding("error", "train-in-eval", file, f"an evaluation image {what}", remedy, image)
