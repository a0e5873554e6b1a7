"""Charts of losses by step, as SVG within a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lockstep_lab.report.markup import Markup, element, shortened

_MOST_POINTS = 400  # of a curve
_HUGE = 1e300  # larger numbers are not drawn, nor infinity, nan, or numbers with an infinite difference
_COLOURS = ["#3b82c4", "#d9731a", "#2f9e5b", "#a05cc8", "#d6498a", "#1a9aa8"]  # legible on light and on dark
_DASHES = ["none", "8 6", "2 5", "12 4 2 4", "5 3"]  # a covered line shows through
_WIDTH, _LETTER = 760, 6.7  # of a chart, and of a letter, in units of the SVG


@dataclass(frozen=True)
class _Line:
    """A curve to draw."""

    name: str
    values: list[float]
    style: int
    """The number of its colour and dashes."""
    remark: str = ""
    """Limits of the drawing."""


@dataclass(frozen=True)
class _Axis:
    """Numbers from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    """Position of `low` on the page, in units of the SVG."""
    end: float
    """Position of `high`."""
    ticks: list[tuple[float, str]]
    """Numbers with their labels."""

    def at(self, value: float) -> float:
        """The position of a number."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def charts(curves: Mapping[str, list[float]]) -> list[Markup]:
    """A chart of the curves. Below it, for curves with equally many steps, a chart of the distance from the first."""
    lines = [_Line(name, curve, number, _undrawn(curve)) for number, (name, curve) in enumerate(curves.items())]
    (first, reference), *others = curves.items()
    differences: list[_Line] = []
    for number, (name, curve) in enumerate(others, 1):
        if reference and len(curve) == len(reference):
            pairs = zip(reference, curve, strict=True)
            values = [0.0 if repr(one) == repr(other) else abs(one - other) for one, other in pairs]  # nan equals nan
            powers = [math.log10(value) if 0 < value < math.inf else math.nan for value in values]
            differences.append(_Line(name, powers, number, "" if any(values) else "identical"))
    elements = [_chart(lines, label="loss", height=220, log=False)]
    if differences and all(line.remark for line in differences):
        elements.append(element("p", f"difference from {first}: identical"))
    elif differences:
        label = f"difference from {first}; no line where it is zero"
        elements.append(_chart(differences, label=label, height=130, log=True))
    return elements


def _undrawn(curve: Sequence[float]) -> str:
    """A remark about values of a curve that cannot be drawn; empty if there are none."""
    if not curve:
        return "no steps"
    missing = [step for step, value in enumerate(curve, 1) if not abs(value) < _HUGE]
    return f"{len(missing)} of {len(curve)} values not finite, first at step {missing[0]}" if missing else ""


def _thin(curve: Sequence[float]) -> list[tuple[int, float]]:
    """(step, value) of at most 400 steps of a curve.

    Of each stretch, the extremes and the first value that is not finite are kept, and both ends of the curve.
    """
    if len(curve) <= _MOST_POINTS:
        return list(enumerate(curve, 1))
    stretches = (_MOST_POINTS - 2) // 3
    chosen = {0, len(curve) - 1}
    for number in range(stretches):
        places = range(number * len(curve) // stretches, (number + 1) * len(curve) // stretches)
        ordered = sorted((place for place in places if abs(curve[place]) < _HUGE), key=curve.__getitem__)
        chosen.update(ordered[:1] + ordered[-1:] + [place for place in places if not abs(curve[place]) < _HUGE][:1])
    return [(place + 1, curve[place]) for place in sorted(chosen)]


def _chart(lines: Sequence[_Line], *, label: str, height: int, log: bool) -> Markup:
    """An SVG with a legend and axes. log: the values are powers of ten."""
    finite = [value for line in lines for value in line.values if abs(value) < _HUGE]
    if not finite:
        names = ", ".join(line.name for line in lines)
        return element("p", f"{label}: nothing to draw, as no value is finite in {names}")
    top = 17 * len(lines) + 32
    steps = _linear(1, max(2, *(len(line.values) for line in lines)), 9, 1.0)
    values = _decades(min(finite), max(finite)) if log else _linear(min(finite), max(finite), 6)
    left = 14 + _LETTER * max(len(text) for _, text in values[2])
    x_axis = _Axis(*steps[:2], left, _WIDTH - 24, steps[2])
    y_axis = _Axis(*values[:2], top + height, top, values[2])
    parts = [
        *_legend(lines),
        _text(0, top - 13, shortened(label, 108)),
        *_frame(x_axis, y_axis),
        *(mark for line in lines for mark in _marks(line, x_axis, y_axis)),
    ]
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {_WIDTH} {top + height + 40}",
        "font_family": "ui-monospace, monospace",
        "font_size": 11,
        "fill": "currentColor",
        "role": "img",
        "aria_label": label,
    }
    return element("svg", parts, **attributes)


def _linear(low: float, high: float, most: int, least: float = 0.0) -> tuple[float, float, list[tuple[float, str]]]:
    """A range that contains both numbers with some margin, and about `most` round ticks in it.

    least: the least distance of ticks; with it, the range has no margin.
    """
    largest = max(abs(low), abs(high))
    room = 0.0 if least else (high - low) / 25
    if high - low <= max(1e-9 * largest, 1 / _HUGE):
        room = largest / 10 if largest > 1 / _HUGE else 1.0
    low, high = low - room, high + room
    power = math.floor(math.log10((high - low) / most))
    step = max(
        least, next(factor * 10.0**power for factor in (1, 2, 5, 10, 20) if factor * 10.0**power * most >= high - low)
    )
    power = math.floor(math.log10(step) + 1e-9)
    fixed = 1e-3 <= largest < 1e6
    digits = max(0, -power) if fixed else max(0, math.floor(math.log10(max(abs(low), abs(high)))) - power)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return (
        low,
        high,
        [(number * step, f"{number * step:.{digits}{'f' if fixed else 'e'}}" if number else "0") for number in numbers],
    )


def _decades(low: float, high: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Whole powers of ten around both numbers, and up to about six ticks."""
    first, last = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    return first, last, [(power, f"1e{power}") for power in range(first, last + 1, math.ceil((last - first) / 5))]


def _legend(lines: Sequence[_Line]) -> Iterable[Markup]:
    for row, line in enumerate(lines):
        y = 17 * row + 10
        yield element("line", x1=0, x2=40, y1=y - 4, y2=y - 4, **_pen(line))
        yield _text(48, y, shortened(line.name, 45) + (f" ({line.remark})" if line.remark else ""))


def _frame(x_axis: _Axis, y_axis: _Axis) -> Iterable[Markup]:
    """The grid, the labels of ticks and the name of the axis of steps."""
    grid = {"stroke": "currentColor", "stroke_opacity": 0.18}
    for value, text in y_axis.ticks:
        y = y_axis.at(value)
        yield element("line", x1=x_axis.start, x2=x_axis.end, y1=f"{y:.1f}", y2=f"{y:.1f}", **grid)
        yield _text(x_axis.start - 6, y + 4, text, "end")
    for step, text in x_axis.ticks:
        x = x_axis.at(step)
        yield element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=y_axis.start, y2=y_axis.start + 4, **grid)
        yield _text(x, y_axis.start + 17, text, "middle")
    path = f"M{x_axis.start} {y_axis.end}V{y_axis.start}H{x_axis.end}"
    yield element("path", d=path, fill="none", stroke="currentColor", stroke_opacity=0.6)
    yield _text((x_axis.start + x_axis.end) / 2, y_axis.start + 34, "step", "middle")


def _marks(line: _Line, x_axis: _Axis, y_axis: _Axis) -> Iterable[Markup]:
    """A polyline for each run of finite values, and a dot for a single finite value."""
    for drawable, group in groupby(_thin(line.values), key=lambda point: abs(point[1]) < _HUGE):
        if not drawable:
            continue
        points = [(f"{x_axis.at(step):.1f}", f"{y_axis.at(value):.1f}") for step, value in group]
        if len(points) == 1:
            yield element("circle", cx=points[0][0], cy=points[0][1], r=2, fill=_COLOURS[line.style % len(_COLOURS)])
        else:
            yield element("polyline", points=" ".join(map(",".join, points)), stroke_linejoin="round", **_pen(line))


def _pen(line: _Line) -> dict[str, object]:
    colour, dashes = _COLOURS[line.style % len(_COLOURS)], _DASHES[line.style % len(_DASHES)]
    return {"fill": "none", "stroke": colour, "stroke_width": 1.6, "stroke_dasharray": dashes}


def _text(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
