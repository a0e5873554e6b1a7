"""Images that are equal byte by byte: with different labels, or in training and evaluation."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView

_MOST_BYTES = 1 << 30


def equal_images(data: ImageView) -> Iterator[DataFinding]:
    """Groups of equal files. A run's log has its own lines on them, so its head is left out."""
    for group in _groups(data):
        (first, index), *others = group
        same = first.pictures.where(index)
        what = f"equal byte by byte to {same}"
        for split, number in others:
            file, image = split.pictures.where(number), partial(split.pixels, number)
            one, other = first.class_of(index), split.class_of(number)
            if one is not None and other is not None and one != other:
                names = f"{other!r} and {one!r}"
                remedy = "decide which label is right, and remove the other file"
                yield DataFinding("error", "label-conflict", file, f"{what}, with the classes {names}", remedy, image)
            if split.name != first.name:
                remedy = "remove it from one of the two: its result does not count as that of a new image"
                yield DataFinding("error", "train-in-eval", file, f"an evaluation image {what}", remedy, image)


def _groups(data: ImageView) -> Iterator[list[tuple[ImageSplit, int]]]:
    by_size: dict[int, list[tuple[ImageSplit, int, str]]] = defaultdict(list)
    for split in data.splits:
        if split.extent.is_short:
            return
        files = split.files
        if files is None:
            continue
        for index in range(len(split)):
            path = files(index)
            try:
                by_size[os.stat(path).st_size].append((split, index, os.path.realpath(path)))
            except OSError:
                continue
    left = _MOST_BYTES
    for size, found in sorted(by_size.items(), key=lambda item: item[0]):
        if not size or len({path for *_, path in found}) < 2 or (left := left - size * len(found)) < 0:
            continue
        by_content: dict[bytes, list[tuple[ImageSplit, int]]] = defaultdict(list)
        for split, index, _ in found:
            try:
                by_content[hashlib.blake2b(split.pictures.read(index), digest_size=16).digest()].append((split, index))
            except DataError:
                continue
        yield from (group for group in by_content.values() if len(group) > 1)
