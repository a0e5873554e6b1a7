"""Texts, read and tokenised once per machine into arrays on disk. All ranks and loader workers map them into memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Dataset

from lockstep.core.errors import DataError, number_of
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers import labels
from lockstep_recipes.tasks.readers.cache import cached, digest_of
from lockstep_recipes.tasks.readers.table import Source, Table, place
from lockstep_recipes.tasks.text.columns import Columns, read
from lockstep_recipes.tasks.text.options import TextColumnsOptions, TextOptions

_FORMAT = 4  # of the cached files; files of a different format are not used
_BLOCK = 4096  # texts to tokenise at a time


class Tokenizer(Protocol):
    """The interface of a Hugging Face tokenizer that is used here."""

    def __call__(self, texts: list[str], pairs: list[str] | None = None, **options: Any) -> Any: ...


class TextSample(NamedTuple):
    """A raw sample."""

    ids: Array
    """Token ids: (tokens,)."""
    types: Array | None
    """The segment of each token, 0 or 1. None without pairs."""
    label: int | Array
    """The class number, or -1 if it is unknown. With several labels per text: 0 and 1 by class."""
    text: str
    pair: str | None
    """The second text of a pair."""


class OfFolder:
    """Arrays in a folder of the cache. A loader worker maps the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]


class Texts(OfFolder):
    """Texts and labels of a source, stored in a folder of the cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        about = json.loads((folder / "about.json").read_text())
        self.names: list[str] = about["names"]
        """Names of the labels: sorted (numbers by value), or in the order of the source."""
        self.columns: dict[str, Any] = about["columns"]
        """Names of the columns by role."""
        self.dropped: int = about["dropped"]
        """Number of empty texts that were left out."""
        self.source: str = about["source"]
        self.notes: list[str] = about["told"]
        """Remarks about how the texts were read."""
        self.codes: Array = mapped(folder / "codes.npy")
        """The label of each text as its index in `names`, or -1: (texts,). With several labels per text: 0 and 1,
        (texts, names)."""
        self.groups: Array | None = mapped(folder / "groups.npy") if (folder / "groups.npy").exists() else None
        """The group of each text, which stays on one side of the split: (texts,). None: there are no groups."""
        self._places: Array = mapped(folder / "places.npy")

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def _parts(self) -> list[tuple[Array, Array]]:
        pairs = ["text", "pair"] if self.columns["pair"] is not None else ["text"]
        return [(mapped(self.folder / f"{part}.npy"), mapped(self.folder / f"{part}-ends.npy")) for part in pairs]

    def text(self, row: int, part: int = 0) -> str:
        """The text of a row. Part 1 is the second text of a pair."""
        letters, ends = self._parts[part]
        return bytes(letters[ends[row - 1] if row else 0 : ends[row]]).decode()

    def encoded(self, row: int) -> bytes:
        """All texts of a row as bytes, with their lengths, so that the bytes of different pairs differ."""
        parts = [bytes(letters[ends[row - 1] if row else 0 : ends[row]]) for letters, ends in self._parts]
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    @property
    def has_pairs(self) -> bool:
        """True if each sample has two texts."""
        return self.columns["pair"] is not None

    def where(self, row: int) -> str:
        """File and line of a text."""
        return place(self.source, int(self._places[row]), is_line=self.columns["by_line"])


def read_texts(source: Source, options: TextOptions) -> Texts:
    """Read `source` once per machine. Later calls find it in the cache by the digest of the source's content.

    Args:
        options: its `columns`, `multi_label`, `label_separator` and `empty`.

    Raises:
        DataError: the source cannot be read, has no such columns, or has texts that are empty or have no label. The
            error names file and line.
    """

    def make(folder: Path) -> None:
        _store(*read(source, options.columns), options, folder)

    columns = options.columns
    settings: tuple[object, ...] = (_FORMAT, source, columns.text, columns.pair, columns.label, columns.group)
    settings += (options.multi_label, options.label_separator, options.empty)
    return Texts(cached("texts", digest_of(*settings, files=source.files()), make))


def _store(rows: Table, columns: Columns, options: TextOptions, folder: Path) -> None:
    """Write the files of `Texts` into `folder`."""
    assert columns.label is not None
    parts = [_joined(rows, columns.text)] + ([_joined(rows, (columns.pair,))] if columns.pair is not None else [])
    blank = [row for row in range(len(rows)) if not any(part[row].strip() for part in parts)]
    if blank and options.empty == "raise":
        what = f"{number_of(len(blank), 'empty text')} in column {' + '.join(columns.text)}; this is the first"
        remedy = "fill or remove these rows, or set task.empty=drop to leave them out"
        if any(rows.columns[name][blank[0]] is None for name in columns.text):
            remedy += "; task.missing=[] keeps texts such as NA and None"
        raise DataError(what, where=rows.where(blank[0]), remedy=remedy)
    gone = set(blank)
    kept = [row for row in range(len(rows)) if row not in gone]
    if not kept:
        raise DataError(
            "no texts", where=rows.name, remedy=f"column {' + '.join(columns.text)} does not contain any text"
        )
    values, classes = [rows.columns[columns.label][row] for row in kept], rows.classes.get(columns.label)

    def where(number: int) -> str:
        return rows.where(kept[number])

    notes = rows.notes
    if options.multi_label:
        separator = options.label_separator
        if any(isinstance(value, str) and labels.written_list(value) for value in values):
            what = f"column {columns.label!r} has lists that were written as text"
            notes = (*notes, f"{what}, such as \"['a', 'b']\"; they are read as lists")
        names, codes = labels.multiple_labels(values, classes, separator=separator, where=where)
    else:
        names, codes = labels.single_labels(values, classes, column=columns.label, where=where)
    for name, part in zip(("text", "pair"), parts, strict=False):
        encoded = [_encoded(part[row], rows, row) for row in kept]
        np.save(folder / f"{name}.npy", np.frombuffer(b"".join(encoded), dtype=np.uint8))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(text) for text in encoded], dtype=np.int64))
    places = kept if rows.lines is None else [rows.lines[row] for row in kept]
    np.save(folder / "places.npy", np.array(places, dtype=np.int64))
    np.save(folder / "codes.npy", codes)
    if columns.group is not None:
        values = [rows.columns[columns.group][row] for row in kept]
        np.save(folder / "groups.npy", labels.groups_of(values, column=columns.group, where=where))
    text, by_line = list(columns.text), rows.lines is not None
    roles = {"text": text, "pair": columns.pair, "label": columns.label, "by_line": by_line}
    about = {"names": names, "columns": roles, "dropped": len(blank), "source": rows.name, "told": notes}
    (folder / "about.json").write_text(json.dumps(about))


def _joined(rows: Table, names: Sequence[str]) -> list[str]:
    """The texts of a column, or of several columns with a space between them."""
    columns = [rows.columns[name] for name in names]
    for name, column in zip(names, columns, strict=True):
        bad = next((number for number, value in enumerate(column) if not isinstance(value, str | None)), None)
        if bad is not None:
            what = f"column {name!r} contains {column[bad]!r} ({type(column[bad]).__name__}), not text"
            remedy = f"set task.columns.text to one of: {', '.join(rows.columns)}"
            raise DataError(what, where=rows.where(bad), remedy=remedy)
    return [" ".join(value for value in values if value) for values in zip(*columns, strict=True)]


def _encoded(text: str, rows: Table, row: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!a} at character {error.start} is half of a surrogate pair"
        remedy = "write the text as UTF-8, or its escapes in pairs"
        raise DataError(what, where=rows.where(row), remedy=remedy) from None


# ---- tokens


def tokenise(texts: Texts, tokenizer: Tokenizer, *, digest: str, max_length: int) -> TextTokens:
    """Token ids of all texts, truncated to `max_length` tokens. They are computed once per machine, with all its cores.

    Args:
        digest: the digest of the tokenizer. Tokens of a different tokenizer are not used.
    """

    def make(folder: Path) -> None:
        ids: list[Array] = []
        types: list[Array] = []
        cut = dropped = 0
        for start in range(0, len(texts), _BLOCK):
            rows = range(start, min(start + _BLOCK, len(texts)))
            pairs = [texts.text(row, 1) for row in rows] if texts.has_pairs else None
            first, options = [texts.text(row) for row in rows], {"return_attention_mask": False, "verbose": False}
            encoded = tokenizer(first, pairs, truncation=True, max_length=max_length, **options)
            ids += [np.array(tokens, dtype=np.int32) for tokens in encoded["input_ids"]]
            if pairs is not None and "token_type_ids" in encoded:
                types += [np.array(segments, dtype=np.uint8) for segments in encoded["token_type_ids"]]
            full = [number for number, tokens in enumerate(encoded["input_ids"]) if len(tokens) >= max_length]
            if full:
                second = pairs and [pairs[number] for number in full]
                whole = tokenizer([first[number] for number in full], second, **options)["input_ids"]
                extra = [len(tokens) - max_length for tokens in whole]
                cut, dropped = cut + sum(count > 0 for count in extra), dropped + sum(extra)
        np.save(folder / "ids.npy", np.concatenate(ids))
        np.save(folder / "ends.npy", np.cumsum([len(tokens) for tokens in ids], dtype=np.int64))
        if types:
            np.save(folder / "types.npy", np.concatenate(types))
        unknown, rest = unknown_tokens(np.concatenate(ids), tokenizer)
        about = {"truncated": cut, "dropped": dropped, "unknown": unknown, "words": rest}
        (folder / "about.json").write_text(json.dumps(about))

    return TextTokens(cached("tokens", digest_of(_FORMAT, texts.folder.name, digest, max_length), make))


def unknown_tokens(ids: Array, tokenizer: Any) -> tuple[int, int]:
    """How many tokens stand for something that the tokenizer does not know, and how many there are without special
    tokens. A tokenizer whose unknown token also marks ends of texts does not need it."""
    special = {token for token in getattr(tokenizer, "all_special_ids", ()) if token is not None}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ends = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "cls", "sep", "pad")}
    if unknown is None or unknown in ends:
        return 0, len(ids)
    return int((ids == unknown).sum()), int((~np.isin(ids, sorted(special - {unknown}))).sum())


def check_unknown(unknown: int, words: int, *, where: str, key: str) -> None:
    """Check that the tokenizer knows at least half of the tokens.

    Args:
        key: the config key of the tokenizer.

    Raises:
        DataError: it does not.
    """
    if 2 * unknown > words:
        what = f"the tokenizer does not know {unknown / words:.0%} of the tokens: they are all the same to the model"
        remedy = f"set {key} to a model for this language and script"
        raise DataError(what, where=where, remedy=remedy)


class TextTokens(OfFolder):
    """Token ids of `Texts`, in the same order, stored in a folder of the cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        about = json.loads((folder / "about.json").read_text())
        self.truncated: int = about["truncated"]
        """Number of truncated texts."""
        self.dropped: int = about["dropped"]
        """Number of tokens that were cut off."""
        self.unknown: int = about["unknown"]
        """Number of tokens for something that the tokenizer does not know."""
        self.words: int = about["words"]
        """Number of tokens without special tokens."""
        self.ids, self.ends = mapped(folder / "ids.npy"), mapped(folder / "ends.npy")
        self.types = mapped(folder / "types.npy") if (folder / "types.npy").exists() else None

    @cached_property
    def lengths(self) -> Array:
        """Number of tokens of each text."""
        return np.diff(self.ends, prepend=0)


class TextData(Dataset[TextSample]):
    """Some rows of tokenised texts.

    Args:
        labels: the labels of all rows of `texts`, as `match_labels` returns them.
        rows: None means all rows.
    """

    def __init__(self, texts: Texts, tokens: TextTokens, *, labels: Array, rows: Array | None = None) -> None:
        self.texts, self.tokens, self.labels, self.rows = texts, tokens, labels, rows

    @cached_property
    def lengths(self) -> Array:
        """Number of tokens of each sample. The plan forms batches by these lengths."""
        return self.tokens.lengths if self.rows is None else self.tokens.lengths[self.rows]

    @property
    def sample_labels(self) -> Array:
        """The label of each sample, for `data.balance`."""
        return self.labels if self.rows is None else self.labels[self.rows]

    def __len__(self) -> int:
        return len(self.texts) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> TextSample:
        row = index if self.rows is None else int(self.rows[index])
        start, end = (self.tokens.ends[row - 1] if row else 0), self.tokens.ends[row]
        label = self.labels[row]
        types = None if self.tokens.types is None else self.tokens.types[start:end]
        pair = self.texts.text(row, 1) if self.texts.has_pairs else None
        label = label if self.labels.ndim > 1 else int(label)
        return TextSample(self.tokens.ids[start:end], types, label, self.texts.text(row), pair)

    def where(self, index: int) -> str:
        """File and line of a sample."""
        return self.texts.where(index if self.rows is None else int(self.rows[index]))


class InputText(NamedTuple):
    """A text, or a pair of texts, to predict."""

    where: str
    """The source in messages: a file with a line, or an argument."""
    text: str
    pair: str | None = None


def read_input_texts(source: Source, given: TextColumnsOptions) -> list[InputText]:
    """The texts of a source. Labels are not needed."""
    rows, columns = read(source, given, needs_label=False)
    seconds = _joined(rows, (columns.pair,)) if columns.pair is not None else [None] * len(rows)
    texts = zip(_joined(rows, columns.text), seconds, strict=True)
    return [InputText(rows.where(row), *pair) for row, pair in enumerate(texts)]


class InputTexts(Dataset[TextSample]):
    """Texts without labels, tokenised in memory.

    A text without any known token has no tokens at all, not even special tokens.
    """

    def __init__(self, rows: Sequence[InputText], tokenizer: Tokenizer, max_length: int) -> None:
        self.rows = rows
        pairs = [row.pair or "" for row in rows] if any(row.pair is not None for row in rows) else None
        encoded: Any = {"input_ids": []}
        nothing: list[int] = []
        if rows:
            cut: Any = {"truncation": True, "max_length": max_length}
            encoded = tokenizer([row.text for row in rows], pairs, **cut)
            nothing = tokenizer([""], None if pairs is None else [""], **cut)["input_ids"][0]
        self.ids = [np.array([] if ids == nothing else ids, dtype=np.int32) for ids in encoded["input_ids"]]
        self.types: list[Array] | None = None
        if pairs is not None and "token_type_ids" in encoded:
            types = zip(encoded["token_type_ids"], self.ids, strict=True)
            self.types = [np.array(segments[: len(ids)], dtype=np.uint8) for segments, ids in types]
        self.lengths = np.array([max(1, len(ids)) for ids in self.ids], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TextSample:
        row, types = self.rows[index], None if self.types is None else self.types[index]
        return TextSample(self.ids[index], types, -1, row.text, row.pair)

    def where(self, index: int) -> str:
        """The source of a text, for messages."""
        return self.rows[index].where


def mapped(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r" if path.stat().st_size > 256 else None)
    return array
