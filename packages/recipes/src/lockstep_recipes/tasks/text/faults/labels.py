"""Labels that cannot be what they seem."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.text.faults.view import TextView

_WORD = re.compile(r"[^\W_]+")
_LEAST = 5  # letters of a name that texts may contain, with a space on both sides
_FEW = 20
"""With fewer texts, shares mean nothing."""


def of_counts(counts: Mapping[str, int], where: str) -> Iterator[DataFinding]:
    """Faults of the numbers of samples by class: labels that are nearly all different, or nearly all the same."""
    total, most = sum(counts.values()), max(counts.values(), default=0)
    if total < _FEW:
        return
    used = sum(count > 0 for count in counts.values())
    if 2 * used > total:
        what = f"{used:,} different labels for {total:,} samples: the label may be an id, or free text"
        yield DataFinding("warning", "label-is-an-id", where, what, "set task.columns.label to the column of classes")
    elif most > 0.99 * total:
        name = max(counts, key=lambda name: counts[name])
        what = f"{most:,} of {total:,} samples have the label {name!r}: always answering it is right {most / total:.1%}"
        remedy = "judge by macro F1, not by accuracy; set task.class_weights=balanced, or collect more of the others"
        yield DataFinding("warning", "one-label-only", where, what, remedy)


def counts(data: TextView) -> Iterator[DataFinding]:
    """Labels that are nearly all different, or nearly all the same."""
    training = data.training
    if training.labels is not None:
        yield from of_counts(Counter(training.labels), training.where(0) if len(training) else "")


def names(data: TextView) -> Iterator[DataFinding]:
    """Names of classes that differ only in form, that are several names in one, or that mean a missing label."""
    yield from () if data.is_short else of_names(data.classes)


def of_names(classes: Sequence[str]) -> Iterator[DataFinding]:
    """The same, of the names themselves."""
    for line in duplicates.of_names(classes):
        what = line.removeprefix("WARNING: ")
        yield DataFinding("warning", "class-names", "", what, "write one name for each class")


def conflicts(data: TextView) -> Iterator[DataFinding]:
    """Texts that are equal, except for case, spaces and punctuation, with different labels."""
    for split in data.splits:
        first: dict[bytes, int] = {}
        for row, digest in enumerate(split.digests):
            other = first.setdefault(digest, row)
            if split.labels is not None and split.labels[other] != split.labels[row] and split.plain[row]:
                what = f"label {split.labels[row]!r}, but the same text has the label {split.labels[other]!r} in "
                remedy = "decide on one label, or remove both"
                yield DataFinding(
                    "warning", "same-text-other-label", split.where(row), what + split.where(other), remedy
                )


def leaks(data: TextView) -> Iterator[DataFinding]:
    """Texts that contain the name of their label: in most texts of the class, and in few of the others."""
    training = data.training
    if training.labels is None or len(training) < _FEW:
        return
    words = [f" {' '.join(plain)} " for plain in training.plain]
    rows: dict[str, list[int]] = defaultdict(list)
    for row, label in enumerate(training.labels):
        rows[label].append(row)
    found = {}
    for label, own in rows.items():
        name = f" {' '.join(_WORD.findall(label.casefold()))} "
        if len(name) < _LEAST:
            continue
        hits = sum(name in words[row] for row in own)
        if hits > 0.8 * len(own) and sum(name in text for text in words) - hits < 0.1 * len(training):
            found[label] = own[0]
    if 2 * len(found) > len(rows):
        remedy = "remove the label from the texts, or take another column"
        for label, row in found.items():
            what = f"nearly all texts with the label {label!r} contain it, and few others do"
            yield DataFinding("warning", "text-has-its-label", training.where(row), what, remedy)
