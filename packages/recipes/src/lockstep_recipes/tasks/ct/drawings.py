"""Images of a volume and its risks: the slices with the aggregator's attention, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.drawing import diagrams, drawing
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct.metrics import FALSE_POSITIVE_RATES

Outcomes = Mapping[str, Sequence[tuple[float, int]]]
"""By event: its horizons in years with the indices of their questions, ascending."""

MOST_SLICES = 28
_COLUMNS, _SIDE, _BAR = 7, 128, 8  # slices in a row, pixels of a slice, height of a bar in pixels
_ORANGE, _PALE = (230, 120, 20), (225, 225, 225)
_MOST_TOGETHER = 5  # curves in one diagram, whatever their events are


def most_attended(attention: Array, most: int = MOST_SLICES) -> Array:
    """The indices of the `most` largest weights, ascending. Among equal weights, the first are taken."""
    places: Array = np.sort(np.argsort(-attention, kind="stable")[:most])
    return places


def strip(slices: Array, positions: Array, attention: Array | None = None) -> drawing.ImageArray:
    """Slices side by side, row by row, with their positions. A bar below a slice shows its weight.

    Args:
        slices: uint8 (n, height, width), or with 3 channels (n, height, width, 3).
        positions: (n) in millimetres.
        attention: (n) weights. The bar of the largest weight is as wide as the slice. None: no bars are drawn.

    Returns:
        uint8 (height, width, 3).
    """
    pictures, captions = [], []
    for place, picture in enumerate(slices):
        picture = drawing.side_by_side([_square(picture)], side=_SIDE)
        caption = f"{positions[place]:.0f} mm"
        if attention is not None:
            bar = np.full((_BAR, picture.shape[1], 3), _PALE, dtype=np.uint8)
            largest = float(attention.max())
            bar[:, : round(picture.shape[1] * float(attention[place]) / largest) if largest > 0 else 0] = _ORANGE
            picture, caption = drawing.stacked([picture, bar]), f"{caption}   {attention[place]:.3f}"
        pictures.append(picture)
        captions.append(caption)
    return drawing.sheet(pictures, captions, columns=_COLUMNS, side=max(max(part.shape[:2]) for part in pictures))


def _square(picture: Array) -> Array:
    """The image between black margins."""
    side = max(picture.shape[:2])
    margins = [((side - length) // 2, (side - length + 1) // 2) for length in picture.shape[:2]]
    return np.pad(picture, [*margins, *[(0, 0)] * (picture.ndim - 2)])


def risk_curve(risks: Array, labels: Array | None, outcomes: Outcomes) -> drawing.ImageArray | None:
    """The risks of one volume over the horizons, one curve per event, starting with risk 0 at year 0. Discs show the
    known labels at 0 and 1.

    Args:
        risks: (questions).
        labels: (questions) with NaN for unknown. None: the truth is not shown.
        outcomes: see `Outcomes`. Without events, nothing is drawn.
    """
    if not outcomes:
        return None
    series, marks = {}, {}
    for name, pairs in outcomes.items():
        years, places = (np.asarray(part) for part in zip(*pairs, strict=True))
        series[name] = (np.concatenate([[0.0], years]), np.concatenate([[0.0], risks[places]]))
        if labels is not None:
            marks[name] = (years, labels[places])
    last = max(float(pairs[-1][0]) for pairs in outcomes.values())
    known = labels is not None and bool(np.isfinite(labels).any())
    title = "risk over time" + (": discs are the known answers, 0 (no) and 1 (yes)" if known else "")
    return diagrams.curves(series, title=title, x_label="years", y_label="risk", x_range=(0.0, last), marks=marks)


def roc_curves(
    sensitivities: Array, areas: Mapping[str, float], questions: Sequence[str], outcomes: Outcomes
) -> drawing.ImageArray | None:
    """The ROC curves of the questions with an AUC, in one diagram per event.

    Args:
        sensitivities: (questions, 101), the metric `roc`.
        areas: AUC by question. Questions without an AUC have no curve.
        outcomes: see `Outcomes`.
    """
    series = {}
    for place, question in enumerate(questions):
        if question in areas:
            across, up = (np.concatenate([[0.0], part]) for part in (FALSE_POSITIVE_RATES, sensitivities[place]))
            series[place] = (f"{question} {areas[question]:.3f}", (across, up))
    return _panels(
        series,
        outcomes,
        title="ROC, with the area under the curve",
        also={"chance": (np.arange(2), np.arange(2))},
        x_label="1 - specificity",
        y_label="sensitivity",
    )


def calibration_curves(tables: Array, questions: Sequence[str], outcomes: Outcomes) -> drawing.ImageArray | None:
    """Observed frequency against predicted risk, in one diagram per event.

    Args:
        tables: (questions, bins, 3), the metric `calibration`.
        outcomes: see `Outcomes`.
    """
    series = {}
    for place, (question, table) in enumerate(zip(questions, tables, strict=True)):
        table = table[table[:, 2] > 0]
        if len(table):
            series[place] = (f"{question} ({table[:, 2].sum():.0f} labels)", (table[:, 0], table[:, 1]))
    return _panels(
        series,
        outcomes,
        title="calibration: observed frequency of yes against predicted risk",
        also={"perfect": ([0, 1], [0, 1])},
        marks=dict(series.values()),
        x_label="mean predicted risk in a bin",
        y_label="observed frequency",
    )


def _panels(
    series: Mapping[int, tuple[str, tuple[Any, Any]]], outcomes: Outcomes, **look: Any
) -> drawing.ImageArray | None:
    return diagrams.panels(_by_event(series, outcomes), **look) if series else None


def _by_event(
    series: Mapping[int, tuple[str, tuple[Any, Any]]], outcomes: Outcomes
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Curves by index of their question, grouped by event. If there are at most five, all are in one group."""
    if len(series) <= _MOST_TOGETHER:
        return {"": dict(series.values())}
    event = {place: name for name, pairs in outcomes.items() for _, place in pairs}
    groups: dict[str, dict[str, tuple[Any, Any]]] = {}
    for place, (name, points) in series.items():
        groups.setdefault(event.get(place, ""), {})[name] = points
    return groups
