"""The charts of a report and their data, thinned to as many points as a chart can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep_lab.report.metrics_file import LoggedMetrics, Numbers, Series

POINTS = 240_000  # values in all charts of a page together: about 2 MB of JSON
BUCKETS = 1000  # of a line: a chart has fewer pixels than twice as many
_TRAIN_COLOR, _EVAL_COLOR = 0, 1
_LINES = 16  # in one chart
_CHARTS = 40
_DIGITS = 6
_TRAINING = {
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm, before clipping",
    "train/samples_per_s": "Throughput (samples/s)",
    "train/wait_share": "Share of the time spent waiting for data",
    "memory/peak_mb": "Memory by rank: largest use so far (MiB)",
}
COUNTS = ("train/skipped", "data/bad", "eval/bad")  # shown unless they are always zero
_NO_CURVE = ("time_s", "epoch", "eval/samples")


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    series: Series
    color: int = 0
    """The number of its colour on the page. A run, and training and evaluation, keep theirs in all charts."""


@dataclass
class Chart:
    """Lines that share a chart."""

    title: str
    lines: list[Line] = field(default_factory=list)
    left_out: int = 0
    """Lines that do not fit into the chart."""
    thinned: bool = False
    """Whether the chart shows the minimum and maximum of neighbouring entries instead of every entry."""

    def facts(self) -> list[tuple[str, list[float | None]]]:
        """For each line its first, minimum, maximum and last finite value."""
        return [(line.label, _facts(line.series.values)) for line in self.lines]


def of_run(metrics: LoggedMetrics, sets: Sequence[str] = ()) -> list[Chart]:
    """The charts of a run.

    Args:
        sets: names of evaluation data: `eval/SET/accuracy` of all sets share a chart.
    """
    charts: dict[str, Chart] = {}
    for name, series in metrics.series.items():
        title = title_of(name, sets)
        if title is None or not np.isfinite(series.values).any() or (title in COUNTS and not np.any(series.values > 0)):
            continue
        lines = charts.setdefault(title, Chart(title)).lines
        lines.append(Line(name, series, _free_color(name, [line.color for line in lines])))
    ordered = [charts.pop(title) for title in ["Loss", *_TRAINING.values()] if title in charts]
    results = [chart for title, chart in charts.items() if title.startswith("eval/")]
    others = [chart for title, chart in charts.items() if not title.startswith("eval/")]
    return [_limited(chart) for chart in [*ordered[:1], *results, *ordered[1:], *others][:_CHARTS]]


def first(shown: Sequence[Chart]) -> int:
    """How many charts a reader needs first: the loss, up to four results of evaluations, and the learning rate.

    Args:
        shown: the charts of a run, as `of_run` orders them.
    """
    titles = [chart.title for chart in shown]
    count = 1 + sum(title.startswith("eval/") for title in titles[1:5])
    return count + (titles[count : count + 1] == [_TRAINING["train/lr"]])


def of_runs(runs: Mapping[str, LoggedMetrics]) -> list[Chart]:
    """Charts in which each run is a line; a chart for each name that is a curve in any run."""
    charts: dict[str, Chart] = {}
    for name in dict.fromkeys(name for metrics in runs.values() for name in metrics.series):
        if title_of(name, ()) is None or "/rank" in name or (name.startswith("memory/") and name != "memory/peak_mb"):
            continue
        for number, (label, metrics) in enumerate(runs.items()):
            series = metrics.series.get(name)
            if series is not None and np.isfinite(series.values).any() and (name not in COUNTS or series.values.any()):
                charts.setdefault(name, Chart(name)).lines.append(Line(label, series, number))
    order = sorted(charts.values(), key=lambda chart: (not chart.title.endswith("loss"), chart.title[:5] != "eval/"))
    return [_limited(chart) for chart in order[:_CHARTS]]


def _free_color(name: str, taken: Sequence[int]) -> int:
    """The first colour for training, the second for evaluation; further lines of a chart get the next free one."""
    first = _EVAL_COLOR if name.startswith("eval/") else _TRAIN_COLOR
    others = (color for color in itertools.count() if color not in (_TRAIN_COLOR, _EVAL_COLOR))
    return next(color for color in (first, *itertools.islice(others, len(taken) + 1)) if color not in taken)


def title_of(name: str, sets: Sequence[str]) -> str | None:
    """The title of the chart that shows a name. None: no chart shows it."""
    parts = name.split("/")
    if name in _NO_CURVE or parts[-1] == "samples":
        return None
    if parts[0] == "eval" and len(parts) > 2 and parts[1] in sets:
        parts.pop(1)
    if parts[0] in ("train", "eval") and parts[1:2] == ["loss"]:
        return "Loss"
    start = "/".join(parts[:2])
    if start in _TRAINING:
        return _TRAINING[start]
    if parts[0] == "memory":
        return "Memory of evaluations (MiB)" if "evaluation" in name and "/rank" not in name else None
    return start if len(parts) > 2 else "/".join(parts)


def data(charts: Sequence[Chart], points: int = POINTS) -> list[dict[str, Any]]:
    """The charts as values for JSON, thinned to about `points` values at most."""
    lines = sum(len(chart.lines) for chart in charts)
    buckets = max(50, min(BUCKETS, points // (2 * max(lines, 1))))
    return [_data(chart, buckets) for chart in charts]


def _data(chart: Chart, buckets: int) -> dict[str, Any]:
    """Lines with the same steps share a table: [steps, values of a line, values of another line, ...]."""
    tables: list[tuple[Numbers, list[Line]]] = []
    for line in chart.lines:
        steps = line.series.steps
        table = next((lines for known, lines in tables if np.array_equal(known, steps)), None)
        if table is None:
            tables.append((steps, [line]))
        else:
            table.append(line)
    shown = []
    for steps, lines in tables:
        chart.thinned |= len(steps) > 2 * buckets
        places, *columns = thin(steps, [line.series.values for line in lines], buckets)
        values_of_lines = [[_rounded(value) for value in column] for column in columns]
        shown.append([[_rounded(value, digits=16) for value in places], *values_of_lines])
    labels = [line.label for _, lines in tables for line in lines]
    colors = [line.color for _, lines in tables for line in lines]
    has_log = bool(np.nanmin(np.concatenate([line.series.values for line in chart.lines])) > 0)
    return {"title": chart.title, "labels": labels, "colors": colors, "tables": shown, "log": has_log}


def thin(steps: Numbers, columns: Sequence[Numbers], buckets: int) -> list[Numbers]:
    """The steps and columns, with two points for each of `buckets` ranges of entries: the minimum and the maximum.

    They keep their order, at the first and the last step of the range. So no spike is lost, and
    lines that are logged together stay together. Up to 2 * `buckets` entries stay as they are.
    """
    count = len(steps)
    if count <= 2 * buckets:
        return [steps, *columns]
    size = -(-count // buckets)
    firsts = np.arange(0, count, size)
    lasts = np.minimum(firsts + size, count) - 1
    places = np.stack([steps[firsts], steps[lasts]], axis=1).ravel()
    thinned = []
    for column in columns:
        padded = np.full(len(firsts) * size, np.nan)
        padded[:count] = column
        blocks = padded.reshape(-1, size)
        low = np.argmin(np.where(np.isnan(blocks), np.inf, blocks), axis=1)
        high = np.argmax(np.where(np.isnan(blocks), -np.inf, blocks), axis=1)
        rows = np.arange(len(blocks))
        ends = np.stack([blocks[rows, np.minimum(low, high)], blocks[rows, np.maximum(low, high)]], axis=1)
        thinned.append(ends.ravel())
    kept = np.append(np.diff(places) > 0, True)  # a last range of one entry
    return [places[kept], *(column[kept] for column in thinned)]


def _limited(chart: Chart) -> Chart:
    chart.left_out = max(0, len(chart.lines) - _LINES)
    chart.lines = chart.lines[:_LINES]
    return chart


def _facts(values: Numbers) -> list[float | None]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return [None] * 4
    return [float(finite[0]), float(finite.min()), float(finite.max()), float(finite[-1])]


def _rounded(value: float, digits: int = _DIGITS) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 2**53 else short
