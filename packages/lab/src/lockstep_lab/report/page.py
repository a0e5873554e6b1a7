"""Pages with charts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from lockstep.drawing import document as frame
from lockstep.drawing.document import MARK, table
from lockstep.drawing.markup import Markup, element, shortened
from lockstep_lab.report import charts
from lockstep_lab.report.charts import Chart

__all__ = ["MARK", "document", "table"]


def document(
    title: str, body: Iterable[Markup], chart_data: Sequence[dict[str, Any]], marks: Sequence[int] = ()
) -> str:
    """A page as text.

    Args:
        chart_data: of the figures that `figures` made, in order.
        marks: steps that the charts mark with a line.
    """
    content = {"charts": chart_data, "marks": list(marks)}
    licence = "\n".join(f" * {line}".rstrip() for line in _file("vendor/LICENSE").splitlines())
    library = f"/*!\n{licence}\n */\n{_file('vendor/uPlot.iife.min.js')}"
    scripts = [library, _file("page.js")] if chart_data else []
    data = Markup(f'<script type="application/json" id="data">{_json(content)}</script>')
    return frame.document(title, body, style=_file("vendor/uPlot.min.css"), scripts=scripts, end=[data])


def figures(shown: Sequence[Chart], number_from: int = 0) -> tuple[Markup, list[dict[str, Any]]]:
    """The charts as elements, and their data for `document`. Without scripts, the tables below the charts remain."""
    values = charts.data(shown)
    elements = []
    for number, chart in enumerate(shown, number_from):
        rows = [[label, *map(number_text, facts)] for label, facts in chart.facts()]
        more = [f"{chart.left_out} more lines are left out."] if chart.left_out else []
        thinned = "Downsampled: each point is the minimum or maximum of neighbouring entries, so no peak is lost."
        more += [thinned] if chart.thinned else []
        facts = table(("", "first", "smallest", "largest", "last"), rows, "numbers", label=f"Values of {chart.title}")
        last = "; ".join(f"{label}: {number_text(values[-1])}" for label, values in chart.facts()[:4])
        plot = element("div", class_="plot", data_chart=number, role="img", aria_label=f"{chart.title}. Last: {last}")
        title = element("figcaption", element("span", chart.title))
        notes = [element("p", " ".join(more), class_="soft")] if more else []
        folded = element("details", element("summary", "values"), facts)
        elements.append(element("figure", title, plot, notes, folded))
    return element("div", elements, class_="charts"), values


def facts(pairs: Iterable[tuple[str, str | Markup]]) -> Markup:
    """Names with their values, as a list."""
    return element("dl", [element("div", element("dt", name), element("dd", value)) for name, value in pairs if value])


def section(title: str, *content: str | Iterable[str], anchor: str = "") -> Markup:
    """A part of the page with a heading."""
    return element("section", element("h2", title), *content, id=anchor or title.lower().replace(" ", "-"))


def folded_section(title: str, *content: str | Iterable[str]) -> Markup:
    """A part of the page that is shown when its heading is clicked."""
    inner = element("details", element("summary", element("h2", title)), *content)
    return element("section", inner, id=title.lower().replace(" ", "-"))


def folded(title: str, *content: str | Iterable[str]) -> Markup:
    """Content that is shown when its title is clicked."""
    return element("details", element("summary", title), *content)


def code(text: str) -> Markup:
    """Text with fixed width and its own line breaks."""
    return element("pre", text, tabindex=0)


def number_text(value: Any) -> str:
    """A number for people; a hyphen for None. Other values, which a damaged file may contain, are unchanged."""
    if value is None or not isinstance(value, int | float):
        return "-" if value is None else shortened(str(value), 40) or "-"
    if not abs(value) < 1e15:  # also NaN and infinity
        return f"{value:.4g}" if isinstance(value, float) else shortened(str(value)[:40], 40)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def time(text: str) -> str:
    """A time in ISO 8601 for people: with a space instead of the T."""
    return text.replace("T", " ", 1)


def command(*lines: Sequence[str]) -> Markup:
    """Commands, one per line, as a shell takes them."""
    return element("pre", "\n".join(map(shlex.join, lines)), class_="command", tabindex=0)


def _json(value: Any) -> str:
    """JSON that cannot close a script element, whatever text it contains."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files("lockstep_lab.report").joinpath(name).read_text(encoding="utf-8")
