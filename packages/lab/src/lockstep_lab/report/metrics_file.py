"""The numbers in metrics.jsonl as series over steps, even from a file that is damaged or still being written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_BLOCK = 4096  # rows that become one array: Python numbers take ten times the memory
_LARGEST_STEP = 2**53  # larger numbers are not exact as floats


@dataclass(frozen=True)
class Series:
    """The values of one name over the step."""

    steps: Numbers
    """Strictly increasing."""
    values: Numbers
    """NaN where the log has null: the number was not finite."""


@dataclass
class LoggedMetrics:
    """The content of metrics.jsonl."""

    series: dict[str, Series] = field(default_factory=dict)
    """By name, in order of first appearance. `step` is left out."""
    entries: int = 0
    """Number of readable lines."""
    damaged: int = 0
    """Number of unreadable lines. The last line of a running run may be half written."""

    @property
    def last_step(self) -> int | None:
        """The step of the last entry. None: there is no entry."""
        ends = [series.steps[-1] for series in self.series.values() if len(series.steps)]
        return int(max(ends)) if ends else None

    def last(self, name: str) -> float | None:
        """The last finite value of a name. None: there is none."""
        series = self.series.get(name)
        if series is None:
            return None
        finite = series.values[np.isfinite(series.values)]
        return float(finite[-1]) if len(finite) else None

    def at(self, name: str, step: float) -> float | None:
        """The value of a name in the entry of `step`. None: there is none, or it is not finite."""
        series = self.series.get(name)
        if series is None:
            return None
        place = int(np.searchsorted(series.steps, step))
        if place == len(series.steps) or series.steps[place] != step or not math.isfinite(series.values[place]):
            return None
        return float(series.values[place])

    def restarts(self) -> list[tuple[int, int]]:
        """Where `time_s` decreases: (step of the previous entry, step of the entry)."""
        clock = self.series.get("time_s")
        if clock is None:
            return []
        back = np.flatnonzero(np.diff(clock.values) < 0)
        return [(int(clock.steps[place]), int(clock.steps[place + 1])) for place in back]

    def trained_s(self, later_starts: Sequence[int] = ()) -> float:
        """Seconds of all starts together, up to their last entries. Repeated steps count once.

        Args:
            later_starts: the steps from which the second and later starts resumed. After such a step `time_s` starts
            again, but it need not decrease: the first entry of a start may come later than the last remaining entry
            of the previous start.
        """
        clock = self.series.get("time_s")
        if clock is None or not len(clock.values):
            return 0.0
        ends = np.append(np.diff(clock.values) < 0, True)
        last = np.searchsorted(clock.steps, np.asarray(later_starts, dtype=np.float64), side="right") - 1
        ends[last[last >= 0]] = True
        return float(np.nansum(clock.values[ends]))


class _Rows:
    """The entries with the same names, in blocks."""

    def __init__(self) -> None:
        self.blocks: list[Numbers] = []
        self.open: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        self.open.append(row)
        if len(self.open) == _BLOCK:
            self.close()

    def close(self) -> None:
        """Make an array of the rows that are not in one yet."""
        if self.open:
            self.blocks.append(_as_numbers(self.open))
            self.open = []

    def table(self) -> Numbers:
        """All rows (rows, names)."""
        self.close()
        return np.concatenate(self.blocks)


def read(path: Path) -> LoggedMetrics:
    """The series in a file of entries. A file that is missing or unreadable has none."""
    metrics = LoggedMetrics()
    groups: dict[tuple[str, ...], _Rows] = {}
    try:
        with path.open("rb") as file:
            for row in _rows(file, metrics):
                # The position in the file decides which of two entries of the same step is later.
                groups.setdefault(tuple(row), _Rows()).add((metrics.entries, *row.values()))
    except OSError:
        return metrics
    tables = {names: rows.table() for names, rows in groups.items()}
    for name in dict.fromkeys(name for names in tables for name in names):
        if name != "step":
            metrics.series[name] = _joined(name, tables)
    return metrics


def _rows(lines: Iterable[bytes], metrics: LoggedMetrics) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line.decode())
            is_entry = isinstance(row["step"], int | float) and 0 <= row["step"] <= _LARGEST_STEP
        except (ValueError, KeyError, TypeError, RecursionError):
            is_entry = False
        if is_entry:
            metrics.entries += 1
            yield row
        elif line.strip():
            metrics.damaged += 1


def _joined(name: str, tables: dict[tuple[str, ...], Numbers]) -> Series:
    """The series of a name, from all groups that have it, by step. Of equal steps, the last entry is kept."""
    parts = [
        table[:, [0, 1 + names.index("step"), 1 + names.index(name)]]
        for names, table in tables.items()
        if name in names
    ]
    rows = np.concatenate(parts)
    if len(parts) > 1 or np.any(np.diff(rows[:, 1]) <= 0):
        rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
        rows = rows[np.append(np.diff(rows[:, 1]) > 0, True)]
    return Series(np.ascontiguousarray(rows[:, 1]), np.ascontiguousarray(rows[:, 2]))


def _as_numbers(rows: list[tuple[Any, ...]]) -> Numbers:
    try:
        table = np.array(rows, dtype=np.float64)
        if table.ndim == 2:
            table[~np.isfinite(table)] = np.nan
            return table
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([[_number(value) for value in row] for row in rows])


def _number(value: Any) -> float:
    """A number; NaN for anything else, or if it is not finite."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
