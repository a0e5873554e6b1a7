"""Evaluations: their results by step and by class, the tables that the task reports, and images."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.drawing.markup import Markup, element, shortened
from lockstep.parts import metric_arrays
from lockstep_lab.report.metrics_file import LoggedMetrics
from lockstep_lab.report.page import code, folded, number_text, table, time
from lockstep_lab.report.run import RunSummary, is_result

_ROWS, _COLUMNS, _CLASSES = 30, 10, 300
_REPORTS = 10
_CHANGES = 200  # characters of the changes to a config
_CELLS = 400  # of a matrix
_STEP = re.compile(r"-?step-(\d+)$")
_PNG = b"\x89PNG\r\n\x1a\n"


def parts(run: RunSummary, *, room: int) -> list[Markup]:
    """The section on evaluations.

    Args:
        room: bytes of all images.
    """
    names = [name for name in run.metrics.series if is_result(name)]
    content: list[Markup] = []
    if names:
        content += _by_step(run, [name for name in names if len(run.parts(name)) == 2])
        content += _by_class(run, [name for name in names if len(run.parts(name)) > 2])
    else:
        content.append(element("p", "Nothing was evaluated yet, or the run has no evaluation data.", class_="soft"))
    return [*content, *_of_checkpoints(run), *_reports(run), *_matrices(run), *_pictures(run, room)]


def _steps(metrics: LoggedMetrics, names: Sequence[str]) -> list[float]:
    """Steps of evaluations, the last first."""
    found = [metrics.series[name].steps for name in names]
    return sorted(np.unique(np.concatenate(found)).tolist(), reverse=True) if found else []


def _chosen_step(run: RunSummary) -> float | None:
    """The step of the best value of the metric that chooses the best checkpoint, whether or not one was saved there."""
    best = run.retention.best
    series = run.metrics.series.get(best[1]) if best else None
    if best is None or series is None or not np.isfinite(series.values).any():
        return None
    values = np.where(np.isfinite(series.values), series.values, np.nan)
    extreme = np.nanmin(values) if best[0] == "min" else np.nanmax(values)
    return float(series.steps[np.flatnonzero(values == extreme)[-1]])


def _by_step(run: RunSummary, names: Sequence[str]) -> list[Markup]:
    steps, best = _steps(run.metrics, names), _chosen_step(run)
    shown = steps[:_ROWS]
    if best is not None and best not in shown and best in steps:
        shown.append(best)
    chosen = run.retention.best[1] if run.retention.best else ""
    columns = sorted(names, key=lambda name: name != chosen)[:_COLUMNS]
    rows = []
    for step in shown:
        cells: list[str] = [number_text(run.metrics.at(name, step)) for name in columns]
        head: str = number_text(step)
        rows.append([element("span", f"{head} best", class_="best") if step == best else head, *cells])
    notes = [f"The last {_ROWS} of {len(steps):,} evaluations; the curves show all."] if len(steps) > _ROWS else []
    notes += [f"{len(names) - _COLUMNS} more results are only shown as curves."] if len(names) > _COLUMNS else []
    content = [table(("step", *columns), rows, "numbers", label="Evaluations")] if rows else []
    return [*content, *([element("p", " ".join(notes), class_="soft")] if notes else [])]


def _of_checkpoints(run: RunSummary) -> list[Markup]:
    """A table of the results of `lockstep evaluate`, the last first."""
    shown = run.evaluations[: -_ROWS - 1 : -1]
    names = [name for entry in shown for name in entry if name.startswith("eval/") and len(run.parts(name)) == 2]
    columns = list(dict.fromkeys(names))[:_COLUMNS]
    rows = []
    for entry in shown:
        changes = entry.get("changes")
        said = " ".join(map(str, changes)) if isinstance(changes, list) else ""
        cells = [number_text(entry.get(name)) for name in columns]
        rows.append([time(str(entry.get("at", ""))), f"{entry['step']:,}", shortened(said, _CHANGES), *cells])
    if not rows:
        return []
    title = "Results of lockstep evaluate"
    return [element("h3", title), table(("at", "step", "changes", *columns), rows, "numbers", label=title)]


def _by_class(run: RunSummary, names: Sequence[str]) -> list[Markup]:
    """A table for `eval/iou/CLASS` and the like, at the last evaluation and at the best."""
    steps = _steps(run.metrics, names)
    if not steps:
        return []
    content = []
    best = _chosen_step(run)
    for step in dict.fromkeys([steps[0], *([best] if best in steps else [])]):
        values: dict[str, dict[str, str]] = {}
        for name in names:
            member = "/".join(run.parts(name)[2:])
            family = name.removeprefix("eval/").removesuffix(f"/{member}")  # with the set, if there are several
            if (value := run.metrics.at(name, float(step or 0))) is not None:
                values.setdefault(member, {})[family] = number_text(value)
        families = list(dict.fromkeys(family for row in values.values() for family in row))[:_COLUMNS]
        rows = [[member, *(row.get(family, "-") for family in families)] for member, row in values.items()]
        which = "last" if step == steps[0] else "best"
        title = f"Results by class or question, step {number_text(step)} ({which})"
        content += [element("h3", title), table(("", *families), rows[:_CLASSES], "numbers", label=title)]
        content += (
            [element("p", f"The first {_CLASSES} of {len(rows)}.", class_="soft")] if len(rows) > _CLASSES else []
        )
    return content


def _reports(run: RunSummary) -> list[Markup]:
    """The texts that the task gave for evaluations: the last one open, earlier ones folded."""
    tables = sorted(run.log.tables.items(), reverse=True)
    best = _chosen_step(run)
    shown = [pair for number, pair in enumerate(tables) if number < _REPORTS or pair[0] == best]
    content = []
    for number, (step, text) in enumerate(shown):
        title = f"Report of step {step:,}" + " (best)" * (step == best)
        content += [element("h3", title), code(text)] if number == 0 else [folded(title, code(text))]
    return content


def _matrices(run: RunSummary) -> list[Markup]:
    """Two-dimensional metrics of the last evaluation, if they are small and no image shows them."""
    last: dict[str, Any] = {}
    try:
        with (run.folder / metric_arrays.FILE).open("rb") as file:
            for line in file:
                try:
                    values = json.loads(line)
                    last = values if isinstance(values, dict) else last
                except (ValueError, RecursionError):
                    continue
    except OSError:
        return []
    content = []
    for name, value in last.items():
        rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else []
        cells = [[number_text(cell) if isinstance(cell, int | float) else "-" for cell in row] for row in rows]
        wide = max(map(len, cells), default=0)
        is_drawn = any((run.folder / "pictures").glob(f"{name.split('/')[-1]}*.png")) if "*" not in name else False
        if not wide or len(cells) * wide > _CELLS or is_drawn:
            continue
        body = [[str(number), *row] for number, row in enumerate(cells)]
        title = f"{name}, step {last.get('step', '?')}"
        content.append(folded(title, table(("", *map(str, range(wide))), body, "numbers", label=title)))
    return content


def _pictures(run: RunSummary, room: int) -> list[Markup]:
    """Images of samples and results: of each kind the last and the best, then earlier ones while there is room."""
    best = _chosen_step(run)
    first, later = _by_kind(run, best)
    left_out = 0
    open_figures: list[Markup] = []
    folded_figures: list[Markup] = []
    for number, (kind, step, path) in enumerate([*first, *later]):
        try:
            if (size := path.stat().st_size) > room:
                left_out += 1
                continue
            content = path.read_bytes()
        except OSError:
            continue
        if not content.startswith(_PNG):
            continue
        room -= size
        title = kind + (f", step {step:,}" if step else "") + " (best)" * (step == best)
        source = "data:image/png;base64," + base64.b64encode(content).decode()
        figure = element("figure", element("figcaption", title), _image(source, title))
        (open_figures if number < len(first) else folded_figures).append(figure)
    content_parts: list[Markup] = []
    if open_figures:
        content_parts += [element("h3", "Images"), element("div", open_figures, class_="pictures")]
    if folded_figures:
        content_parts.append(folded("earlier images", element("div", folded_figures, class_="pictures")))
    if left_out:
        said = f"{left_out} images are left out to keep the page small; the run directory has all of them."
        content_parts.append(element("p", said, class_="soft"))
    return content_parts


def _by_kind(run: RunSummary, best: float | None) -> tuple[list[tuple[str, int, Path]], list[tuple[str, int, Path]]]:
    """Kind, step and path of each image: the last and the best of each kind, and earlier ones, the latest first."""
    kinds: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted([*(run.folder / "samples").glob("*.png"), *(run.folder / "pictures").glob("*.png")]):
        match = _STEP.search(path.stem)
        kind = f"{path.parent.name}/{path.stem[: match.start()] if match else path.stem}".rstrip("/")
        kinds.setdefault(kind, []).append((int(match[1]) if match else 0, path))
    first: list[tuple[str, int, Path]] = []
    later: list[tuple[str, int, Path]] = []
    for kind, found in kinds.items():
        found.sort(reverse=True)
        for number, (step, path) in enumerate(found):
            (first if number == 0 or step == best else later).append((kind, step, path))
    later.sort(key=lambda one: -one[1])
    return first, later


def _image(source: str, title: str) -> Markup:
    return Markup(element("img", src=source, alt=title, loading="lazy", decoding="async").removesuffix("</img>"))
