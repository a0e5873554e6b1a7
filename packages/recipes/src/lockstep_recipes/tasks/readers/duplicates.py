"""Find duplicate samples, and evaluation samples that are also training samples, and report them in the head of the
log.

Every search has a limit. If it is reached, a line reports how much was compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lockstep.configs.task_options import MISSING
from lockstep.core.errors import DataError, number_of
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.readers.coco_file import Annotations
from lockstep_recipes.tasks.vision.readers.image_files import EncodedImages, ImageFiles
from lockstep_recipes.tasks.vision.readers.image_records import ImageRecords, ImageSubset
from lockstep_recipes.tasks.vision.readers.image_shards import ShardImages
from lockstep_recipes.tasks.vision.readers.image_table import DataSetImages

MOST_IMAGES = 20_000
"""Maximum number of images whose sizes are compared, of training and evaluation together."""
MOST_BYTES = 256 << 20
"""Maximum number of bytes to read from images of equal size."""
MOST_TEXTS = 100_000
"""Maximum number of texts to compare, of training and evaluation together."""
_MOST_TEXT_BYTES = 64 << 20
_SHOWN = 3


class SplitImages(NamedTuple):
    """The images of a split."""

    pictures: EncodedImages
    labels: Array | None = None
    """The label of each image of the split. None: labels are not compared."""
    rows: Array | None = None
    """The images that belong to the split. None: all."""


class Item(NamedTuple):
    """A sample that is compared."""

    part: int
    """0: training, 1: evaluation."""
    row: int
    """Of the split."""
    name: str
    label: bytes | None


class EqualItems:
    """Equal items, by a key that is the same for equal items."""

    def __init__(self) -> None:
        self.items: dict[Any, list[Item]] = defaultdict(list)

    def lines(self, *, kind: str, how: str, looked: str) -> list[str]:
        """A line about duplicates in the training data, and a line about training samples in the evaluation data."""
        copies, leaks, others = [], [], 0
        evaluated = 0
        for group in self.items.values():
            training = [item for item in group if item.part == 0]
            evaluation = [item for item in group if item.part == 1]
            if len(training) > 1:
                copies += [(item.name, training[0].name) for item in training[1:]]
                others += sum(item.label != training[0].label for item in training[1:])
            if training and evaluation:
                evaluated += len(evaluation)
                leaks += [(item.name, training[0].name) for item in evaluation]
        lines, one = [], kind.removesuffix("s")
        if copies:
            labels = f", {others:,} of them with a different label" if others else ""
            what = f"{number_of(len(copies), one, 'is a copy', 'are copies')} of others{labels} ({how}{looked})"
            lines.append(f"training: {what}: {_pairs(copies)}")
        if leaks:
            what = f"{number_of(evaluated, one, 'is', 'are')} also in the training data ({how}{looked})"
            lines.append(f"WARNING: evaluation: {what}, so its results may be too good: {_pairs(leaks)}")
        return lines


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(f"{one} = {other}" for one, other in pairs[:_SHOWN])
    return shown + (", ..." if len(pairs) > _SHOWN else "")


# ---- images


def samples_of(data: Any) -> SplitImages | None:
    """The images of a data set of images. None: it has none."""
    records = getattr(data, "records", data)
    pictures = getattr(records, "pictures", None)
    labels = records.labels if isinstance(records, ImageRecords) else None
    if isinstance(pictures, ImageSubset):
        return SplitImages(pictures.pictures, labels, pictures.rows)
    return None if pictures is None else SplitImages(pictures, labels)


def of_images(training: SplitImages | None, evaluation: SplitImages | None) -> list[str]:
    """Lines about images that are equal byte by byte, in the training data and between training and evaluation, and
    about files that the training data names twice.

    Files are compared by their sizes, then by their bytes. At most `MOST_IMAGES` images are looked at, spread over
    the data, and at most `MOST_BYTES` are read. An image that cannot be read is not compared.
    """
    if training is None:
        return []
    parts = [training] if evaluation is None else [training, evaluation]
    groups, twice, looked = equal_images(parts, MOST_IMAGES, MOST_BYTES)
    lines = []
    if twice:
        what = f"{number_of(len(twice), 'file', 'occurs', 'occur')} more than once, under several ids or names"
        lines.append(f"training: {what}{looked}: {_pairs([(again.name, first.name) for first, again in twice])}")
    return lines + groups.lines(kind="images", how="equal byte by byte", looked=looked)


def equal_images(
    parts: Sequence[SplitImages], most_images: int, most_bytes: int
) -> tuple[EqualItems, list[tuple[Item, Item]], str]:
    """EqualItems of equal images, files that the first split names twice, and a remark if not all are compared."""
    counts = [len(part.pictures) if part.rows is None else len(part.rows) for part in parts]
    by_size: dict[int, list[tuple[Item, Any, Callable[[], bytes]]]] = defaultdict(list)
    twice: list[tuple[Item, Item]] = []
    seen = 0
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        known: dict[Any, Item] = {}
        for place in _spread(count, _share(counts, most_images)[number]):
            index = place if part.rows is None else int(part.rows[place])
            found = _size_and_file(part.pictures, index)
            if found is None:
                continue
            seen += 1
            size, file = found
            label = None if part.labels is None else np.asarray(part.labels[place]).tobytes()
            item = Item(number, place, part.pictures.name(index), label)
            if number == 0 and file in known:
                twice.append((known[file], item))
                continue
            known[file] = item
            if size:  # an empty file holds no image
                by_size[size].append((item, file, partial(part.pictures.read, index)))
    groups, left = _equal(by_size, most_bytes)
    return groups, twice, "" if seen == sum(counts) and not left else f"; compared {seen - left:,} of {sum(counts):,}"


def _size_and_file(pictures: EncodedImages, index: int) -> tuple[int, Any] | None:
    """The size of an image in bytes, and an identity of its file. None: unknown without reading."""
    if isinstance(pictures, ImageFiles):
        try:
            about = os.stat(pictures.path(index))
        except OSError:
            return None
        return about.st_size, (about.st_dev, about.st_ino)
    if isinstance(pictures, ShardImages):
        return int(pictures.sizes[index]), (id(pictures), index)
    if isinstance(pictures, DataSetImages):
        size = pictures.size(index)
        return None if size is None else (size, (id(pictures), index))
    return None


def _equal(by_size: dict[int, list[tuple[Item, Any, Callable[[], bytes]]]], budget: int) -> tuple[EqualItems, int]:
    """Items with equal bytes, and how many were not read because of the limit. Small files come first."""
    groups, left = EqualItems(), 0
    for size in sorted(by_size):
        group = by_size[size]
        if len({file for _, file, _ in group}) == 1:  # a single image, or one file in training and evaluation
            groups.items[size, group[0][1]] += [item for item, _, _ in group]
            continue
        if size * len(group) > budget:
            left += len(group)
            continue
        budget -= size * len(group)
        for item, _, read in group:
            try:
                key = hashlib.blake2b(read(), digest_size=16).digest()
            except DataError:
                continue
            groups.items[size, key].append(item)
    return groups, left


# ---- texts


class TextRows(NamedTuple):
    """The texts of a split."""

    total: int
    content: Callable[[int], bytes]
    """The text of a sample, with all its parts."""
    label: Callable[[int], bytes]
    where: Callable[[int], str]


def of_texts(training: TextRows, evaluation: TextRows | None) -> list[str]:
    """Lines about texts that are equal: in the training data, and between training and evaluation. At most `MOST_TEXTS`
    texts are compared, spread over the data, and at most 64 MiB of them."""
    parts = [training] if evaluation is None else [training, evaluation]
    counts = [part.total for part in parts]
    groups, seen = EqualItems(), 0
    for number, part in enumerate(parts):
        budget = _MOST_TEXT_BYTES // len(parts)
        for index in _spread(part.total, _share(counts, MOST_TEXTS)[number]):
            content = part.content(index)
            budget -= len(content)
            if budget < 0:
                break
            seen += 1
            key = hashlib.blake2b(content, digest_size=16).digest()
            groups.items[key].append(Item(number, index, part.where(index), part.label(index)))
    looked = "" if seen == sum(counts) else f"; compared {seen:,} of {sum(counts):,}"
    return groups.lines(kind="texts", how="identical text", looked=looked)


# ---- boxes and names


def of_boxes(annotations: Annotations) -> list[str]:
    """A line about duplicate boxes: with the same image, class and four numbers."""
    rows = np.concatenate([annotations.images[:, None], annotations.labels[:, None], annotations.boxes], axis=1)
    order = np.lexsort(rows.T)
    again = order[1:][(rows[order[1:]] == rows[order[:-1]]).all(axis=1)]
    if not len(again):
        return []
    first = annotations.where(int(again.min()))
    return [
        f"{number_of(len(again), 'box', 'is a duplicate', 'are duplicates')} (same image, class and "
        f"coordinates), the first: {first}"
    ]


def of_names(names: Sequence[str]) -> list[str]:
    """Lines about class names that differ only in case, spaces, Unicode form or the format of a number, that are
    several names in one, or that mean a missing label."""
    names = [str(name) for name in names]
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_plain(name)].append(name)
    found = [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]
    lines = []
    if found:
        shown = "; ".join(found[:_SHOWN]) + ("; ..." if len(found) > _SHOWN else "")
        lines = [f"WARNING: classes whose names differ only in case, spaces or form: {shown}. Are they the same class?"]
    known = set(names)
    several = [name for name in names if any(_joins(name, mark, known) for mark in ",;|")]
    if several:
        shown = ", ".join(map(repr, several[:_SHOWN])) + (", ..." if len(several) > _SHOWN else "")
        lines.append(f"WARNING: {len(several):,} classes are several other classes in one name: {shown}")
    absent = [name for name in names if name in MISSING]
    if absent:
        what = f"classes are called {' and '.join(map(repr, absent))}, which usually means a missing label"
        lines.append(f"WARNING: {what}")
    return lines


def _plain(name: str) -> str:
    """The name without case, spaces and Unicode form, and numbers by their value."""
    plain = "".join(unicodedata.normalize("NFKC", name).split()).casefold()
    if not re.fullmatch(r"-?\d{1,6}([.]\d{1,6}|,\d{1,2})?", plain):
        return plain
    whole, _, part = plain.replace(",", ".").partition(".")
    return f"{int(whole)}.{part}" if part.strip("0") else str(int(whole))


def _joins(name: str, mark: str, names: set[str]) -> bool:
    """True if the name joins at least two other names with a mark."""
    parts = [part.strip() for part in name.split(mark)]
    return len(parts) > 1 and names.issuperset(parts)


# ---- choice of samples


def _share(counts: Sequence[int], most: int) -> list[int]:
    """The number of samples of each split to compare: all, or for a large split what the smaller ones leave."""
    shares, left = [0] * len(counts), most
    for done, place in enumerate(sorted(range(len(counts)), key=lambda place: counts[place])):
        shares[place] = min(counts[place], left // (len(counts) - done))
        left -= shares[place]
    return shares


def _spread(count: int, wanted: int) -> Sequence[int]:
    """`wanted` indices below `count`, spread evenly."""
    return range(count) if wanted >= count else [number * count // wanted for number in range(wanted)]
