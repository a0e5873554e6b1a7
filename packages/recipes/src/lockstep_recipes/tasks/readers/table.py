"""Tables (columns with rows) from CSV, TSV, JSON, JSON lines, Parquet, a saved `datasets` folder, or the Hugging Face
hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.configs.task_options import MISSING
from lockstep.core.errors import DataError, did_you_mean
from lockstep.core.foreign_errors import first_line, optional
from lockstep_recipes.tasks.readers import csv_table
from lockstep_recipes.tasks.readers.encodings import read_text
from lockstep_recipes.tasks.readers.hub import offline_without_network

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt")
EMBEDDED = "docstrings"


@dataclass
class Table:
    """Columns of equal length."""

    columns: dict[str, list[Any]]
    """The values of each column, by the column's name."""
    name: str
    """The source of the table, for messages."""
    lines: list[int] | None = None
    """The line of each row in its file. None: the source does not have lines, and rows are counted from 0."""
    classes: dict[str, list[str]] = field(default_factory=dict)
    """Columns that contain class numbers, with the names of the classes."""
    notes: tuple[str, ...] = ()
    """Remarks about how the table was read."""

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return place(self.name, row if self.lines is None else self.lines[row], is_line=self.lines is not None)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


def place(name: str, number: int, is_line: bool) -> str:
    """The name of a line of a file, or of a row of a table, for messages."""
    return f"{name}:{number}" if is_line else f"{name}, row {number}"


@dataclass(frozen=True)
class Source:
    """The source of a table."""

    name: str
    """A file, a folder that `datasets` saved, `docstrings` (embedded in the package), or a name on the hub."""
    split: str = "train"
    """Split of a folder or of a data set on the hub."""
    subset: str | None = None
    """Configuration of a data set on the hub."""
    header: bool = True
    """CSV: whether the first line names the columns. Otherwise the columns are named 0, 1, ..."""
    delimiter: str | None = None
    """CSV delimiter. None: a tab for .tsv, otherwise a comma. If the header does not contain it, the one of `;`, tab,
    `,` and `|` that splits the header into columns; `Table.notes` then reports it."""
    quoting: str | None = None
    """CSV: `minimal` (a field may be in double quotes) or `none` (quotes are ordinary characters). None: `none` for
    .tsv, otherwise `minimal`."""
    missing: tuple[str, ...] = MISSING
    """CSV: fields that contain no value. They are read as None."""

    @staticmethod
    def parse(text: str, split: str = "train", **options: Any) -> Source:
        """The source that `NAME` or `NAME:SPLIT` names. A file has no split.

        Args:
            split: the split if `text` does not name one.
            options: further fields of the source.

        Raises:
            DataError: a split follows the name of a file.
        """
        name, colon, wanted = text.partition(":")
        if colon and not Path(text).exists() and "/" not in wanted and not wanted.endswith(SUFFIXES):
            found = Source(name, wanted, **options)
            if found.is_file or name == EMBEDDED:
                what = f"{'a file' if found.is_file else 'this table'} has no splits, so there is no {wanted!r}"
                raise DataError(what, where=text, remedy=f"write {name}, and use a separate file for each split")
            return found
        return Source(text, split, **options)

    @property
    def is_file(self) -> bool:
        """True if the source is a single file, judged by its suffix."""
        return Path(self.name).is_file() or (self.name.endswith(SUFFIXES) and not Path(self.name).is_dir())

    def files(self) -> tuple[Path, ...]:
        """The files that contain the table. Their digest shows whether the table has changed.

        Raises:
            DataError: no such file or data set.
        """
        path = Path(self.name)
        if self.name == EMBEDDED:
            with resources.as_file(resources.files("lockstep_recipes.recipes").joinpath(f"{EMBEDDED}.csv")) as embedded:
                return (embedded,)
        if self.is_file:
            if not path.is_file():
                neighbours = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
                hint = did_you_mean(path.name, neighbours)
                remedy = f"{hint}Give a file ({', '.join(SUFFIXES)}), a saved data set, or a name on the hub"
                raise DataError("no such file", where=self.name, remedy=remedy)
            return (path,)
        files = tuple(sorted(Path(file["filename"]) for file in self.data_set().cache_files))
        if not files:
            what = "the data set has no files on disk, so changes cannot be detected"
            raise DataError(what, where=self.name, remedy="write it with `Dataset.save_to_disk` first")
        return files

    def data_set(self) -> Any:
        """The `datasets.Dataset` of a source that is not a file: from a saved folder, or from the hub (offline: from
        the hub's cache).

        Raises:
            DataError: there is no such data set or split, or `datasets` is not installed.
        """
        return _data_set(self)

    def read(self) -> Table:
        """The whole table.

        Raises:
            DataError: the source cannot be read, has rows of different lengths, is not UTF-8, or is of an unknown kind.
                The error names file and line, or byte.
        """
        if self.name == EMBEDDED:
            columns, lines, _ = csv_table.read(self.files()[0], csv_table.CsvForm(delimiter=","))
            return Table(columns, EMBEDDED, lines)
        if not self.is_file:
            return _from_data_set(self.data_set(), f"{self.name}:{self.split}")
        (path,) = self.files()
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            return _read_parquet(path)
        if suffix in (".jsonl", ".ndjson"):
            return _read_json_lines(path)
        if suffix == ".json":
            return _read_json(path)
        if suffix == ".txt":
            texts = lines_of(read_text(path))
            if not texts:
                raise DataError("no rows", where=self.name, remedy="the file needs one text per line")
            return Table({"text": texts}, self.name, list(range(1, len(texts) + 1)))
        if suffix in (".csv", ".tsv"):
            is_tsv = suffix == ".tsv"
            quoting = self.quoting or ("none" if is_tsv else "minimal")
            form = csv_table.CsvForm(
                self.header, self.delimiter, "\t" if is_tsv else ",", quoting == "minimal", frozenset(self.missing)
            )
            columns, lines, notes = csv_table.read(path, form)
            return Table(columns, str(path), lines, notes=notes)
        raise DataError(f"unknown suffix {suffix!r}", where=self.name, remedy=f"known are {', '.join(SUFFIXES)}")


def lines_of(text: str) -> list[str]:
    """The lines of a text, as editors count them. (`str.splitlines` would also split at form feeds and Unicode
    separators.)"""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _read_json_lines(path: Path) -> Table:
    rows, lines = [], []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            remedy = "write one JSON object per line"
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}", remedy=remedy) from None
        lines.append(number)
    return _from_objects(rows, path, lines)


def _read_json(path: Path) -> Table:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        remedy = 'write [{"text": ..., "label": ...}, ...]'
        raise DataError(f"not a list of objects: {error}", where=str(path), remedy=remedy) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under another suffix
            return _read_json_lines(path)
        remedy = "write a list of objects, or one object per line in a .jsonl"
        raise DataError(f"not JSON: {error}", where=f"{path}:{error.lineno}", remedy=remedy) from None
    if not isinstance(value, list):
        remedy = 'write [{"text": ..., "label": ...}, ...]'
        raise DataError(f"a JSON {type(value).__name__}, not a list of objects", where=str(path), remedy=remedy)
    return _from_objects(value, path, None)


def _from_objects(rows: list[Any], path: Path, lines: list[int] | None) -> Table:
    if not rows:
        raise DataError("no rows", where=str(path), remedy="the file needs one object per sample")
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            where = place(str(path), number if lines is None else lines[number], is_line=lines is not None)
            remedy = 'write objects such as {"text": ..., "label": ...}'
            raise DataError(f"a JSON {type(row).__name__}, not an object", where=where, remedy=remedy)
        names.update(dict.fromkeys(row))
    return Table({name: [row.get(name) for row in rows] for name in names}, str(path), lines)


def _read_parquet(path: Path) -> Table:
    remedy = "pip install pyarrow"
    parquet = optional("pyarrow.parquet", "pyarrow is needed to read Parquet", where=str(path), remedy=remedy)
    import pyarrow

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        columns = table.to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        remedy = "the file is damaged, or is not Parquet"
        raise DataError(f"not readable as Parquet: {error}", where=str(path), remedy=remedy) from error
    return Table(columns, str(path), classes=_class_names(table.schema.metadata or {}))


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The columns with class numbers of a Parquet file that `datasets` wrote, with the names of the classes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):  # another program's file
        return {}
    found = {}
    for column, kind in features.items() if isinstance(features, Mapping) else ():
        kind = next(iter(kind), None) if isinstance(kind, list) else kind  # a list of class numbers
        kind = kind.get("feature", kind) if isinstance(kind, Mapping) else None
        if isinstance(kind, Mapping) and kind.get("_type") == "ClassLabel" and kind.get("names"):
            found[column] = [str(name) for name in kind["names"]]
    return found


def _data_set(source: Source) -> Any:
    """A `datasets.Dataset`: from a saved folder, or from the hub (offline: from the hub's cache)."""
    remedy = "pip install datasets, or give a CSV, TSV or JSON file"
    datasets = optional("datasets", "`datasets` is needed to read this data set", where=source.name, remedy=remedy)
    datasets.disable_progress_bars()
    if Path(source.name).is_dir():
        try:
            loaded = datasets.load_from_disk(source.name)
        except Exception as error:
            files = [file.name for file in sorted(Path(source.name).iterdir()) if file.suffix in SUFFIXES]
            remedy = "make a data set with `Dataset.save_to_disk`, or give a file"
            if files:
                remedy = f"give one of its files: {', '.join(files)}"
            what = f"not a folder that `datasets` saved: {first_line(error)}"
            raise DataError(what, where=source.name, remedy=remedy) from error
        if not isinstance(loaded, Mapping):
            return loaded
        if source.split not in loaded:
            remedy = f"write {source.name}:SPLIT with one of: {', '.join(loaded)}"
            raise DataError(f"there is no split {source.split!r}", where=source.name, remedy=remedy)
        return loaded[source.split]
    try:
        with offline_without_network():
            return datasets.load_dataset(source.name, source.subset, split=source.split)
    except Exception as error:
        here = Path(source.name).absolute()
        what = f"no file or folder ({here}), and no data set that the Hugging Face hub provides now"
        what = f"{what}: {first_line(error)}"
        hint = did_you_mean(here.name, os.listdir(here.parent)) if here.parent.is_dir() else ""
        remedy = f"{hint}Check the path or the name; offline, give a file or a folder made by `Dataset.save_to_disk`"
        remedy = f"{remedy} (the hub's cache is {datasets.config.HF_DATASETS_CACHE})"
        raise DataError(what, where=f"{source.name}:{source.split}", remedy=remedy) from error


def _from_data_set(data: Any, name: str) -> Table:
    classes = {}
    for column, kind in data.features.items():
        inner = getattr(kind, "feature", None)  # for a list of class numbers
        if names := getattr(inner, "names", None) or getattr(kind, "names", None):
            classes[column] = list(names)
    return Table(data.to_dict(), name, classes=classes)
