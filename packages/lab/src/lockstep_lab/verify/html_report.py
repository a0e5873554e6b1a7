"""The results of checks for people: verify.html, a self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.drawing.markup import Markup, element, shortened
from lockstep_lab.report import page
from lockstep_lab.report.charts import Chart, Line
from lockstep_lab.report.metrics_file import Series
from lockstep_lab.verify.report import STATUS_WORDS, comparison, counts, counts_in_words, plain
from lockstep_lab.verify.result import CheckResult, VerifyResult

_HUGE = 1e300  # larger numbers are not drawn, nor infinity or nan


def to_html(result: VerifyResult) -> str:
    """The page: a summary, a table of the checks, and below it the curves, notes and rows of each check."""
    titles = ("check", "status", "value against bound", "reason", "seconds")
    rows = [_check_row(number, check) for number, check in enumerate(result.checks)]
    body, data = [*_header(result), page.table(titles, rows, "checks", label="Checks")], list[dict[str, Any]]()
    for number, check in enumerate(result.checks):
        if _has_details(check):
            body.append(_details(number, check, data))
    return page.document(f"{result.name}: lockstep verify", body, data)


def _header(result: VerifyResult) -> list[Markup]:
    number = counts(result)
    state = "fault" if number["fault"] else "not-shown" if not number["passed"] else "passed"
    facts = [f"{result.nproc} rank{'s' * (result.nproc != 1)}", result.device] + ["quick"] * result.quick
    facts += [*(f"{name} {version}" for name, version in result.versions.items()), f"{result.seconds:.0f} s"]
    passed = f"{number['passed']} of {len(result.checks)} checks passed"
    return [
        element("h1", result.name),
        element("p", counts_in_words(passed, number, not_shown="could not be decided"), class_=f"state {state}"),
        element("p", " · ".join(facts), class_="soft"),
    ]


def _has_details(check: CheckResult) -> bool:
    return bool(check.notes or check.curves or check.rows)


def _check_row(number: int, check: CheckResult) -> list[str]:
    name = element("a", check.name, href=f"#check-{number}") if _has_details(check) else check.name
    decision = element("span", comparison(check).replace("<=", "≤"), class_="fixed")
    if check.what and check.value is not None:
        decision = element("div", decision, element("div", check.what, class_="soft"))
    return [name, _status(check), decision, check.reason, f"{check.seconds:.1f}"]


def _status(check: CheckResult) -> Markup:
    return element("span", STATUS_WORDS[check.status], class_="fixed " + check.status.replace(" ", "-"))


def _details(number: int, check: CheckResult, data: list[dict[str, Any]]) -> Markup:
    """The curves, notes and rows of a check. The data of its charts are added to `data`."""
    parts: list[Markup] = []
    if check.curves:
        charts, remarks = _charts({name: [float(value) for value in curve] for name, curve in check.curves.items()})
        drawn, values = page.figures(charts, len(data))
        data += values
        parts += [drawn] * bool(charts) + [element("p", remark, class_="soft") for remark in remarks]
    if check.notes:
        parts.append(element("ul", [element("li", note) for note in check.notes]))
    if check.rows:
        names = list(dict.fromkeys(name for row in check.rows for name in row))
        rows = [[_cell(row.get(name)) for name in names] for row in check.rows]
        parts.append(page.table([str(name) for name in names], rows, "paths", label=f"Rows of {check.name}"))
    head = element("h2", f"{check.name} ", _status(check)), element("p", check.reason)
    return element("section", head, parts, id=f"check-{number}")


def _charts(curves: Mapping[str, Sequence[float]]) -> tuple[list[Chart], list[str]]:
    """A chart of the curves, and of the distance from the first for curves with equally many steps; and remarks."""
    (first, reference), *others = curves.items()
    lines, remarks = [], []
    for number, (name, curve) in enumerate(curves.items()):
        missing = [step for step, value in enumerate(curve, 1) if not abs(value) < _HUGE]
        if len(missing) < len(curve):
            lines.append(_line(name, curve, number))
        if missing:
            remarks.append(
                f"{name}: {len(missing)} of {len(curve)} values are not finite, the first at step {missing[0]}"
            )
        elif not curve:
            remarks.append(f"{name}: no steps")
    differences = []
    for number, (name, curve) in enumerate(others, 1):
        if reference and len(curve) == len(reference):
            pairs = zip(reference, curve, strict=True)
            values = [0.0 if repr(one) == repr(other) else abs(one - other) for one, other in pairs]  # nan equals nan
            if not any(values):
                remarks.append(f"difference of {name} from {first}: identical")
            elif any(0 < value < _HUGE for value in values):  # zero has no place on a logarithmic axis
                differences.append(_line(name, [value or np.nan for value in values], number))
    charts = [Chart("Loss", lines)] if lines else []
    if differences:
        charts.append(Chart(f"Difference from {first}; no line where it is zero", differences, starts_log=True))
    return charts, remarks


def _line(name: str, curve: Sequence[float], color: int) -> Line:
    values = np.array([value if abs(value) < _HUGE else np.nan for value in curve])
    return Line(name, Series(np.arange(1.0, len(values) + 1), values), color)


def _cell(value: Any) -> str:
    value = value if isinstance(value, float) else plain(value)
    if value is None or isinstance(value, float):
        return "-" if value is None else f"{value:.6g}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 200)
