"""Tables of text from anywhere: CSV, TSV, JSON, JSON lines, Parquet, a saved `datasets` folder, a name on the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, did_you_mean
from lockstep.sources.encodings import read_text

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".txt")
EMBEDDED = "docstrings"
_SHOWN = 40  # characters of a column's name
_LETTERS = "where quotes are letters of the texts, set task.quoting=none"


@dataclass
class Table:
    """Columns of equal length, by name. name: of the source. lines: of the rows in its file; None where they are counted from 0.
    classes: names that a column's numbers stand for, where the source has them. told: what a person should know of the
    way in which it was read."""

    columns: dict[str, list[Any]]
    name: str
    lines: list[int] | None = None
    classes: dict[str, list[str]] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def where(self, row: int) -> str:
        """A row in messages."""
        return place(self.name, row if self.lines is None else self.lines[row], self.lines is not None)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


def place(name: str, number: int, is_line: bool) -> str:
    """A line of a file, or a row of a table, in messages."""
    return f"{name}:{number}" if is_line else f"{name}, row {number}"


@dataclass(frozen=True)
class Source:
    """Where a table comes from.

    name: a file, a folder that `datasets` saved, `docstrings` (embedded), or a name on the hub; the latter two kinds of data
    set with `:SPLIT`. subset: the hub's configuration. header: whether the first line of CSV names columns, else they are 0, 1, ...
    quoting: of CSV: `minimal`, a field may stand in double quotes, or `none`, quotes are letters; None: `none` for .tsv, and
    `minimal` for .csv.
    """

    name: str
    split: str = "train"
    subset: str | None = None
    header: bool = True
    delimiter: str | None = None
    quoting: str | None = None

    @staticmethod
    def parse(
        text: str,
        split: str = "train",
        subset: str | None = None,
        header: bool = True,
        delimiter: str | None = None,
        quoting: str | None = None,
    ) -> Source:
        """From `NAME` or `NAME:SPLIT`; a file has no split."""
        name, colon, wanted = text.partition(":")
        if colon and not Path(text).exists() and "/" not in wanted and not wanted.endswith(SUFFIXES):
            return Source(name, wanted, subset, header, delimiter, quoting)
        return Source(text, split, subset, header, delimiter, quoting)

    @property
    def is_file(self) -> bool:
        """Whether it is read as one file, by its suffix."""
        return Path(self.name).is_file() or (self.name.endswith(SUFFIXES) and not Path(self.name).is_dir())

    def files(self) -> tuple[Path, ...]:
        """What the table's content is, on disk: its digest tells whether it has changed.

        Raises:
            DataError: no such file or data set.
        """
        path = Path(self.name)
        if self.name == EMBEDDED:
            with resources.as_file(resources.files("lockstep.recipes").joinpath(f"{EMBEDDED}.csv")) as embedded:
                return (embedded,)
        if self.is_file:
            if not path.is_file():
                near = (
                    did_you_mean(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
                )
                raise DataError(
                    "no such file",
                    where=self.name,
                    remedy=f"{near}Give a file ({', '.join(SUFFIXES)}), a saved data set, or a name on the hub",
                )
            return (path,)
        found = tuple(sorted(Path(one["filename"]) for one in _data_set(self).cache_files))
        if not found:
            raise DataError(
                "has no files on disk, by which a change could be seen",
                where=self.name,
                remedy="write it with `Dataset.save_to_disk` first",
            )
        return found

    def read(self) -> Table:
        """All rows.

        Raises:
            DataError: not readable, ragged, not UTF-8, of no known kind; names file and line, or byte.
        """
        if self.name == EMBEDDED:
            return replace(_read_csv(self.files()[0], True, ",", quoted=True), name=EMBEDDED)
        if not self.is_file:
            return _from_data_set(_data_set(self), f"{self.name}:{self.split}")
        (path,) = self.files()
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            return _read_parquet(path)
        if suffix in (".jsonl", ".ndjson"):
            return _read_json_lines(path)
        if suffix == ".json":
            return _read_json(path)
        if suffix == ".txt":
            lines = lines_of(read_text(path))
            if not lines:
                raise DataError("no rows", where=self.name, remedy="the file needs one text per line")
            return Table({"text": lines}, self.name, list(range(1, len(lines) + 1)))
        if suffix in (".csv", ".tsv"):
            is_tsv = suffix == ".tsv"
            quoting = self.quoting or ("none" if is_tsv else "minimal")
            return _read_csv(path, self.header, self.delimiter or ("\t" if is_tsv else ","), quoting == "minimal")
        raise DataError(f"unknown suffix {suffix!r}", where=self.name, remedy=f"known are {', '.join(SUFFIXES)}")


def lines_of(text: str) -> list[str]:
    """Lines as editors count them; `str.splitlines` would also cut at form feeds and Unicode's separators."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _read_csv(path: Path, header: bool, delimiter: str, quoted: bool) -> Table:
    csv.field_size_limit(sys.maxsize)
    quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True, quoting=quoting)
    rows: list[list[str]] = []
    lines: list[int] = []
    names: list[str] | None = None
    begins = 1
    try:
        for row in reader:
            at, begins = begins, reader.line_num + 1
            if not row:
                continue  # an empty line
            if names is None:
                names = [name.strip() for name in row] if header else [str(number) for number in range(len(row))]
                if header:
                    _check_names(names, f"{path}:{at}", delimiter)
                    continue
            if len(row) != len(names):
                what = f"{len(row)} fields where {'the header has' if header else 'the first line has'} {len(names)} ({', '.join(names)})"
                raise DataError(what, where=f"{path}:{at}", remedy=_of_ragged(row, quoted))
            rows.append(row)
            lines.append(at)
    except csv.Error as error:
        remedy = f'a quoted field must end with " before a delimiter or a line break; {_LETTERS}'
        raise DataError(f"not CSV: {error}", where=f"{path}:{begins}", remedy=remedy) from error
    if not rows:
        raise DataError(
            "no rows",
            where=str(path),
            remedy="the file needs one row per sample" + (" below its header" if header else ""),
        )
    columns = {name: list(values) for name, values in zip(names or [], zip(*rows, strict=True), strict=True)}
    return Table(columns, str(path), lines, told=() if quoted else _told_of_quotes(rows))


def _of_ragged(row: Sequence[str], quoted: bool) -> str:
    """What to do about a row of another number of fields."""
    if not quoted:
        return 'no text may hold the delimiter or a line break; where they stand in "quotes", set task.quoting=minimal'
    remedy = 'put texts that hold the delimiter or line breaks into "quotes", and double quotes in them'
    has_quotes = any('"' in field or "\n" in field for field in row)
    return f"{remedy}; {_LETTERS}" if has_quotes else remedy


def _told_of_quotes(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A word on fields that look quoted where quotes are letters: all that have quotes are as a writer of CSV quotes them."""
    with_quotes = [field for row in rows for field in row if '"' in field]
    quoted = [field for field in with_quotes if len(field) > 1 and field[0] == field[-1] == '"']
    if not quoted or len(quoted) < len(with_quotes) or any('"' in field[1:-1].replace('""', "") for field in quoted):
        return ()
    what = f'{len(quoted):,} fields stand in "quotes", which are read as part of them'
    return (f"{what}: if they enclose the fields, set task.quoting=minimal",)


def _check_names(names: Sequence[str], where: str, delimiter: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"the header has {', '.join(map(repr, twice))} more than once",
            where=where,
            remedy="rename columns, or set task.header=false",
        )
    other = next((one for one in ";\t,|" if one != delimiter and one in names[0]), None)
    if len(names) == 1 and other:
        hint = "'\\t'" if other == "\t" else repr(other)
        raise DataError(
            f"one column only, {names[0]!r}", where=where, remedy=f"the delimiter may be {hint}: set task.delimiter"
        )


def _read_json_lines(path: Path) -> Table:
    rows, lines = [], []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"not JSON: {error}", where=f"{path}:{number}", remedy="write one JSON object per line"
            ) from None
        lines.append(number)
    return _from_objects(rows, path, lines)


def _read_json(path: Path) -> Table:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise DataError(
            f"not a list of objects: {error}", where=str(path), remedy='write [{"text": ..., "label": ...}, ...]'
        ) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under another suffix
            return _read_json_lines(path)
        raise DataError(
            f"not JSON: {error}",
            where=f"{path}:{error.lineno}",
            remedy="write a list of objects, or one object per line in a .jsonl",
        ) from None
    if isinstance(value, Mapping):
        lists = [
            name for name, item in value.items() if isinstance(item, list) and item and isinstance(item[0], Mapping)
        ]
        if len(lists) != 1:
            raise DataError(
                "neither a list of objects nor an object with one",
                where=str(path),
                remedy='write [{"text": ..., "label": ...}, ...]',
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise DataError(
            f"a JSON {type(value).__name__}, not a list of objects",
            where=str(path),
            remedy='write [{"text": ..., "label": ...}, ...]',
        )
    return _from_objects(value, path, None)


def _from_objects(rows: list[Any], path: Path, lines: list[int] | None) -> Table:
    if not rows:
        raise DataError("no rows", where=str(path), remedy="the file needs one object per sample")
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            where = place(str(path), number if lines is None else lines[number], lines is not None)
            raise DataError(
                f"a JSON {type(row).__name__}, not an object",
                where=where,
                remedy='write objects such as {"text": ..., "label": ...}',
            )
        names.update(dict.fromkeys(row))
    return Table({name: [row.get(name) for row in rows] for name in names}, str(path), lines)


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "pyarrow is needed to read Parquet", where=str(path), remedy="pip install 'torch-lockstep[text]'"
        ) from error
    try:
        columns = pyarrow.parquet.read_table(path).to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"not readable as Parquet: {error}", where=str(path), remedy="it is damaged, or of another format"
        ) from error
    return Table(columns, str(path))


def _data_set(source: Source) -> Any:
    """A `datasets.Dataset`: from a folder that was saved, or from the hub (or its cache, offline)."""
    try:
        import datasets
    except ImportError as error:
        remedy = "pip install 'torch-lockstep[text]', or give a CSV, TSV or JSON file"
        raise DataError("`datasets` is needed to read this data set", where=source.name, remedy=remedy) from error
    datasets.disable_progress_bars()
    if Path(source.name).is_dir():
        try:
            found = datasets.load_from_disk(source.name)
        except Exception as error:
            inside = [one.name for one in sorted(Path(source.name).iterdir()) if one.suffix in SUFFIXES]
            remedy = (
                f"give one of its files: {', '.join(inside)}"
                if inside
                else "make one with `Dataset.save_to_disk`, or give a file"
            )
            raise DataError(
                f"not a folder that `datasets` saved: {_first_line(error)}", where=source.name, remedy=remedy
            ) from error
        if not isinstance(found, Mapping):
            return found
        if source.split not in found:
            raise DataError(
                f"there is no split {source.split!r}",
                where=source.name,
                remedy=f"write {source.name}:SPLIT with one of: {', '.join(found)}",
            )
        return found[source.split]
    try:
        return datasets.load_dataset(source.name, source.subset, split=source.split)
    except Exception as error:
        what = f"neither a file nor a folder here, nor a data set that the Hugging Face hub gives now: {_first_line(error)}"
        remedy = "check the path or the name; offline, give a file or a folder made by `Dataset.save_to_disk` (looked in the hub's cache at "
        raise DataError(
            what, where=f"{source.name}:{source.split}", remedy=f"{remedy}{datasets.config.HF_DATASETS_CACHE})"
        ) from error


def _from_data_set(found: Any, name: str) -> Table:
    classes = {column: list(kind.names) for column, kind in found.features.items() if getattr(kind, "names", None)}
    for column, kind in found.features.items():
        inner = getattr(getattr(kind, "feature", None), "names", None)  # a list of class numbers
        if inner:
            classes[column] = list(inner)
    return Table(found.to_dict(), name, None, classes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# ---- which columns


_TEXT = (
    "text",
    "sentence",
    "content",
    "review",
    "comment",
    "utterance",
    "query",
    "question",
    "document",
    "body",
    "message",
    "tweet",
)
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
)
_LABEL = ("label", "labels", "category", "class", "target", "intent", "topic", "sentiment")


@dataclass(frozen=True)
class Chosen:
    """Names of the columns: texts (joined with a space where several), the second text of a pair, the label."""

    text: tuple[str, ...]
    pair: str | None
    label: str | None


def choose(
    table: Table,
    where: str,
    text: str | int | Sequence[str | int] | None,
    pair: str | int | None,
    label: str | int | None,
    needs_label: bool = True,
) -> Chosen:
    """The columns as given, else those with a usual name; case does not count.

    Raises:
        DataError: no such column, or none or several with a usual name; lists what there is.
    """
    names = list(table.columns)
    given = [text] if isinstance(text, str | int) else list(text or [])
    texts = tuple(_named(one, names, "text", where) for one in given)
    second = None if pair is None else _named(pair, names, "pair", where)
    target: str | None = None
    if label is not None and (
        needs_label or str(label) in names or (isinstance(label, int) and 0 <= label < len(names) > 1)
    ):
        target = _named(label, names, "label", where)
    elif label is None:
        target = _usual(
            _LABEL, [name for name in names if name not in (*texts, second)], "label", where, names, needs_label
        )
    if not texts:
        left = [name for name in names if name not in (second, target)]
        lower = {name.lower(): name for name in left}
        known = next((one for one in _PAIRS if second is None and one[0] in lower and one[1] in lower), None)
        if known:
            texts, second = (lower[known[0]],), lower[known[1]]
        elif len(left) == 1 and (target is not None or not needs_label):
            texts = (left[0],)
        else:
            found = _usual(_TEXT, left, "text", where, names, True)
            assert found is not None
            texts = (found,)
    return Chosen(texts, second, target)


def _named(wanted: str | int, names: Sequence[str], role: str, where: str) -> str:
    if str(wanted) in names:
        return str(wanted)
    if isinstance(wanted, int) and 0 <= wanted < len(names):
        return names[wanted]
    hint = did_you_mean(wanted, names)
    raise DataError(f"there is no column {wanted!r}", where=where, remedy=f"{hint}{_what_there_is(role, names)}")


def _usual(
    known: Sequence[str], left: Sequence[str], role: str, where: str, names: Sequence[str], needed: bool
) -> str | None:
    found = [name for name in left if name.lower() in known]
    exact = [
        name for name in found if name.lower() == known[0]
    ]  # `label` beside `label_text` or `category` is what is meant
    found = exact or found
    if len(found) == 1:
        return found[0]
    if not found and not needed:
        return None
    what = (
        f"which column is the {role}? {', '.join(found)} all might be" if found else f"no column looks like the {role}"
    )
    raise DataError(what, where=where, remedy=_what_there_is(role, names))


def _what_there_is(role: str, names: Sequence[str]) -> str:
    listed = ", ".join(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..." for name in names)
    rows = (
        ""
        if all(name.isidentifier() or name.isdigit() for name in names)
        else "; if these are no names but a first row, set task.header=false"
    )
    return f"set task.columns.{role} to one of: {listed}{rows}"
