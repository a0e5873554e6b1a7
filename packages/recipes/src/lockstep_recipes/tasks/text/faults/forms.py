"""Texts whose form sets them apart: a different script, or the length at which an export cut them off."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView

_FEW = 20
"""With fewer texts, shares mean nothing."""
_RARE = 0.02
_LETTERS = 200
"""Letters of a text that decide its script."""
_CHANCE = 0.001
_LEAST = 30
"""Characters of a text that an export may have cut off."""
_NAMES = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}


def other_script(data: TextView) -> Iterator[DataFinding]:
    """Texts in a different script than most, if they are rare, or if their label follows from the script."""
    for split in data.splits:
        rows: dict[str, list[int]] = defaultdict(list)
        for row, text in enumerate(split.texts):
            if script := _script(text):
                rows[script].append(row)
        total = sum(map(len, rows.values()))
        usual = max(rows, key=lambda script: len(rows[script]), default="")
        for script, own in rows.items():
            label = _shared_label(split, own)
            if script == usual or total < _FEW or (label is None and len(own) > _RARE * total):
                continue
            places = ", ".join(split.where(row) for row in own[:3]) + (", ..." if len(own) > 3 else "")
            what = f"{len(own):,} of {total:,} texts are {script.title()}, most others {usual.title()}: {places}"
            what += "" if label is None else f"; nearly all have the label {label!r}, so the script gives it away"
            remedy = "remove them, or collect such texts for every label"
            yield DataFinding("warning", "other-script", split.where(own[0]), what, remedy, count=len(own))


def _shared_label(split: TextSplit, rows: list[int]) -> str | None:
    """The label of nearly all of some texts. None: they have several, or would share it by chance."""
    if split.labels is None:
        return None
    label, count = Counter(split.labels[row] for row in rows).most_common(1)[0]
    share = Counter(split.labels)[label] / len(split)
    return label if count >= 0.9 * len(rows) and share**count < _CHANCE else None


def _script(text: str) -> str | None:
    """The script of nearly all letters at the start of a text. None: it has few letters, or several scripts."""
    letters = [letter for letter in text[: 2 * _LETTERS] if letter.isalpha()][:_LETTERS]
    found = Counter(map(_script_of_letter, letters)).most_common(1)
    return found[0][0] if len(letters) >= 5 and found[0][1] > 0.8 * len(letters) else None


@cache
def _script_of_letter(letter: str) -> str:
    name = unicodedata.name(letter, "unknown").split()[0]
    return _NAMES.get(name, name)


def cut_off(data: TextView) -> Iterator[DataFinding]:
    """Many different texts of exactly the same length, which is the longest: an export has cut them off."""
    for split in data.splits:
        for column in split.columns or (split.texts,):
            lengths = Counter(map(len, column))
            most = max(lengths, default=0)
            count = lengths.pop(most, 0)
            rows = [row for row, text in enumerate(column) if len(text) == most]
            differ = len({column[row] for row in rows})
            if most < _LEAST or len(column) < _FEW or not max(4, 0.05 * len(column)) < count < 0.95 * len(column):
                continue
            if 2 * differ > count > 4 * max(lengths.values()):
                what = f"{count:,} of {len(column):,} texts have exactly {most:,} characters, and none has more"
                remedy = "export them again without a limit of characters"
                yield DataFinding("warning", "cut-off", split.where(rows[0]), what, remedy, count=count)
