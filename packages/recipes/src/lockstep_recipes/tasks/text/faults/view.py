"""What finders get of a data set of texts: its splits, with labels if it has some."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep_recipes.look.finding import DataFinding, Extent

_PER_SAMPLE = 100
"""Texts for each sample that an extent allows: they are small, and already in memory."""
_MEASURED = 50
"""Texts whose lengths are measured."""
KEPT = 16
"""Shingles of a sketch."""
_SHINGLE = 4
"""Words of a shingle."""
_LEAST = 8
"""Words of a text that has a sketch."""
_WORD = re.compile(r"\w+")


@dataclass
class TextSplit:
    """The texts of a split.

    Args:
        texts: all texts, or those that are looked at.
        labels: the label of each text. With several labels, they are joined. None: texts have no labels.
        columns: the parts of the texts, if these are joined from several, such as questions and answers.
    """

    name: str
    """`training` or `evaluation`."""
    texts: Sequence[str]
    where: Callable[[int], str]
    labels: Sequence[str] | None = None
    columns: Sequence[Sequence[str]] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def plain(self) -> list[tuple[str, ...]]:
        """The words of each text in lower case, without punctuation."""
        return [tuple(_WORD.findall(text.casefold())) for text in self.texts]

    @cached_property
    def digests(self) -> list[bytes]:
        """Equal for texts that differ only in case, spaces and punctuation."""
        joined = (" ".join(words).encode("utf-8", "replace") for words in self.plain)
        return [hashlib.blake2b(text, digest_size=8).digest() for text in joined]

    @cached_property
    def sketches(self) -> list[list[int]]:
        """A few of the shingles of each text, those with the smallest digests. Short texts, which are alike by chance,
        have none."""
        return [sorted(shingles(words))[:KEPT] if len(words) >= _LEAST else [] for words in self.plain]


def shingles(words: Sequence[str]) -> set[int]:
    """Digests of all sequences of a few words."""
    texts = (" ".join(words[at : at + _SHINGLE]) for at in range(len(words) - _SHINGLE + 1))
    return {zlib.crc32(text.encode("utf-8", "replace")) for text in texts}


@dataclass
class TextView:
    """A data set of texts."""

    splits: Sequence[TextSplit]
    """The training data, and the evaluation data if there is some."""
    classes: Sequence[str] = ()
    refused: Sequence[DataFinding] = field(default_factory=list)
    """What the task itself refuses, and what its reader corrects."""
    is_short: bool = False
    """True for the head of a log: finders that take long, and those that repeat its other lines, are left out."""

    @property
    def training(self) -> TextSplit:
        return self.splits[0] if self.splits else TextSplit("training", [], str)


def chosen(count: int, extent: Extent, length: Callable[[int], int] = lambda _: 0) -> list[int]:
    """The texts to look at, spread over a split.

    Args:
        length: of a text, in characters. Some are measured, so that all together keep the limit of bytes.
    """
    most = count if extent.samples is None else extent.samples * _PER_SAMPLE
    rows = list(range(count)) if most >= count else (np.arange(most) * count // most).tolist()
    if extent.bytes is None or not rows:
        return rows
    some = rows[:: -(-len(rows) // _MEASURED)]
    total = len(rows) * sum(map(length, some)) // len(some)
    return rows[:: -(-total // extent.bytes) or 1]
