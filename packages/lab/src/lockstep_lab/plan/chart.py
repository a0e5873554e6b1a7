"""A chart of a plan as SVG: the memory of each option as a bar, compared with the memory of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lockstep.drawing.markup import Markup, element
from lockstep_lab.plan.search import Option, PlanResult
from lockstep_lab.report.svg import drawing, rect, text

# Okabe and Ito's colours, which people with any colour vision can distinguish, on white and on black.
_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "averages": "#F0E442",
    "activations": "#009E73",
    "communication": "#D55E00",
    "batch": "#CC79A7",
}
_WIDTH, _NAMES, _FIGURES, _ROW, _BAR, _TOP, _BOTTOM = 960, 270, 110, 34, 20, 96, 14  # pixels
_FARTHEST = 2.0  # bars longer than this many times the limit are cut off and marked
_SMALL = 10  # if no bar exceeds a tenth of the limit, the bars have their own scale
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.title { font-size: 16px; font-weight: 600 } .soft { fill: #57606a; font-size: 12px }
.paper { fill: #ffffff } .limit { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 5 3 }
.over { fill: #cf222e } .chosen { font-weight: 600 } .unknown { fill: none; stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9aa4af } .paper { fill: #0d1117 }
  .limit { stroke: #ff7b72 } .over { fill: #ff7b72 } .unknown { stroke: #9aa4af }
}
"""


class MemoryBar(NamedTuple):
    """The memory of an option."""

    name: str
    parts: Mapping[str, int]
    """Bytes by part at the moment of the peak."""
    fits: bool | None
    detail: str
    """The line below the name."""
    is_chosen: bool = False
    is_complete: bool = True
    """False: the activations are unknown."""


def of_plan(plan: PlanResult) -> str:
    """The chart of a plan."""
    bars = [_bar(option, option is plan.recommended) for option in plan.options if option.estimate is not None]
    world = plan.world
    gpus = f"{world.gpus} GPU{'s' * (world.gpus > 1)}" + (f", {world.gpu_name}" if world.gpu_name else "")
    return svg(bars, world.memory_bytes, title=f"{plan.facts.name}: memory per GPU, on {gpus}", reserve=plan.reserve)


def _bar(option: Option, is_chosen: bool) -> MemoryBar:
    assert option.estimate is not None
    memory, setting = option.estimate.memory, option.estimate.setting
    detail = f"micro-batch of {setting.micro_batch}"
    detail += f", {setting.accumulate} times" if setting.accumulate > 1 else ""
    return MemoryBar(option.name, memory.at_peak, option.fits, detail, is_chosen, memory.activations_bytes is not None)


def svg(bars: Sequence[MemoryBar], limit: int | None, *, title: str, reserve: float = 0.0) -> str:
    """The chart as the text of an SVG file. Its colours follow the reader's light or dark scheme.

    Args:
        limit: bytes of a GPU's memory. None: unknown, so no limit is drawn.
        reserve: fraction of the limit that stays free.
    """
    largest = max([sum(bar.parts.values()) for bar in bars], default=0)
    end = max(1.0, min(largest, _FARTHEST * limit) if limit else largest)
    is_far = limit is not None and 0 < largest * _SMALL <= limit
    if limit and not is_far:
        end = max(end, 1.08 * limit)
    scale = (_WIDTH - _NAMES - _FIGURES) / end  # pixels of a byte
    height = _TOP + _ROW * len(bars) + _BOTTOM
    shown = [text(16, 26, title, class_="title"), *_legend(bars)]
    for row, bar in enumerate(bars):
        shown += _row(bar, _TOP + row * _ROW, scale, end)
    if limit and is_far:
        far = f"memory of the GPU: {gb(limit)}, {limit / largest:,.0f} times the longest bar"
        shown.append(text(_NAMES, _TOP - 19, far, class_="soft"))
    elif limit:
        shown += _limit(limit, reserve, scale, height)
    paper = rect(0, 0, _WIDTH, height, class_="paper")
    content = (element("title", title), Markup(f"<style>{_STYLE}</style>"), paper, *shown)
    return drawing(_WIDTH, height, *content, width=_WIDTH, height=height) + "\n"


def _legend(bars: Sequence[MemoryBar]) -> Iterator[Markup]:
    left = 16.0
    for part in _COLORS:
        if any(bar.parts.get(part) for bar in bars):
            yield rect(left, 42, 12, 12, fill=_COLORS[part])
            yield text(left + 17, 53, part)
            left += 17 + 7.3 * len(part) + 18


def _row(bar: MemoryBar, top: float, scale: float, end: float) -> Iterator[Markup]:
    yield text(16, top + 9, ("★ " if bar.is_chosen else "") + bar.name, class_="chosen" if bar.is_chosen else "name")
    yield text(16, top + 23, bar.detail, class_="soft")
    left, before = float(_NAMES), 0
    for part in sorted(bar.parts, key=list(_COLORS).index):
        width = (min(before + bar.parts[part], end) - min(before, end)) * scale
        if width:
            yield rect(left, top, width, _BAR, f"{part}: {gb(bar.parts[part])}", fill=_COLORS[part])
        left, before = left + width, before + bar.parts[part]
    if not bar.is_complete:
        yield rect(left, top, 40, _BAR, "activations are unknown", class_="unknown")
    figure = f"{'» ' if before > end else ''}{gb(before)}{'' if bar.is_complete else ' + ?'}"
    yield text(_WIDTH - _FIGURES + 10, top + 9, figure, class_="over" if bar.fits is False else "figure")
    if bar.fits is False:
        yield text(_WIDTH - _FIGURES + 10, top + 22, "does not fit", class_="soft over")


def _limit(limit: int, reserve: float, scale: float, height: int) -> Iterator[Markup]:
    x, free, said = _NAMES + limit * scale, reserve * limit * scale, f"memory of the GPU: {gb(limit)}"
    if reserve:
        yield rect(x - free, _TOP - 8, free, height - _TOP - _BOTTOM + 8, "reserve", class_="over", opacity=0.12)
        said += f", {reserve:.0%} reserved"
    yield element("line", class_="limit", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP - 14, y2=height - _BOTTOM)
    yield text(x, _TOP - 19, said, "end" if x > _WIDTH / 2 else "start", class_="soft over")


def gb(size: float) -> str:
    """Bytes for people, in units of 10^9 bytes; small sizes in 10^6 bytes."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
