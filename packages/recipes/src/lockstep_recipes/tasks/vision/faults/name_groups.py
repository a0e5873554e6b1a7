"""Names of files that share a patient, a subject or a video on both sides of the split."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePath

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.vision.faults.near_copies import GROUP, REMEDY
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView

_FEWEST = 5
_MARKS = re.compile(r"[\s_.-]+")
_DIGIT = re.compile(r"\d")
_DATE = re.compile(r"(19|20)\d{2}((0\d|1[0-2])([0-2]\d|3[01]))?")
"""A day or a year: many photographs share one by chance."""

Groups = dict[str, list[int]]


def ids_across(data: ImageView) -> Iterator[DataFinding]:
    """Names such as `p017_img3`: a part before the last groups files, and most files for evaluation are of a group
    that also has training files."""
    if len(data.splits) < 2:
        return
    training, evaluation = data.splits
    known, held = _groups(training), _groups(evaluation)
    for form in sorted(known.keys() & held.keys()):
        shared = sorted(known[form].keys() & held[form].keys())
        rows = [row for group in shared for row in held[form][group]]
        if len(shared) < _FEWEST or 2 * len(rows) <= len(evaluation.opened) or not _is_group(training, known[form]):
            continue
        there = training.pictures.where(known[form][shared[0]][0])
        what = f"{len(rows):,} files for evaluation share an id with training files: {shared[0]!r}, as in {there}"
        where = evaluation.pictures.where(rows[0])
        yield DataFinding("warning", "group-across", where, what, REMEDY, count=len(rows))
        return


def _groups(split: ImageSplit) -> dict[tuple[int, int], Groups]:
    """The files of each id, by the number of parts of a name and the place of the id. Ids have digits, and are not
    the last part, which counts the files of the id."""
    found: dict[tuple[int, int], Groups] = defaultdict(lambda: defaultdict(list))
    for row in map(int, split.opened):
        stem = PurePath(split.pictures.name(row)).stem
        parts = _MARKS.split(stem.casefold())
        if GROUP.fullmatch(stem):  # `near_copies.groups_across` judges them
            continue
        for place, part in enumerate(parts[:-1]):
            if _DIGIT.search(part) and not _DATE.fullmatch(part):
                found[len(parts), place]["_".join(parts[: place + 1])].append(row)
    return found


def _is_group(split: ImageSplit, groups: Groups) -> bool:
    """True if most ids have several files, and neither the id nor what follows it is the class."""
    sizes = Counter(len(rows) > 1 for rows in groups.values())
    if sizes[True] < max(_FEWEST, sizes[False]):
        return False
    if split.labels is None:
        return True
    labels = {group: {int(split.labels[row]) for row in rows} for group, rows in groups.items()}
    classes = len(set().union(*labels.values()))
    if all(len(own) == 1 for own in labels.values()) and len(groups) <= 2 * classes:
        return False
    after = {row: _after(split, group, row) for group, rows in groups.items() for row in rows}
    pairs = {(rest, int(split.labels[row])) for row, rest in after.items()}
    rests = set(after.values())
    return classes < 2 or len(pairs) > len(rests) or len(rests) > 2 * classes


def _after(split: ImageSplit, group: str, row: int) -> str:
    """What follows the id in a name."""
    stem = PurePath(split.pictures.name(row)).stem.casefold()
    return "_".join(_MARKS.split(stem))[len(group) :]
