"""Texts that occur again, nearly: on both sides of the split, and in the training data."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.text.faults.view import TextView

_SHINGLE = 4
"""Words of a shingle."""
_KEPT = 16
"""Shingles of a text that are compared: those with the smallest digests."""
_ALIKE = 0.7
"""Texts are near copies if they share at least this part of all their shingles."""
_LEAST = 8
"""Words of a text that is compared: short texts are alike by chance."""
_CROWD = 50
"""A shingle of more texts is a phrase, and says nothing."""


def across(data: TextView) -> Iterator[DataFinding]:
    """Texts for evaluation that are training texts, nearly."""
    if len(data.splits) < 2:
        return
    training, evaluation = data.splits
    known: dict[bytes, int] = {}
    for row, digest in enumerate(training.digests):
        known.setdefault(digest, row)
    places = _by_shingle(training.plain)
    remedy = "remove them from one side, or set task.columns.group to what such texts share"
    for row, digest in enumerate(evaluation.digests):
        words = evaluation.plain[row]
        other = known.get(digest) if words else None
        how = "is the same text, but for case, spaces and punctuation, as"
        if other is None:
            other, how = _alike(words, places, training.plain), "is nearly the same text as"
        if other is not None:
            what = f"for evaluation, but {how} {training.where(other)} for training"
            yield DataFinding("warning", "copies-across", evaluation.where(row), what, remedy)


def within(data: TextView) -> Iterator[DataFinding]:
    """Training texts that occur again, nearly, if they are a noticeable part."""
    training = data.training
    places, pairs = _by_shingle(training.plain), []
    first: dict[bytes, int] = {}
    for row, digest in enumerate(training.digests):
        other = first.setdefault(digest, row)
        words = training.plain[row]
        found = other if other < row and words else _alike(words, places, training.plain, before=row)
        if found is not None:
            pairs.append((row, found))
    if len(pairs) > max(3, 0.02 * len(training)):
        for row, other in pairs:
            what = f"is nearly the same text as {training.where(other)}"
            yield DataFinding("warning", "copies", training.where(row), what, "keep one of them")


def _shingles(words: Sequence[str]) -> set[int]:
    texts = (" ".join(words[at : at + _SHINGLE]) for at in range(len(words) - _SHINGLE + 1))
    return {zlib.crc32(text.encode("utf-8", "replace")) for text in texts}


def _sketch(words: Sequence[str]) -> list[int]:
    return sorted(_shingles(words))[:_KEPT] if len(words) >= _LEAST else []


def _by_shingle(texts: Sequence[Sequence[str]]) -> dict[int, list[int]]:
    """The texts that have each of the kept shingles."""
    places: dict[int, list[int]] = defaultdict(list)
    for row, words in enumerate(texts):
        for shingle in _sketch(words):
            places[shingle].append(row)
    return places


def _alike(
    words: Sequence[str], places: dict[int, list[int]], texts: Sequence[Sequence[str]], before: int | None = None
) -> int | None:
    """The text that shares most shingles, if these are enough. None: there is none."""
    shared: dict[int, int] = defaultdict(int)
    for shingle in _sketch(words):
        rows = places.get(shingle, ())
        for row in rows if len(rows) <= _CROWD else ():
            if before is None or row < before:
                shared[row] += 1
    best = max(shared, key=lambda row: (shared[row], -row), default=None)
    if best is None or (4 * shared[best] < _KEPT and shared[best] < len(_sketch(words))):
        return None
    one, other = _shingles(words), _shingles(texts[best])
    return best if len(one & other) >= _ALIKE * len(one | other) else None
