"""Texts on disk, read and tokenised once per machine: arrays that all ranks and their loader workers map into memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lockstep.data.cache import cached, digest_of
from lockstep.errors import DataError
from lockstep.sources import labels, table
from lockstep.sources.table import Source

Array = npt.NDArray[Any]

_FORMAT = 2  # of the cached files: another number makes them anew
_BLOCK = 4096  # texts that are tokenised at a time


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def __call__(self, texts: list[str], pairs: list[str] | None = None, **options: Any) -> Any: ...


class TextSample(NamedTuple):
    """A raw sample. ids: token ids. types: segment of each token, where there are pairs. label: class number (-1: unknown), or 0 and 1 by class."""

    ids: Array
    types: Array | None
    label: int | Array
    text: str
    pair: str | None


class Texts:
    """Texts and labels of one source, as they were read; a folder of the cache.

    names: of the labels, in this source, sorted (numbers by value), or as the source has them. codes: label of each text,
    as its place in `names`, -1 where there is none; with several labels per text, 0 and 1 of shape (texts, names).
    dropped: how many empty texts were left out. told: what a person should know of the way in which they were read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.names: list[str] = about["names"]
        self.columns: dict[str, Any] = about["columns"]
        self.dropped: int = about["dropped"]
        self.source: str = about["source"]
        self.told: list[str] = about["told"]
        self.codes: Array = _mapped(folder / "codes.npy")
        self._places: Array = _mapped(folder / "places.npy")

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def _parts(self) -> list[tuple[Array, Array]]:
        pairs = ["text", "pair"] if self.columns["pair"] is not None else ["text"]
        return [(_mapped(self.folder / f"{one}.npy"), _mapped(self.folder / f"{one}-ends.npy")) for one in pairs]

    def text(self, row: int, part: int = 0) -> str:
        """One text; part 1 is the second of a pair."""
        letters, ends = self._parts[part]
        return bytes(letters[ends[row - 1] if row else 0 : ends[row]]).decode()

    @property
    def has_pairs(self) -> bool:
        """Whether each sample has two texts."""
        return self.columns["pair"] is not None

    def where(self, row: int) -> str:
        """File and line of a text."""
        return table.place(self.source, int(self._places[row]), self.columns["by_line"])

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]  # a loader worker maps the same files


def read_texts(
    source: Source,
    text: str | int | Sequence[str | int] | None = None,
    pair: str | int | None = None,
    label: str | int | None = None,
    multi_label: bool = False,
    separator: str = ",",
    empty: str = "raise",
) -> Texts:
    """Read `source` once per machine: what comes next finds it in the cache, by the digest of the source's content.

    Args:
        text, pair, label: columns; None: those with a usual name.
        multi_label: labels are lists, or text with `separator` between labels; none is allowed.
        empty: `raise`, or `drop` texts without any letter.

    Raises:
        DataError: the source cannot be read, has no such columns, empty texts or texts without label; names file and line.
    """

    def make(folder: Path) -> None:
        _store(source, (text, pair, label), (multi_label, separator, empty), folder)

    settings = (_FORMAT, source, text, pair, label, multi_label, separator, empty)
    return Texts(cached("texts", digest_of(*settings, files=source.files()), make))


def _store(source: Source, columns: tuple[Any, Any, Any], options: tuple[bool, str, str], folder: Path) -> None:
    multi_label, separator, empty = options
    rows = source.read()
    chosen = table.choose(rows, source.name, *columns)
    assert chosen.label is not None
    parts = [_joined(rows, chosen.text)] + ([_joined(rows, (chosen.pair,))] if chosen.pair is not None else [])
    blank = [row for row in range(len(rows)) if not any(part[row].strip() for part in parts)]
    if blank and empty == "raise":
        what = f"{len(blank)} empty texts in column {' + '.join(chosen.text)}, the first here"
        raise DataError(
            what,
            where=rows.where(blank[0]),
            remedy="fill or remove these rows, or set task.empty=drop to leave them out",
        )
    gone = set(blank)
    kept = [row for row in range(len(rows)) if row not in gone]
    if not kept:
        raise DataError("no texts", where=source.name, remedy=f"column {' + '.join(chosen.text)} holds none")
    values, classes = [rows.columns[chosen.label][row] for row in kept], rows.classes.get(chosen.label)
    where = lambda number: rows.where(kept[number])  # noqa: E731
    names, codes = (
        labels.several_each(values, classes, separator, where)
        if multi_label
        else labels.one_each(values, classes, chosen.label, where)
    )
    for name, part in zip(("text", "pair"), parts, strict=False):
        encoded = [_encoded(part[row], rows, row) for row in kept]
        np.save(folder / f"{name}.npy", np.frombuffer(b"".join(encoded), dtype=np.uint8))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(one) for one in encoded], dtype=np.int64))
    np.save(
        folder / "places.npy",
        np.array(kept if rows.lines is None else [rows.lines[row] for row in kept], dtype=np.int64),
    )
    np.save(folder / "codes.npy", codes)
    about = {"text": list(chosen.text), "pair": chosen.pair, "label": chosen.label, "by_line": rows.lines is not None}
    read = {"names": names, "columns": about, "dropped": len(blank), "source": rows.name, "told": rows.told}
    (folder / "about.json").write_text(json.dumps(read))


def _joined(rows: table.Table, names: Sequence[str]) -> list[str]:
    """Texts of one column, or of several with a space between them."""
    columns = [rows.columns[name] for name in names]
    for name, column in zip(names, columns, strict=True):
        bad = next((number for number, value in enumerate(column) if not isinstance(value, str | None)), None)
        if bad is not None:
            what = f"column {name!r} holds {column[bad]!r} ({type(column[bad]).__name__}), not text"
            raise DataError(
                what, where=rows.where(bad), remedy=f"set task.columns.text to one of: {', '.join(rows.columns)}"
            )
    return [" ".join(value for value in values if value) for values in zip(*columns, strict=True)]


def _encoded(text: str, rows: table.Table, row: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!a} at letter {error.start} is half of a character"
        raise DataError(
            what, where=rows.where(row), remedy="write the text as UTF-8, or its escapes in pairs"
        ) from None


# ---- tokens


def tokenise(texts: Texts, tokenizer: Tokenizer, digest: str, max_length: int) -> Tokens:
    """Token ids of all texts, truncated to `max_length`, made once per machine with all its cores.

    Args:
        digest: of the tokenizer: another one makes other tokens.
    """

    def make(folder: Path) -> None:
        ids: list[Array] = []
        types: list[Array] = []
        cut = dropped = 0
        for start in range(0, len(texts), _BLOCK):
            rows = range(start, min(start + _BLOCK, len(texts)))
            pairs = [texts.text(row, 1) for row in rows] if texts.has_pairs else None
            first, options = [texts.text(row) for row in rows], {"return_attention_mask": False, "verbose": False}
            found = tokenizer(first, pairs, truncation=True, max_length=max_length, **options)
            ids += [np.array(one, dtype=np.int32) for one in found["input_ids"]]
            if pairs is not None and "token_type_ids" in found:
                types += [np.array(one, dtype=np.uint8) for one in found["token_type_ids"]]
            full = [number for number, one in enumerate(found["input_ids"]) if len(one) >= max_length]
            if full:
                whole = tokenizer(
                    [first[number] for number in full], pairs and [pairs[number] for number in full], **options
                )["input_ids"]
                extra = [len(one) - max_length for one in whole]
                cut, dropped = cut + sum(one > 0 for one in extra), dropped + sum(extra)
        np.save(folder / "ids.npy", np.concatenate(ids))
        np.save(folder / "ends.npy", np.cumsum([len(one) for one in ids], dtype=np.int64))
        if types:
            np.save(folder / "types.npy", np.concatenate(types))
        (folder / "about.json").write_text(json.dumps({"truncated": cut, "dropped": dropped}))

    return Tokens(cached("tokens", digest_of(_FORMAT, texts.folder.name, digest, max_length), make))


class Tokens:
    """Token ids of `Texts`, in the same order; a folder of the cache. truncated: texts that were too long. dropped: tokens cut off from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.truncated: int = about["truncated"]
        self.dropped: int = about["dropped"]
        self.ids, self.ends = _mapped(folder / "ids.npy"), _mapped(folder / "ends.npy")
        self.types = _mapped(folder / "types.npy") if (folder / "types.npy").exists() else None

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each text."""
        return np.diff(self.ends, prepend=0)

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]


class TextData(Dataset[TextSample]):
    """Some rows of tokenised texts. labels: of all rows of `texts`, as `match_labels` gives them. lengths: tokens of each sample."""

    def __init__(self, texts: Texts, tokens: Tokens, labels: Array, rows: Array | None = None) -> None:
        self.texts, self.tokens, self.labels, self.rows = texts, tokens, labels, rows

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each sample: the plan cuts batches by them."""
        return self.tokens.lengths if self.rows is None else self.tokens.lengths[self.rows]

    def __len__(self) -> int:
        return len(self.texts) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> TextSample:
        row = index if self.rows is None else int(self.rows[index])
        start, end = (self.tokens.ends[row - 1] if row else 0), self.tokens.ends[row]
        label = self.labels[row]
        return TextSample(
            self.tokens.ids[start:end],
            None if self.tokens.types is None else self.tokens.types[start:end],
            label if self.labels.ndim > 1 else int(label),
            self.texts.text(row),
            self.texts.text(row, 1) if self.texts.has_pairs else None,
        )

    def where(self, index: int) -> str:
        """File and line of a sample."""
        return self.texts.where(index if self.rows is None else int(self.rows[index]))


class InputText(NamedTuple):
    """A text, or a pair of texts, to predict."""

    where: str
    """The source in messages: a file with a line, or an argument."""
    text: str
    pair: str | None = None


def read_input_texts(
    source: Source,
    *,
    text: str | int | Sequence[str | int] | None,
    pair: str | int | None,
    label: str | int | None,
) -> list[InputText]:
    """The texts of a source, which needs no labels. The arguments are those of `read_texts`."""
    rows = source.read()
    chosen = table.choose(rows, source.name, text, pair, label, needs_label=False)
    seconds = _joined(rows, (chosen.pair,)) if chosen.pair is not None else [None] * len(rows)
    return [
        InputText(rows.where(row), *texts)
        for row, texts in enumerate(zip(_joined(rows, chosen.text), seconds, strict=True))
    ]


class InputTexts(Dataset[TextSample]):
    """Texts without labels, tokenised in memory. A text in which the tokenizer finds nothing has no token at all, not even
    a special one."""

    def __init__(self, rows: Sequence[InputText], tokenizer: Tokenizer, max_length: int) -> None:
        self.rows = rows
        pairs = [one.pair or "" for one in rows] if any(one.pair is not None for one in rows) else None
        found: Any = {"input_ids": []}
        nothing: list[int] = []
        if rows:
            cut: Any = {"truncation": True, "max_length": max_length}
            found = tokenizer([one.text for one in rows], pairs, **cut)
            nothing = tokenizer([""], None if pairs is None else [""], **cut)["input_ids"][0]
        self.ids = [np.array([] if one == nothing else one, dtype=np.int32) for one in found["input_ids"]]
        self.types: list[Array] | None = None
        if pairs is not None and "token_type_ids" in found:
            types = zip(found["token_type_ids"], self.ids, strict=True)
            self.types = [np.array(one[: len(mine)], dtype=np.uint8) for one, mine in types]
        self.lengths = np.array([max(1, len(one)) for one in self.ids], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TextSample:
        return TextSample(
            self.ids[index],
            None if self.types is None else self.types[index],
            -1,
            self.rows[index].text,
            self.rows[index].pair,
        )

    def where(self, index: int) -> str:
        """Where a text comes from."""
        return self.rows[index].where


def _mapped(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r" if path.stat().st_size > 256 else None)
    return array
