"""Rows of tokens: each contains one or several documents, or a piece of a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.lm import packing
from lockstep_recipes.tasks.lm.tokens import DocumentTokens
from lockstep_recipes.tasks.readers.cache import cached, digest_of
from lockstep_recipes.tasks.text.data import OfFolder, mapped

NOT_LEARNED = -100
"""The target of positions whose next token is not learned. `cross_entropy` ignores it."""
_FORMAT = 1  # of the cached files


class Prompt(NamedTuple):
    """The start of a text that the model continues."""

    text: str
    ids: tuple[int, ...]
    """Its tokens, with the token before a document."""
    where: str = ""
    """The place of the prompt, for messages."""
    answer: str | None = None
    """The right answer to a question. None: the text is only shown."""


class Row(NamedTuple):
    """A raw sample. All arrays have one number per position."""

    ids: Array
    """Tokens."""
    targets: Array
    """The token after each position, or `NOT_LEARNED`."""
    documents: Array
    """The number of the document in the row, from 0."""
    positions: Array
    """The position in the document, or in its piece, from 0."""
    bytes: int
    """Bytes of text that belong to learned tokens."""
    prompts: tuple[Prompt, ...] = ()
    """Texts to continue, in evaluations and predictions."""


class PackingPlan(OfFolder):
    """The pieces of documents in each row, stored in a folder of the cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begins, self.lengths = mapped(folder / "begins.npy"), mapped(folder / "lengths.npy")
        self.ends = mapped(folder / "ends.npy")
        self.split: int = json.loads((folder / "about.json").read_text())["split"]
        """Number of documents that span several rows."""

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """The first token and the length of each piece of a row."""
        pieces = slice(self.ends[row - 1] if row else 0, self.ends[row])
        return list(zip(self.begins[pieces].tolist(), self.lengths[pieces].tolist(), strict=True))

    @cached_property
    def sizes(self) -> Array:
        """The length of each row: (rows)."""
        whole = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(whole[self.ends], prepend=0)


def plan_rows(tokens: DocumentTokens, length: int, packed: bool) -> PackingPlan:
    """The rows of documents, planned once per machine. They depend only on the lengths of the documents.

    Args:
        packed: fill rows with several documents. Otherwise each piece is a row.
    """

    def make(folder: Path) -> None:
        pieces = packing.cut(tokens.ends, tokens.counts, length)
        order, ends = np.arange(len(pieces.begins)), np.arange(1, len(pieces.begins) + 1)
        if packed:
            order, ends = packing.pack(pieces.lengths, length)
        np.save(folder / "begins.npy", pieces.begins[order])
        np.save(folder / "lengths.npy", pieces.lengths[order])
        np.save(folder / "ends.npy", ends.astype(np.int64))
        (folder / "about.json").write_text(json.dumps({"split": pieces.split}))

    return PackingPlan(cached("lm-rows", digest_of(_FORMAT, tokens.folder.name, length, packed), make))


class PackedRows(Dataset[Row]):
    """The rows of tokenised documents, in the order of their plan. Training shuffles them in each epoch.

    Args:
        length: the number of positions in a row.
        prompts: prompts that are continued with the first row, in evaluations.
        questions: questions that are distributed over all rows, in evaluations.

    Raises:
        DataError: none of the tokens is learned.
    """

    def __init__(
        self,
        tokens: DocumentTokens,
        *,
        length: int,
        packed: bool,
        prompts: Sequence[Prompt] = (),
        questions: Sequence[Prompt] = (),
    ) -> None:
        self.tokens, self.length, self.packed = tokens, length, packed
        self.content_digests: dict[str, str] = {}
        """See `Task.train_data`."""
        self.prompts, self.questions = tuple(prompts), tuple(questions)
        self.plan = plan_rows(tokens, length, packed)
        if not len(self):
            remedy = "check task.columns and task.loss_on"
            raise DataError("the texts do not contain any token to learn", where=tokens.places[0], remedy=remedy)

    def __len__(self) -> int:
        return len(self.plan.ends)

    def __getitem__(self, index: int) -> Row:
        tokens, parts = self.tokens, []
        pieces = self.plan.pieces(index)
        size = 0
        for number, (begin, length) in enumerate(pieces):
            learned = np.asarray(tokens.counts[begin + 1 : begin + length + 1])
            next_tokens = tokens.ids[begin + 1 : begin + length + 1]
            targets = np.where(learned, next_tokens, NOT_LEARNED)
            parts.append((tokens.ids[begin : begin + length], targets, np.full(length, number), np.arange(length)))
            size += int(tokens.sizes[begin + 1 : begin + length + 1][learned].sum())
        ids, targets, documents, positions = (
            np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)
        )
        prompts = (() if index else self.prompts) + self.questions[index :: len(self)]
        return Row(ids, targets, documents, positions, size, prompts)

    def where(self, index: int) -> str:
        """The place of the row's first document."""
        begin, _ = self.plan.pieces(index)[0]
        return self.tokens.places[int(np.searchsorted(self.tokens.ends, begin, side="right"))]


class PaddedRows(PackedRows):
    """Rows with one piece each, of different lengths. Rows of similar length share a micro-batch."""

    @property
    def lengths(self) -> Array:
        """The length of each row."""
        return self.plan.sizes


class Prompts(Dataset[Row]):
    """Prompts that `lockstep predict` continues."""

    def __init__(self, prompts: Sequence[Prompt], notes: Sequence[str] = ()) -> None:
        self.prompts, self.notes = prompts, notes

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Row:
        nothing = np.zeros(0, dtype=np.int64)
        return Row(nothing, nothing, nothing, nothing, 0, (self.prompts[index],))

    def where(self, index: int) -> str:
        """The source of a prompt, for messages."""
        return self.prompts[index].where
