"""What was found, for programs (verify.json), for people (verify.html) and for the terminal."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lockstep.verify.result import CheckResult, VerifyResult

_CHECK_KEYS = ("name", "status", "reason", "value", "bound", "what", "notes", "curves", "rows", "seconds")
_MOST_POINTS = 400  # of a curve that is drawn
_HUGE = 1e300  # smaller ones are drawn: not infinity, not nan, and nothing whose span is infinite
_SHOWN = {"passed": "passed", "fault": "FAULT", "not shown": "not shown"}
_COLOURS = ["#3b82c4", "#d9731a", "#2f9e5b", "#a05cc8", "#d6498a", "#1a9aa8"]  # legible on light and on dark
_DASHES = ["none", "8 6", "2 5", "12 4 2 4", "5 3"]  # the line below shows through
_WIDTH, _LETTER = 760, 6.7  # of a chart; of a letter in it

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2228; --soft: #5c6670; --rule: #d8dde2 }
:root { --good: #1c7a3f; --bad: #b3261e; --open: #8a5a00; --tint: #fdeceb }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #16191d; --text: #e4e7ea; --soft: #9aa4ae; --rule: #363c43; --good: #5fca86; --bad: #ff8a80; --open: #e8b458; --tint: #35201f } }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere } h2 { margin: 2.2rem 0 .4rem; font-size: 1.15rem; break-after: avoid }
p { margin: .3rem 0; overflow-wrap: anywhere } a { color: inherit } tr, svg { break-inside: avoid } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums } .checks { width: 100% } .rows { font-size: .87rem }
th, td { padding: .35rem .8rem .35rem .4rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
.checks th, .fixed { white-space: nowrap } .checks td:last-child, .checks th:last-child { text-align: right } .soft { color: var(--soft); font-size: .87rem }
.verdict { font-size: 1.15rem; font-weight: 600 } tr.broken td { background: var(--tint) }
.passed { color: var(--good) } .fault { color: var(--bad); font-weight: 700 } .not-shown { color: var(--open) }
svg { display: block; width: 100%; max-width: 760px; height: auto; margin: .6rem 0 } .checks td:nth-child(4) { min-width: 14rem; overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none; font-size: 11px } .wide { overflow: visible } .rows td { overflow-wrap: anywhere } }
"""


def to_json(result: VerifyResult) -> dict[str, Any]:
    """The content of verify.json: plain values only, and null for every number that is not finite.

    schema: 1; larger where a key changes its meaning. name: of the training. passed: whether there is no fault. nproc: ranks. device, quick: as asked for.
    seconds: of all checks. versions: of lockstep, torch and Python. counts: checks by status, under `passed`, `fault` and `not shown`. config: of the
    training. checks: in the order in which they were made, each with

    name; status: a key of counts; reason: in words. value, bound: the number that decided, and its limit, or null. what: of what value is. notes: strings.
    curves: lists of losses by name, the first of step 1. rows: objects, for people. seconds: how long it took.
    """
    fields = {
        "name": result.name,
        "passed": not result.faults,
        "nproc": result.nproc,
        "device": result.device,
        "quick": result.quick,
    }
    checks = [{name: getattr(verdict, name) for name in _CHECK_KEYS} for verdict in result.checks]
    more = {
        "seconds": result.seconds,
        "versions": result.versions,
        "counts": _counts(result),
        "checks": checks,
        "config": result.config,
    }
    return {name: _plain(value) for name, value in ({"schema": 1} | fields | more).items()}


def _counts(result: VerifyResult) -> dict[str, int]:
    return {status: sum(verdict.status == status for verdict in result.checks) for status in _SHOWN}


def _plain(value: Any) -> Any:
    """`value` made of what strict JSON knows; whatever else there is, as text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    try:
        numbers = value.tolist()  # of a tensor, an array or a scalar of NumPy
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return str(value)
    return str(value) if isinstance(numbers, type(value)) else _plain(numbers)


def line(verdict: CheckResult) -> str:
    """A check in one line: name, status, value against bound, reason, seconds."""
    columns = (
        f"{_one_line(verdict.name):<14}",
        f"{_SHOWN[verdict.status]:<10}",
        f"{_decision(verdict):<20}",
        _one_line(verdict.reason),
    )
    return " ".join(columns) + f"  ({verdict.seconds:.1f} s)"


def summary(result: VerifyResult) -> str:
    """How many checks ended how, and after it a line for each fault."""
    counts = _counts(result)
    faults = [f"FAULT {_one_line(verdict.name)}: {_one_line(verdict.reason)}" for verdict in result.faults]
    return "\n".join(
        [_joined(f"{counts['passed']} passed", counts, "not shown") + f" in {result.seconds:.0f} s", *faults]
    )


def _joined(passed: str, counts: Mapping[str, int], not_shown: str) -> str:
    """`14 passed, 1 fault, 1 not shown`, without what there is none of."""
    faults = "1 fault" if counts["fault"] == 1 else f"{counts['fault']} faults"
    return (
        passed
        + (f", {faults}" if counts["fault"] else "")
        + (f", {counts['not shown']} {not_shown}" if counts["not shown"] else "")
    )


def _one_line(text: str) -> str:
    """Without line breaks and control characters, which a terminal would obey."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _decision(verdict: CheckResult) -> str:
    """`3.1e-14 <= 1.0e-11`: as the numbers are, whatever the verdict; with as many digits as it takes to tell them apart."""
    value, bound = verdict.value, verdict.bound
    if value is None or bound is None:
        return "" if value is None else _number(value)
    sign = "<=" if value <= bound else ">" if value > bound else "against"
    digits = next(
        (digits for digits in (2, 4, 8, 17) if value == bound or _number(value, digits) != _number(bound, digits)), 17
    )
    return f"{_number(value, digits)} {sign} {_number(bound, digits)}"


def _number(value: float, digits: int = 2) -> str:
    if value == 0 or (abs(value) < 1e6 and value == int(value)):
        return f"{value:.0f}"
    return (
        f"{value:.{digits + 2}g}" if 0.01 <= abs(value) < 1e4 or not math.isfinite(value) else f"{value:.{digits - 1}e}"
    )


class _Markup(str):
    """Text that is HTML already."""


def to_html(result: VerifyResult) -> str:
    """One page that needs nothing else: the verdict, a table of the checks, and below it curves, notes and rows."""
    rows = [_check_row(number, verdict) for number, verdict in enumerate(result.checks)]
    checks = _table(("check", "status", "value against bound", "reason", "seconds"), rows, "checks")
    body = _element(
        "body", _header(result), checks, [_details(number, verdict) for number, verdict in enumerate(result.checks)]
    )
    metas = _Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    head = _element(
        "head", metas, _element("title", f"{result.name}: lockstep verify"), _element("style", _Markup(_STYLE))
    )
    return "<!doctype html>\n" + _element("html", head, body, lang="en") + "\n"


def _element(name: str, *inside: str | Iterable[str], **attributes: object) -> _Markup:
    """An element with its content, which is escaped where it is not HTML; `class_` and `stroke_width` name attributes."""
    pieces = [piece for one in inside for piece in ([one] if isinstance(one, str) else one)]
    content = "".join(piece if isinstance(piece, _Markup) else _escaped(piece) for piece in pieces)
    names = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"' for key, value in attributes.items()
    )
    return _Markup(f"<{name}{names}>{content}</{name}>")


def _escaped(text: str) -> str:
    """In ASCII, so that the page can be written and read in any encoding."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _header(result: VerifyResult) -> list[_Markup]:
    counts = _counts(result)
    state = "fault" if counts["fault"] else "not-shown" if not counts["passed"] else "passed"
    facts = [f"{result.nproc} rank{'s' * (result.nproc != 1)}", result.device] + ["quick"] * result.quick
    facts += [*(f"{name} {version}" for name, version in result.versions.items()), f"{result.seconds:.0f} s"]
    sentence = _joined(f"{counts['passed']} of {len(result.checks)} checks passed", counts, "could not be shown")
    return [
        _element("h1", result.name),
        _element("p", sentence, class_=f"verdict {state}"),
        _element("p", " · ".join(facts), class_="soft"),
    ]


def _table(titles: Iterable[str], rows: Iterable[_Markup], look: str) -> _Markup:
    head = _element("tr", [_element("th", title) for title in titles])
    return _element(
        "div", _element("table", _element("thead", head), _element("tbody", rows), class_=look), class_="wide"
    )


def _check_row(number: int, verdict: CheckResult) -> _Markup:
    linked = verdict.notes or verdict.curves or verdict.rows
    name = _element("a", verdict.name, href=f"#check-{number}") if linked else verdict.name
    decision = _element("span", _decision(verdict).replace("<=", "≤"), class_="fixed")
    what = [_element("div", verdict.what, class_="soft")] if verdict.what and verdict.value is not None else []
    cells: list[list[str]] = [
        [name],
        [_status(verdict)],
        [decision, *what],
        [verdict.reason],
        [f"{verdict.seconds:.1f}"],
    ]
    return _element(
        "tr", [_element("td", cell) for cell in cells], class_="broken" if verdict.status == "fault" else "sound"
    )


def _status(verdict: CheckResult) -> _Markup:
    return _element("span", _SHOWN[verdict.status], class_="fixed " + verdict.status.replace(" ", "-"))


def _details(number: int, verdict: CheckResult) -> _Markup:
    """What the table has no room for, if there is any."""
    parts = (
        _charts({name: [float(value) for value in curve] for name, curve in verdict.curves.items()})
        if verdict.curves
        else []
    )
    parts += [_element("ul", [_element("li", note) for note in verdict.notes])] if verdict.notes else []
    parts += [_rows(verdict.rows)] if verdict.rows else []
    head = _element("h2", f"{verdict.name} ", _status(verdict)), _element("p", verdict.reason)
    return _element("section", head, parts, id=f"check-{number}") if parts else _Markup()


def _rows(rows: Sequence[Mapping[str, Any]]) -> _Markup:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _table(
        map(str, names),
        [_element("tr", [_element("td", _cell(row.get(name))) for name in names]) for row in rows],
        "rows",
    )


def _cell(value: Any) -> str:
    plain = value if isinstance(value, float) else _plain(value)
    if plain is None or isinstance(plain, float):
        return "-" if plain is None else f"{plain:.6g}"
    return _cut(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False), 200)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True)
class _Line:
    """A curve to draw. style: its colour and dashes. remark: what the drawing cannot show."""

    name: str
    values: list[float]
    style: int
    remark: str = ""


@dataclass(frozen=True)
class _Axis:
    """Numbers from low to high, from `start` to `end` on the page. ticks: numbers with their labels."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _charts(curves: Mapping[str, list[float]]) -> list[_Markup]:
    """The curves; below them how far each is from the first, where they have as many steps."""
    charts = [
        _chart(
            [_Line(name, curve, place, _missing(curve)) for place, (name, curve) in enumerate(curves.items())],
            "loss",
            220,
            False,
        )
    ]
    (first, wanted), *others = curves.items()
    apart: list[_Line] = []
    for place, (name, curve) in enumerate(others, 1):
        if wanted and len(curve) == len(wanted):
            off = [
                0.0 if repr(one) == repr(other) else abs(one - other) for one, other in zip(wanted, curve, strict=True)
            ]  # nan is like nan
            powers = [math.log10(value) if 0 < value < math.inf else math.nan for value in off]
            apart.append(_Line(name, powers, place, "" if any(off) else "identical"))
    if apart and all(one.remark for one in apart):
        return [*charts, _element("p", f"difference from {first}: identical")]
    return (
        [*charts, _chart(apart, f"difference from {first}; no line where it is zero", 130, True)] if apart else charts
    )


def _missing(curve: Sequence[float]) -> str:
    """What of a curve is not drawn."""
    missing = [step for step, value in enumerate(curve, 1) if not abs(value) < _HUGE]
    return (
        f"{len(missing)} of {len(curve)} values not finite, first at step {missing[0]}"
        if missing
        else ""
        if curve
        else "no steps"
    )


def _thin(curve: Sequence[float]) -> list[tuple[int, float]]:
    """(step, value) of at most 400 steps: the ends, and of each stretch the extremes and the first value that is not finite."""
    if len(curve) <= _MOST_POINTS:
        return list(enumerate(curve, 1))
    stretches = (_MOST_POINTS - 2) // 3
    chosen = {0, len(curve) - 1}
    for number in range(stretches):
        places = range(number * len(curve) // stretches, (number + 1) * len(curve) // stretches)
        ordered = sorted((place for place in places if abs(curve[place]) < _HUGE), key=curve.__getitem__)
        chosen.update(ordered[:1] + ordered[-1:] + [place for place in places if not abs(curve[place]) < _HUGE][:1])
    return [(place + 1, curve[place]) for place in sorted(chosen)]


def _chart(lines: Sequence[_Line], label: str, height: int, log: bool) -> _Markup:
    """An SVG with a legend and axes. log: values are powers of ten."""
    finite = [value for one in lines for value in one.values if abs(value) < _HUGE]
    if not finite:
        return _element(
            "p", f"{label}: nothing to draw, as no value is finite in {', '.join(one.name for one in lines)}"
        )
    top = 17 * len(lines) + 32
    steps = _linear(1, max(2, *(len(one.values) for one in lines)), 9, 1.0)
    values = _decades(min(finite), max(finite)) if log else _linear(min(finite), max(finite), 6)
    left = 14 + _LETTER * max(len(text) for _, text in values[2])
    across, up = _Axis(*steps[:2], left, _WIDTH - 24, steps[2]), _Axis(*values[:2], top + height, top, values[2])
    parts = [
        *_legend(lines),
        _text(0, top - 13, _cut(label, 108)),
        *_frame(across, up),
        *(mark for one in lines for mark in _drawn(one, across, up)),
    ]
    look = {
        "font_family": "ui-monospace, monospace",
        "font_size": 11,
        "fill": "currentColor",
        "role": "img",
        "aria_label": label,
    }
    return _element(
        "svg", parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH} {top + height + 40}", **look
    )


def _linear(low: float, high: float, most: int, least: float = 0.0) -> tuple[float, float, list[tuple[float, str]]]:
    """A range that holds both numbers, with some room, and round ticks in it. least: distance of ticks, that is without room."""
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
    """Whole powers of ten around both, and those that get a tick."""
    first, last = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    return first, last, [(power, f"1e{power}") for power in range(first, last + 1, math.ceil((last - first) / 5))]


def _legend(lines: Sequence[_Line]) -> Iterable[_Markup]:
    for row, one in enumerate(lines):
        height = 17 * row + 10
        yield _element("line", x1=0, x2=40, y1=height - 4, y2=height - 4, **_pen(one))
        yield _text(48, height, _cut(one.name, 45) + (f" ({one.remark})" if one.remark else ""))


def _frame(across: _Axis, up: _Axis) -> Iterable[_Markup]:
    """Grid, tick labels and the name of the axis of steps."""
    rule = {"stroke": "currentColor", "stroke_opacity": 0.18}
    for value, text in up.ticks:
        yield _element(
            "line", x1=across.start, x2=across.end, y1=f"{up.at(value):.1f}", y2=f"{up.at(value):.1f}", **rule
        )
        yield _text(across.start - 6, up.at(value) + 4, text, "end")
    for step, text in across.ticks:
        yield _element(
            "line", x1=f"{across.at(step):.1f}", x2=f"{across.at(step):.1f}", y1=up.start, y2=up.start + 4, **rule
        )
        yield _text(across.at(step), up.start + 17, text, "middle")
    yield _element(
        "path",
        d=f"M{across.start} {up.end}V{up.start}H{across.end}",
        fill="none",
        stroke="currentColor",
        stroke_opacity=0.6,
    )
    yield _text((across.start + across.end) / 2, up.start + 34, "step", "middle")


def _drawn(one: _Line, across: _Axis, up: _Axis) -> Iterable[_Markup]:
    """A line for each run of finite values; a dot where one stands alone."""
    for drawable, group in groupby(_thin(one.values), key=lambda point: abs(point[1]) < _HUGE):
        places = [(f"{across.at(step):.1f}", f"{up.at(value):.1f}") for step, value in group] if drawable else []
        if len(places) == 1:
            yield _element("circle", cx=places[0][0], cy=places[0][1], r=2, fill=_COLOURS[one.style % len(_COLOURS)])
        elif places:
            yield _element("polyline", points=" ".join(map(",".join, places)), stroke_linejoin="round", **_pen(one))


def _pen(one: _Line) -> dict[str, object]:
    colour, dashes = _COLOURS[one.style % len(_COLOURS)], _DASHES[one.style % len(_DASHES)]
    return {"fill": "none", "stroke": colour, "stroke_width": 1.6, "stroke_dasharray": dashes}


def _text(x: float, y: float, text: str, anchor: str = "start") -> _Markup:
    return _element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
