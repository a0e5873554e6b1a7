"""Texts that occur again, nearly: on both sides of the split, and in the training data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.text.faults.view import KEPT, TextSplit, TextView, shingles

_ALIKE = 0.7
"""Texts are near copies if they share at least this part of all their shingles."""
_CROWD = 50
"""A shingle of more texts is a phrase, and says nothing."""


def across(data: TextView) -> Iterator[DataFinding]:
    """Texts for evaluation that are training texts, nearly."""
    if len(data.splits) < 2 or data.is_short:
        return
    training, evaluation = data.splits
    known: dict[bytes, int] = {}
    for row, digest in enumerate(training.digests):
        known.setdefault(digest, row)
    places = _by_shingle(training)
    remedy = "remove them from one side, or set task.columns.group to what such texts share"
    for row, digest in enumerate(evaluation.digests):
        words = evaluation.plain[row]
        other = known.get(digest) if words else None
        how = "is the same text, but for case, spaces and punctuation, as"
        if other is None:
            other, how = _alike(evaluation, row, training, places), "is nearly the same text as"
        if other is not None:
            what = f"for evaluation, but {how} {training.where(other)} for training"
            yield DataFinding("warning", "copies-across", evaluation.where(row), what, remedy)


def within(data: TextView) -> Iterator[DataFinding]:
    """Training texts that occur again, nearly, if they are a noticeable part."""
    if data.is_short:
        return
    training = data.training
    places, pairs = _by_shingle(training), []
    first: dict[bytes, int] = {}
    for row, digest in enumerate(training.digests):
        other = first.setdefault(digest, row)
        is_same = other < row and bool(training.plain[row])
        found = other if is_same else _alike(training, row, training, places)
        if found is not None:
            pairs.append((row, found))
    if len(pairs) > max(3, 0.02 * len(training)):
        for row, other in pairs:
            what = f"is nearly the same text as {training.where(other)}"
            yield DataFinding("warning", "copies", training.where(row), what, "keep one of them")


def _by_shingle(split: TextSplit) -> dict[int, list[int]]:
    """The texts whose sketch has each shingle."""
    places: dict[int, list[int]] = defaultdict(list)
    for row, sketch in enumerate(split.sketches):
        for shingle in sketch:
            places[shingle].append(row)
    return places


def _alike(one: TextSplit, row: int, others: TextSplit, places: dict[int, list[int]]) -> int | None:
    """The text among `others` that shares most shingles with a text, if these are enough. In the same split, only
    earlier texts are considered. None: there is none."""
    shared: Counter[int] = Counter()
    for shingle in one.sketches[row]:
        rows = places.get(shingle, [])
        shared.update(other for other in rows if len(rows) <= _CROWD and (one is not others or other < row))
    if not shared:
        return None
    best, count = shared.most_common(1)[0]
    if count < min(KEPT // 4, len(one.sketches[row])):
        return None
    mine, theirs = shingles(one.plain[row]), shingles(others.plain[best])
    return best if len(mine & theirs) >= _ALIKE * len(mine | theirs) else None
