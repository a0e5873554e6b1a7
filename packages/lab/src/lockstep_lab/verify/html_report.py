"""The results of checks for people: verify.html, a self-contained page.

Rich could export the terminal's text as HTML, but as lines of fixed width without links, dark colours or print.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep_lab.report.markup import Markup, element, shortened
from lockstep_lab.verify.curves import charts
from lockstep_lab.verify.report import STATUS_WORDS, comparison, counts, counts_in_words, plain
from lockstep_lab.verify.result import CheckResult, VerifyResult

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2228; --soft: #5c6670; --rule: #d8dde2 }
:root { --good: #1c7a3f; --bad: #b3261e; --open: #8a5a00; --tint: #fdeceb }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #16191d; --text: #e4e7ea; --soft: #9aa4ae; --rule: #363c43 }
  :root { --good: #5fca86; --bad: #ff8a80; --open: #e8b458; --tint: #35201f } }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; background: var(--page); color: var(--text) }
body { font: 15px/1.45 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere }
h2 { margin: 2.2rem 0 .4rem; font-size: 1.15rem; break-after: avoid }
p { margin: .3rem 0; overflow-wrap: anywhere } a { color: inherit }
tr, svg { break-inside: avoid } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
.checks { width: 100% } .rows { font-size: .87rem }
th, td { padding: .35rem .8rem .35rem .4rem; border-bottom: 1px solid var(--rule) }
th, td { text-align: left; vertical-align: top }
.checks th, .fixed { white-space: nowrap } .checks td:last-child, .checks th:last-child { text-align: right }
.soft { color: var(--soft); font-size: .87rem }
.summary { font-size: 1.15rem; font-weight: 600 } tr.broken td { background: var(--tint) }
.passed { color: var(--good) } .fault { color: var(--bad); font-weight: 700 } .not-shown { color: var(--open) }
svg { display: block; width: 100%; max-width: 760px; height: auto; margin: .6rem 0 }
.checks td:nth-child(4) { min-width: 14rem; overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none; font-size: 11px } .wide { overflow: visible } }
@media print { .rows td { overflow-wrap: anywhere } }
"""


def to_html(result: VerifyResult) -> str:
    """The page: a summary, a table of the checks, and below it the curves, notes and rows of each check."""
    rows = [_check_row(number, check) for number, check in enumerate(result.checks)]
    checks = _table(("check", "status", "value against bound", "reason", "seconds"), rows, "checks")
    details = [_details(number, check) for number, check in enumerate(result.checks)]
    metas = Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    title = element("title", f"{result.name}: lockstep verify")
    head = element("head", metas, title, element("style", Markup(_STYLE)))
    body = element("body", _header(result), checks, details)
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _header(result: VerifyResult) -> list[Markup]:
    number = counts(result)
    state = "fault" if number["fault"] else "not-shown" if not number["passed"] else "passed"
    facts = [f"{result.nproc} rank{'s' * (result.nproc != 1)}", result.device] + ["quick"] * result.quick
    facts += [*(f"{name} {version}" for name, version in result.versions.items()), f"{result.seconds:.0f} s"]
    passed = f"{number['passed']} of {len(result.checks)} checks passed"
    return [
        element("h1", result.name),
        element("p", counts_in_words(passed, number, not_shown="could not be decided"), class_=f"summary {state}"),
        element("p", " · ".join(facts), class_="soft"),
    ]


def _table(titles: Iterable[str], rows: Iterable[Markup], style: str) -> Markup:
    head = element("tr", [element("th", title) for title in titles])
    table = element("table", element("thead", head), element("tbody", rows), class_=style)
    return element("div", table, class_="wide")


def _check_row(number: int, check: CheckResult) -> Markup:
    has_details = check.notes or check.curves or check.rows
    name = element("a", check.name, href=f"#check-{number}") if has_details else check.name
    decision = [element("span", comparison(check).replace("<=", "≤"), class_="fixed")]
    if check.what and check.value is not None:
        decision.append(element("div", check.what, class_="soft"))
    cells: list[list[str]] = [[name], [_status(check)], [*decision], [check.reason], [f"{check.seconds:.1f}"]]
    state = "broken" if check.status == "fault" else "sound"
    return element("tr", [element("td", cell) for cell in cells], class_=state)


def _status(check: CheckResult) -> Markup:
    return element("span", STATUS_WORDS[check.status], class_="fixed " + check.status.replace(" ", "-"))


def _details(number: int, check: CheckResult) -> Markup:
    """The curves, notes and rows of a check; empty if it has none."""
    parts = []
    if check.curves:
        parts += charts({name: [float(value) for value in curve] for name, curve in check.curves.items()})
    if check.notes:
        parts.append(element("ul", [element("li", note) for note in check.notes]))
    if check.rows:
        parts.append(_rows_table(check.rows))
    head = element("h2", f"{check.name} ", _status(check)), element("p", check.reason)
    return element("section", head, parts, id=f"check-{number}") if parts else Markup()


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[element("td", _cell(row.get(name))) for name in names] for row in rows]
    return _table(map(str, names), [element("tr", row) for row in cells], "rows")


def _cell(value: Any) -> str:
    value = value if isinstance(value, float) else plain(value)
    if value is None or isinstance(value, float):
        return "-" if value is None else f"{value:.6g}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 200)
