"""Images that show the same: frames of a video, slices of a patient, files that were saved again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import PurePath

import numpy as np

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.faults.view import ImageFacts, ImageSplit, ImageView

_NOISE = 0.02
_ALIKE = 0.012
"""Near copies differ by at most this share of their range, on average over small versions of them."""
_PLAIN = 0.03
"""Images of less contrast are alike by chance."""
_CROWD = 100
GROUP = re.compile(r"(?P<group>.+?)[ _.-]*(?:frame|slice|tile|patch|crop|aug|copy)[ _.-]*\(?\d+\)?$", re.I)
REMEDY = "move all of them to one side: set task.columns.group, or make folders of patients or videos"


def across(data: ImageView) -> Iterator[DataFinding]:
    """Images for evaluation that look like training images."""
    if len(data.splits) < 2:
        return
    training, evaluation = data.splits
    known = [one for one in training.facts if _is_comparable(one)]
    found = _alike([one for one in evaluation.facts if _is_comparable(one)], known)
    for one, other in found:
        if one.digest != other.digest:  # `copies` names equal files
            what = f"for evaluation, but looks like {other.file} for training"
            image = partial(_both, evaluation, one, training, other)
            yield DataFinding("warning", "copies-across", one.file, what, REMEDY, image)


def groups_across(data: ImageView) -> Iterator[DataFinding]:
    """Files whose names have the same video or patient before `frame`, `slice`, `tile` and a number, in both splits."""
    if len(data.splits) < 2:
        return
    training, evaluation = map(_groups, data.splits)
    for group in sorted(training.keys() & evaluation.keys()):
        here, there = data.splits[0].pictures.where(training[group]), data.splits[1].pictures.where(evaluation[group])
        what = f"for evaluation, but {here} for training has the same name before its number"
        yield DataFinding("warning", "group-across", there, what, REMEDY)


def _groups(split: ImageSplit) -> dict[str, int]:
    """The first image of each group."""
    found: dict[str, int] = {}
    for row in map(int, split.opened):
        match = GROUP.fullmatch(PurePath(split.pictures.name(row)).stem)
        if match:
            found.setdefault(match["group"], row)
    return found


def _is_comparable(one: ImageFacts) -> bool:
    return one.thumbnail is not None and one.spread > _PLAIN and one.high > one.low


def _scaled(one: ImageFacts) -> Array:
    """The thumbnail from 0 to 1."""
    assert one.thumbnail is not None
    scaled: Array = (one.thumbnail - one.low) / (one.high - one.low)
    return scaled


def _hashes(images: Array) -> Array:
    """The difference hash of images from 0 to 1: whether each of 8 x 8 pairs of neighbours becomes brighter to the
    right, as four numbers of 16 bits. (images, 4)."""
    rows = images.reshape(len(images), 8, 2, 16).mean(axis=2)
    brighter = rows[:, :, 1::2] - rows[:, :, ::2] > _NOISE
    numbers: Array = np.packbits(brighter.reshape(len(images), -1), axis=1).view(np.uint16)
    return numbers


def _alike(ones: list[ImageFacts], others: list[ImageFacts]) -> Iterator[tuple[ImageFacts, ImageFacts]]:
    """Each of `ones` that looks like one of `others`, with the most similar of these."""
    if not ones or not others:
        return
    here, there = (np.stack([_scaled(one) for one in part]) for part in (ones, others))
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, numbers in enumerate(_hashes(there).tolist()):
        for part, number in enumerate(numbers):
            places[part, number].append(row)
    for row, numbers in enumerate(_hashes(here).tolist()):
        groups = [places.get((part, number), []) for part, number in enumerate(numbers)]
        rows = sorted({other for group in groups if len(group) <= _CROWD for other in group})
        if rows:
            distances = np.abs(there[rows] - here[row]).mean(axis=(1, 2))
            best = int(distances.argmin())
            if distances[best] <= _ALIKE:
                yield ones[row], others[rows[best]]


def _both(split: ImageSplit, one: ImageFacts, other_split: ImageSplit, other: ImageFacts) -> Array:
    """Two images, side by side."""
    left, right = split.pixels(one.index), other_split.pixels(other.index)
    height = max(len(left), len(right))
    padded = [np.pad(image, ((0, height - len(image)), (0, 4), (0, 0))) for image in (left, right)]
    return np.concatenate(padded, axis=1)
