"""Tables from CSV and TSV files, as spreadsheets and scripts write them."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.errors import DataError, number_of
from lockstep_recipes.tasks.readers.encodings import decoded

_DELIMITERS = (";", "\t", ",", "|")
_LETTERS = "if quotes are part of the texts, set task.quoting=none"
_SEPARATOR = re.compile(r'"?sep=(.)"?\r?\n?')
_SHOWN = 3


class CsvForm(NamedTuple):
    """How a file is written. The fields are those of `table.Source`, and `usual` is the delimiter of its suffix."""

    header: bool = True
    delimiter: str | None = None
    usual: str = ","
    quoted: bool = True
    missing: frozenset[str] = frozenset()


Columns = tuple[dict[str, list[Any]], list[int], tuple[str, ...]]
"""The values by column, the line of each row, and remarks about how the file was read."""


def read(path: Path, form: CsvForm) -> Columns:
    """The columns of a file.

    Raises:
        DataError: the file cannot be decoded, its rows have different lengths, or it has no rows. The error names the
            line.
    """
    csv.field_size_limit(sys.maxsize)
    text, encoding = decoded(path)
    notes = [] if encoding is None else [f"{path.name} has no byte order mark and is read as {encoding.upper()}"]
    text, skipped, delimiter = _without_separator(text)
    delimiter = form.delimiter or delimiter
    if skipped:
        notes.append(f"the first line of {path.name} only names the delimiter, and is not a row")
    if delimiter is None:
        delimiter = _delimiter_of(text, form) if form.header else form.usual
        if delimiter != form.usual:
            notes.append(
                f"the delimiter of {path.name} is {_shown(delimiter)}, according to its header; task.delimiter "
                "overrides it"
            )
    names, rows, lines, remarks = _rows(path, text, form, delimiter, skipped)
    if not rows:
        remedy = "the file needs one row per sample" + (" after its header" if form.header else "")
        raise DataError("no rows", where=str(path), remedy=remedy)
    notes += remarks if form.quoted else [*remarks, *_notes_on_quotes(rows)]
    columns = {
        name: list(values)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
        if name or any(map(str.strip, values))
    }
    notes += _without_missing(columns, form.missing)
    return columns, lines, tuple(notes)


def _rows(
    path: Path, text: str, form: CsvForm, delimiter: str, skipped: int
) -> tuple[list[str], list[list[str]], list[int], list[str]]:
    """The names of the columns, the rows, their lines, and remarks."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, quoting=_quoting(form))
    rows: list[list[str]] = []
    lines: list[int] = []
    names: list[str] | None = None
    repeated, longer, swallowed, begins = [], [], [], 1 + skipped
    try:
        for row in reader:
            at, begins = begins, reader.line_num + 1 + skipped
            if not row:
                continue  # an empty line
            if names is None:
                names = [name.strip() for name in row] if form.header else [str(number) for number in range(len(row))]
                if form.header:
                    _check_names(names, f"{path}:{at}", delimiter)
                    continue
            if form.header and len(row) > 1 and [field.strip() for field in row] == names:
                repeated.append(at)
                continue
            if len(row) > len(names) and not any(map(str.strip, row[len(names) :])):
                longer.append(at)
                row = row[: len(names)]
            if len(row) != len(names):
                first = "the header" if form.header else "the first line"
                what = f"{number_of(len(row), 'field')}, but {first} has {len(names)} ({', '.join(names)})"
                raise DataError(what, where=f"{path}:{at}", remedy=_remedy_for_ragged(row, form.quoted))
            if begins - at > _SHOWN and _swallows(row, delimiter):
                swallowed.append(at)
            rows.append(row)
            lines.append(at)
    except csv.Error as error:
        remedy = f'a quoted field must end with " before a delimiter or a line break; {_LETTERS}'
        raise DataError(f"not CSV: {error}", where=f"{path}:{begins}", remedy=remedy) from error
    found = {
        "rows repeat the header and are left out": repeated,
        "rows end in delimiters without a value, which are ignored": longer,
        'rows have a quoted field that contains lines like rows: a " may be missing': swallowed,
    }
    remarks = [
        f"{path.name}: {len(places):,} {what}, the first in line {places[0]}"
        for what, places in found.items()
        if places
    ]
    return names or [], rows, lines, remarks


def _quoting(form: CsvForm) -> Any:
    return csv.QUOTE_MINIMAL if form.quoted else csv.QUOTE_NONE


def _without_separator(text: str) -> tuple[str, int, str | None]:
    """The text after a first line such as `sep=;`, which Excel writes, how many lines that is, and the delimiter."""
    first = text[: text.find("\n") + 1]
    match = _SEPARATOR.fullmatch(first)
    return (text[len(first) :], 1, match[1]) if match else (text, 0, None)


def _swallows(row: Sequence[str], delimiter: str) -> bool:
    """True if the inner lines of a field look like rows: they all have as many delimiters as a row."""
    inner = [field.split("\n")[1:-1] for field in row if field.count("\n") >= _SHOWN]
    return len(row) > 1 and any(all(line.count(delimiter) == len(row) - 1 for line in lines) for lines in inner)


def _without_missing(columns: dict[str, list[Any]], missing: frozenset[str]) -> list[str]:
    """Replace fields without a value by None, and report them by column."""
    found = {}
    for name, values in columns.items():
        counts = Counter(text for value in values if (text := value.strip()) in missing)
        if counts:
            columns[name] = [None if value.strip() in missing else value for value in values]
            found[name] = " and ".join(f"{text!r} ({count:,} times)" for text, count in counts.most_common(_SHOWN))
    if not found:
        return []
    shown = "; ".join(f"column {name!r}: {texts}" for name, texts in list(found.items())[:_SHOWN])
    return [f"read as missing: {shown}{'; ...' if len(found) > _SHOWN else ''}; task.missing=[] keeps them as values"]


def _delimiter_of(text: str, form: CsvForm) -> str:
    """The usual delimiter, unless it gives a single column and a different one splits the header into several."""

    def columns(letter: str) -> int:
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=letter, quoting=_quoting(form))
            return len(next((row for row in reader if row), []))
        except csv.Error:
            return 0

    return form.usual if columns(form.usual) != 1 else max((form.usual, *_DELIMITERS), key=columns)


def _shown(delimiter: str) -> str:
    return "a tab" if delimiter == "\t" else repr(delimiter)


def _remedy_for_ragged(row: Sequence[str], quoted: bool) -> str:
    """The remedy for a row with a different number of fields."""
    if not quoted:
        return (
            'texts must not contain the delimiter or a line break; if texts are in "quotes", set task.quoting=minimal'
        )
    remedy = 'put texts that contain the delimiter or line breaks into "quotes", and double the quotes in them'
    has_quotes = any('"' in field or "\n" in field for field in row)
    return f"{remedy}; {_LETTERS}" if has_quotes else remedy


def _notes_on_quotes(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A note if quotes were read as ordinary characters but seem to enclose fields: all fields with quotes look like
    those of a CSV writer."""
    with_quotes = [field for row in rows for field in row if '"' in field]
    quoted = [field for field in with_quotes if len(field) > 1 and field[0] == field[-1] == '"']
    if not quoted or len(quoted) < len(with_quotes) or any('"' in field[1:-1].replace('""', "") for field in quoted):
        return ()
    what = f'{number_of(len(quoted), "field")} in "quotes", which are read as part of the text'
    return (f"{what}: if the quotes only enclose the fields, set task.quoting=minimal",)


def _check_names(names: Sequence[str], where: str, delimiter: str) -> None:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        remedy = "rename columns, or set task.header=false"
        raise DataError(f"the header contains {', '.join(map(repr, twice))} more than once", where=where, remedy=remedy)
    other = next((letter for letter in _DELIMITERS if letter != delimiter and letter in names[0]), None)
    if len(names) == 1 and other:
        hint = "'\\t'" if other == "\t" else repr(other)
        remedy = f"the delimiter may be {hint}: set task.delimiter"
        raise DataError(f"there is only one column, {names[0]!r}", where=where, remedy=remedy)
