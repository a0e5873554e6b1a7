"""Yes/no labels of a table, some of them unknown, and questions about an event within several times."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError, did_you_mean
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.table import Table

_HORIZON = re.compile(
    r"^(?P<event>.*?)[_ -]?(?P<time>\d+(?:\.\d+)?)[_ -]?(?P<unit>y|yr|yrs|years?|m|months?|d|days?)$", re.I
)
_PER_YEAR = {"y": 1, "m": 12, "d": 365}
_VALUES = {"0": 0.0, "0.0": 0.0, "1": 1.0, "1.0": 1.0, "": np.nan}
_SHOWN = 5


def label_columns(labels: Sequence[str] | None, table: Table) -> list[str]:
    """The columns that contain labels.

    Args:
        labels: names, or patterns such as `lung_mets_*`. None: the columns that end in a time, such as `death_5y`.

    Raises:
        DataError: no column has such a name.
    """
    names = list(table.columns)
    if labels is None:
        found = [name for name in names if (match := _HORIZON.match(name)) and match["event"]]
        if not found:
            remedy = f"set task.labels to some of: {', '.join(names)}"
            raise DataError("no column has the name of a label, such as `death_5y`", where=table.name, remedy=remedy)
        return found
    chosen: dict[str, None] = {}
    for label in labels:
        found = [label] if label in names else fnmatch.filter(names, label)
        if not found:
            remedy = f"{did_you_mean(label, names)}Set task.labels to some of: {', '.join(names)}"
            raise DataError(f"there is no label column {label!r}", where=table.name, remedy=remedy)
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def label_values(table: Table, questions: Sequence[str]) -> npt.NDArray[np.float32]:
    """float32 (rows, questions): 1, 0 or NaN (blank).

    Raises:
        DataError: a label is something else. The error names line and column.
    """
    values = np.full((len(table), len(questions)), np.nan, dtype=np.float32)
    for place, question in enumerate(questions):
        for row, value in enumerate(table.columns[question]):
            text = "" if value is None or value != value else str(value).strip()
            text = {"True": "1", "False": "0"}.get(text, text) if isinstance(value, bool) else text
            if text not in _VALUES:
                what = f"the label in column {question!r} is {value!r}, not 0, 1 or blank"
                remedy = "write 1 (yes), 0 (no), or nothing (unknown); or remove the column from task.labels"
                raise DataError(what, where=table.where(row), remedy=remedy)
            values[row, place] = _VALUES[text]
    return values


def horizons(questions: Sequence[str]) -> dict[str, list[tuple[float, int]]]:
    """The questions about the same event within several times, such as `death_1y` and `death_3y`.

    Times are numbers with y (years), m (months) or d (days) at the end of the name.

    Returns:
        By event, its times in years with the indices of the questions, ascending. Events with one time are included;
        questions without a time are not.
    """
    groups: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for place, question in enumerate(questions):
        if match := _HORIZON.match(question):
            groups[match["event"]].append((float(match["time"]) / _PER_YEAR[match["unit"][0].lower()], place))
    return {event: sorted(times) for event, times in groups.items()}


def check_horizons(values: Array, questions: Sequence[str], table: Table) -> None:
    """Check that an event that happened within one time also happened within every longer time.

    Raises:
        DataError: a row contradicts this. The error names rows and columns.
    """
    faults = []
    for times in horizons(questions).values():
        for (early, event), (late, other) in itertools.permutations(times, 2):
            if early <= late:
                rows = np.flatnonzero((values[:, event] == 1) & (values[:, other] == 0))
                faults += [(int(row), questions[event], questions[other]) for row in rows]
    if faults:
        row, early_name, late_name = min(faults)
        rows_ = sorted({fault[0] for fault in faults})
        more = f" ({len(rows_)} such rows: {', '.join(map(table.where, rows_[:_SHOWN]))})" if len(rows_) > 1 else ""
        what = (
            f"{early_name} is 1 but {late_name} is 0: an event within the shorter time is also within the longer "
            f"one{more}"
        )
        raise DataError(what, where=table.where(row), remedy="correct the labels; leave unknown labels blank")


def one_sided(values: Array, questions: Sequence[str]) -> list[str]:
    """A note on questions with an answer that never occurs."""
    notes = []
    for answer, name in ((1, "yes"), (0, "no")):
        lacking = [
            question for question, column in zip(questions, values.T, strict=True) if not (column == answer).any()
        ]
        if lacking:
            notes.append(f"no volume has the answer {name} to {', '.join(lacking)}")
    return notes
