"""Texts that are damaged, or are not texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.readers.labels import written_list
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView

_FEW = 20
_SHORT = 300  # characters of a text that may be a list, a number or a path
_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac")
"""UTF-8 that was read as Latin-1 or Windows-1252."""
_MARKUP = re.compile(r"&(?:amp|lt|gt|quot|nbsp|#\d+);|<br\s*/?>|</?(?:p|div|span)>")
_NUMBER = re.compile(r"[\s\d.,:+-]+")
_PATH = re.compile(r"\S+[/\\]\S+\.\w{2,5}|https?://\S+")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x7f]")


def refused(data: TextView) -> Iterator[DataFinding]:
    """What the task itself refuses."""
    yield from data.refused


def _matching(split: TextSplit, pattern: re.Pattern[str]) -> list[int]:
    return [row for row, text in enumerate(split.texts) if pattern.search(text)]


def damaged(data: TextView) -> Iterator[DataFinding]:
    """Texts in which an encoding went wrong."""
    for split in data.splits:
        for row in _matching(split, _MOJIBAKE):
            at = next(_MOJIBAKE.finditer(split.texts[row])).start()
            what = f"{split.texts[row][max(0, at - 10) : at + 10]!r}: UTF-8 that was read as Latin-1"
            yield DataFinding("warning", "wrong-encoding", split.where(row), what, "export the file again as UTF-8")
        for row, text in enumerate(split.texts):
            if len(_CONTROLS.findall(text)) > max(4, 0.05 * len(text)):
                what = f"{text[:10]!r}: many control characters, as in UTF-16 that was read as UTF-8"
                yield DataFinding("error", "wrong-encoding", split.where(row), what, "export the file again as UTF-8")
                continue
            if "\ufffd" not in text and not _CONTROLS.search(text):
                continue
            what = "the text has control or replacement characters, which an export leaves where it failed"
            yield DataFinding("warning", "broken-characters", split.where(row), what, "export the file again as UTF-8")


def markup(data: TextView) -> Iterator[DataFinding]:
    """Texts with HTML in them, if there are many."""
    for split in data.splits:
        rows = _matching(split, _MARKUP)
        if len(split) >= _FEW and len(rows) > 0.05 * len(split):
            what = f"{len(rows):,} of {len(split):,} texts have HTML in them, such as {_shown(split.texts[rows[0]])}"
            remedy = "convert it to text (html.unescape), unless the texts to predict have it, too"
            yield DataFinding("warning", "html", split.where(rows[0]), what, remedy)


def not_texts(data: TextView) -> Iterator[DataFinding]:
    """A column that is none of texts: lists, numbers or paths."""
    kinds: dict[str, Callable[[str], object]] = {
        "lists that were written as text": lambda text: text[:1] == "[" and bool(written_list(text)),
        "numbers or dates": _NUMBER.fullmatch,
        "paths or addresses": _PATH.fullmatch,
    }
    for split in data.splits[:1]:
        for kind, fits in kinds.items():
            if sum(len(text) <= _SHORT and bool(fits(text.strip())) for text in split.texts) > max(3, 0.9 * len(split)):
                what = f"nearly all texts are {kind}, such as {_shown(split.texts[0])}"
                yield DataFinding(
                    "warning", "not-texts", split.where(0), what, "set task.columns.text to another column"
                )


def lengths(data: TextView) -> Iterator[DataFinding]:
    """Texts that are much longer than the others, such as many rows in one pair of quotes."""
    for split in data.splits:
        sizes = np.array([len(text) for text in split.texts])
        if len(sizes) < _FEW:
            continue
        usual = float(np.median(sizes))
        for row in np.flatnonzero((sizes > 100 * usual) & (sizes > 10_000)).tolist():
            what = f"the text has {sizes[row]:,} characters, and the median {usual:,.0f}"
            remedy = 'look for a missing " in this row; split or remove the text'
            yield DataFinding("warning", "much-longer", split.where(row), what, remedy)


def repeated(data: TextView) -> Iterator[DataFinding]:
    """One text in many places, such as `[deleted]`."""
    split = data.training
    counts = Counter(split.digests)
    for digest, count in counts.most_common(3):
        if len(split) >= _FEW and count > max(5, 0.02 * len(split)):
            row = split.digests.index(digest)
            what = f"{count:,} of {len(split):,} texts are {_shown(split.texts[row])}"
            remedy = "remove the text if it means a missing one"
            yield DataFinding("warning", "repeated-text", split.where(row), what, remedy, count=count)


def one_line(data: TextView) -> Iterator[DataFinding]:
    """Long texts without a line break or without spaces: minified code, encoded files, texts that lost their lines."""
    for split in data.splits:
        for row, text in enumerate(split.texts):
            if len(text) > 100_000 and text.count("\n") < len(text) / 50_000:
                what = f"{len(text):,} characters with {text.count(chr(10)):,} line breaks"
                remedy = "check that the export kept the lines; set task.separator if it has several documents"
                yield DataFinding("warning", "no-lines", split.where(row), what, remedy)
            elif len(text) > 5_000 and max(map(len, text.split()), default=0) > 2_000 and text.isascii():
                what = "a word has more than 2,000 characters: an encoded file, or code without spaces"
                yield DataFinding("warning", "no-spaces", split.where(row), what, "remove the text")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
