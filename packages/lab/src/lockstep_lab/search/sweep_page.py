"""The results of a sweep: a table for people, an HTML page, and the config of the best trial."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.configs import config_file
from lockstep.core import atomic
from lockstep.drawing.markup import Markup, element
from lockstep_lab.report import charts, metrics_file, page
from lockstep_lab.report.charts import Line
from lockstep_lab.search import study
from lockstep_lab.search.chart import BLUE, GREEN, PALE, Axis, SweepChart
from lockstep_lab.search.grid import Range, overrides_of
from lockstep_lab.search.study import DONE, PRUNED, TrialRecord
from lockstep_lab.search.sweep import SweepRequest

PAGE, BEST = "sweep.html", "best.yaml"
_SHOWN_CURVES = 16


@dataclass(frozen=True)
class Ranked:
    """The trials of a sweep, the best first."""

    order: SweepRequest
    records: list[TrialRecord]
    steps: dict[int, int]
    """The last logged step of each trial."""

    @property
    def best(self) -> TrialRecord | None:
        """The best finished trial. None: there is none."""
        return self.records[0] if self.records and self.records[0].state == DONE else None

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The titles and the cells of the table."""
        keys, metric = list(self.order.grid.keys), self.order.grid.metric
        titles = ["trial", *keys, metric, "steps", "state"]
        rows = []
        for one in self.records:
            values = [_short(one.values.get(key)) for key in keys]
            result = shown(one)
            cell = "-" if result is None else f"{result:.4g}"
            rows.append([f"{one.number:04}", *values, cell, str(self.steps.get(one.number, 0)), one.state])
        return titles, rows


def shown(record: TrialRecord) -> float | None:
    """The result of a trial that a table shows: of an unfinished trial, its last. None: there is none."""
    if record.state == DONE:
        return record.value
    return record.results[-1] if record.results else None


def ranked(order: SweepRequest, found: study.Study) -> Ranked:
    """The trials of a sweep: finished ones by their result, then pruned ones, then the others."""
    sign = -1.0 if order.grid.direction == "max" else 1.0
    states = {DONE: 0, PRUNED: 1}

    def place(record: TrialRecord) -> tuple[int, float, int]:
        value = shown(record)
        return states.get(record.state, 2), float("inf") if value is None else sign * value, record.number

    records = sorted(found.records(), key=place)
    metrics = {one.number: metrics_file.read(order.folder_of(one.number) / "metrics.jsonl") for one in records}
    return Ranked(order, records, {number: one.last_step or 0 for number, one in metrics.items()})


def table(results: Ranked) -> str:
    """The table for the terminal, with the errors of trials that failed."""
    titles, rows = results.rows()
    widths = [max(len(row[place]) for row in [titles, *rows]) for place in range(len(titles))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
    return "\n".join(lines)


def command(results: Ranked) -> str:
    """The command that trains the best. A preset overrides a file, but not keys of the command line."""
    order, words = results.order, list[str]()
    if order.preset is not None and results.best is not None:
        words = [*order.overrides, *overrides_of(results.best.values), "--preset", order.preset]
    return shlex.join(["lockstep", "train", str(order.folder / BEST), *words, "--run-dir", f"{order.folder}-best"])


def write(results: Ranked) -> list[Path]:
    """Write the page and, if there is a best trial, its config. Returns the files."""
    order, best = results.order, results.best
    files = [order.folder / PAGE]
    atomic.write_text(files[0], html(results))
    if best is not None:
        keys = [*order.overrides, *overrides_of(best.values)]
        config = config_file.to_yaml(config_file.load(order.target, keys))
        about = [f"# The best of {len(results.records)} trials: {order.folder_of(best.number).name}, with"]
        about[0] += f" {order.grid.metric} = {best.value:.6g}."
        about.append(f"# {' '.join(shlex.quote(key) for key in keys)}")
        files.append(order.folder / BEST)
        atomic.write_text(files[-1], "\n".join([*about, config.rstrip("\n"), f"# {command(results)}", ""]))
    return files


def html(results: Ranked) -> str:
    """The page of a sweep."""
    order, best = results.order, results.best
    titles, rows = results.rows()
    grid = order.grid
    counted = {state: sum(one.state == state for one in results.records) for state in (DONE, PRUNED, study.FAILED)}
    facts = [
        ("trained", order.target),
        ("metric", f"{grid.metric}, {grid.direction}"),
        ("sampler", grid.sampler),
        ("pruner", grid.pruner),
        ("trials", ", ".join(f"{count} {state}" for state, count in counted.items() if count) or "none"),
    ]
    body: list[Markup] = [element("h1", f"Sweep {order.folder.name}"), page.facts(facts)]
    if best is not None:
        about = f"{order.folder_of(best.number).name}: {grid.metric} {page.number_text(best.value)}, with "
        body.append(page.section("Best", element("p", about + " ".join(overrides_of(best.values)))))
        body.append(page.command(shlex.split(command(results))))
    body.append(page.section("Trials", page.table(titles, rows, "numbers", label="Trials")))
    scatters = [one.svg() for one in _scatters(results)]
    if scatters:
        legend = element("p", "Green: the best. Blue: done. Grey: pruned, at its last result.", class_="soft")
        body.append(page.section("By key", legend, scatters))
    drawn, data = page.figures(_curves(results))
    body += [page.section("Evaluations", drawn)] if data else []
    errors = [one for one in results.records if one.error]
    if errors:
        told = [page.folded(order.folder_of(one.number).name, page.code(one.error)) for one in errors]
        body.append(page.section("Failed", told))
    return page.document(f"Sweep {order.folder.name}", body, data)


def _scatters(results: Ranked) -> list[SweepChart]:
    """For each key, the result over its value."""
    grid, found = results.order.grid, [one for one in results.records if shown(one) is not None]
    drawn = []
    for key, values in grid.keys.items() if found else ():
        here, heights = [one.values[key] for one in found], [shown(one) or 0.0 for one in found]
        if isinstance(values, Range):
            axis, places = Axis(key, [values.low, values.high], log=values.log), here
        else:
            names = [_short(value) for value in values]
            places = [names.index(_short(value)) for value in here]
            axis = Axis(key, places, names=names)
        chart = SweepChart("", axis, Axis(grid.metric, heights), width=420, height=260)
        for place, height, one in reversed(list(zip(places, heights, found, strict=True))):
            colour = GREEN if one is results.best else BLUE if one.state == DONE else PALE
            chart.dots.append((place, height, colour))
        drawn.append(chart)
    return drawn


def _curves(results: Ranked) -> Sequence[charts.Chart]:
    """The metric over the steps, for the first trials of the table."""
    metric, lines = results.order.grid.metric, []
    for one in results.records:
        folder = results.order.folder_of(one.number)
        series = metrics_file.read(folder / "metrics.jsonl").series.get(metric)
        if series is not None and len(series.steps):
            lines.append(Line(folder.name, series))
    chart = charts.Chart(metric, lines[:_SHOWN_CURVES], left_out=max(0, len(lines) - _SHOWN_CURVES))
    return [chart] if lines else []


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
