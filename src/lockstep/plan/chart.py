"""A chart of a plan: the memory of each option as a bar against the memory of the GPU, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.markup import Markup, element
from lockstep.plan.search import Option, Plan

# Okabe and Ito's colours, which people with any colour vision can tell apart, on white and on black.
_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "averages": "#F0E442",
    "activations": "#009E73",
    "communication": "#D55E00",
    "batch": "#CC79A7",
}
_OTHER = "#999999"
_GB = 1e9
_WIDTH, _NAMES, _FIGURES, _ROW, _BAR = 960, 270, 110, 34, 20  # pixels
_TOP, _BOTTOM = 96, 34
_FARTHEST = 2.0  # bars longer than so many times the limit are cut, and say so
_SMALL = 10  # where no bar is longer than a tenth of the limit, the axis ends before the limit
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.title { font-size: 16px; font-weight: 600 } .soft { fill: #57606a; font-size: 12px }
.paper { fill: #ffffff } .grid { stroke: #d0d7de } .limit { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 5 3 }
.over { fill: #cf222e } .chosen { font-weight: 600 } .unknown { fill: none; stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9aa4af } .paper { fill: #0d1117 } .grid { stroke: #30363d }
  .limit { stroke: #ff7b72 } .over { fill: #ff7b72 } .unknown { stroke: #9aa4af }
}
"""


@dataclass(frozen=True)
class Bar:
    """The memory of an option."""

    name: str
    parts: Mapping[str, int]
    """Bytes by part at the moment of the peak."""
    fits: bool | None
    detail: str
    """What stands under the name."""
    is_chosen: bool = False
    is_complete: bool = True
    """Whether the activations are known."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def of_plan(plan: Plan) -> str:
    """The chart of a plan."""
    bars = [_bar(option, option is plan.recommended) for option in plan.options if option.estimate is not None]
    world = plan.world
    gpus = f"{world.gpus} GPU{'s' * (world.gpus > 1)}" + (f", {world.gpu_name}" if world.gpu_name else "")
    return svg(bars, world.memory_bytes, title=f"{plan.facts.name}: memory of a GPU, of {gpus}", reserve=plan.reserve)


def _bar(option: Option, is_chosen: bool) -> Bar:
    assert option.estimate is not None
    memory, setting = option.estimate.memory, option.estimate.setting
    passes = f", {setting.accumulate} times" if setting.accumulate > 1 else ""
    return Bar(
        name=option.name,
        parts=memory.at_peak or {"parameters": memory.peak_bytes},
        fits=option.fits,
        detail=f"micro-batch of {setting.micro_batch}{passes}",
        is_chosen=is_chosen,
        is_complete=memory.activations_bytes is not None,
    )


def svg(bars: Sequence[Bar], limit: int | None, *, title: str, reserve: float = 0.0) -> str:
    """The chart as the text of an SVG file. Its colours follow the light or dark scheme of the reader.

    Args:
        limit: bytes of a GPU's memory. None: not known, and no limit is drawn.
        reserve: share of the limit that shall stay free.
    """
    largest = max([bar.total for bar in bars], default=0)
    end = min(largest, _FARTHEST * limit) if limit else largest
    has_limit = limit is not None and (not largest or largest * _SMALL > limit)
    if has_limit and limit:
        end = max(end, 1.08 * limit)
    step = _step(max(end, 1))
    ticks = math.ceil(max(end, 1) / step - 1e-9)
    scale = (_WIDTH - _NAMES - _FIGURES) / (ticks * step)  # pixels of a byte
    height = _TOP + _ROW * len(bars) + _BOTTOM
    shown = [*_heading(bars, title), *_axis(ticks, step, scale, height)]
    for row, bar in enumerate(bars):
        shown += _row(bar, _TOP + row * _ROW, scale, ticks * step)
    if limit and has_limit:
        shown += _limit(limit, reserve, scale, height)
    elif limit:
        far = f"memory of the GPU: {gb(limit)}, {limit / max(largest, 1):,.0f} times the longest bar"
        shown.append(_text(_NAMES, _TOP - 19, far, "soft"))
    size = {"width": _WIDTH, "height": height, "viewBox": f"0 0 {_WIDTH} {height}"}
    background = element("rect", class_="paper", width=_WIDTH, height=height)
    style = Markup(f"<style>{_STYLE}</style>")
    about = element("title", title)
    return (
        element("svg", about, style, background, shown, xmlns="http://www.w3.org/2000/svg", role="img", **size) + "\n"
    )


def _heading(bars: Sequence[Bar], title: str) -> Iterator[Markup]:
    yield _text(16, 26, title, "title")
    parts = dict.fromkeys(part for bar in bars for part in bar.parts if bar.parts[part])
    left = 16.0
    for part in [*(known for known in _COLORS if known in parts), *(part for part in parts if part not in _COLORS)]:
        yield element("rect", x=f"{left:.0f}", y=42, width=12, height=12, rx=2, fill=_COLORS.get(part, _OTHER))
        yield _text(left + 17, 53, part)
        left += 17 + 7.3 * len(part) + 18


def _axis(ticks: int, step: float, scale: float, height: int) -> Iterator[Markup]:
    bottom = height - _BOTTOM
    unit, factor = ("GB", _GB) if ticks * step >= _GB else ("MB", 1e6)
    for tick in range(ticks + 1):
        x, number = f"{_NAMES + tick * step * scale:.1f}", f"{tick * step / factor:g}"
        yield element("line", class_="grid", x1=x, x2=x, y1=_TOP - 8, y2=bottom)
        yield _text(x, bottom + 18, f"{number} {unit}" if tick == ticks else number, "soft", anchor="middle")


def _row(bar: Bar, top: float, scale: float, end: float) -> Iterator[Markup]:
    yield _text(16, top + 9, ("★ " if bar.is_chosen else "") + bar.name, "chosen" if bar.is_chosen else "")
    yield _text(16, top + 23, bar.detail, "soft")
    left, before = float(_NAMES), 0
    for part in sorted(bar.parts, key=lambda part: [*_COLORS, part].index(part)):
        size = bar.parts[part]
        width = max(0.0, (min(before + size, end) - min(before, end)) * scale)
        about = element("title", f"{part}: {gb(size)}")
        shape = {"x": f"{left:.1f}", "y": f"{top:.0f}", "width": f"{width:.1f}", "height": _BAR}
        if width:
            yield element("rect", about, fill=_COLORS.get(part, _OTHER), **shape)
        left, before = left + width, before + size
    if not bar.is_complete:
        shape = {"x": f"{left:.1f}", "y": f"{top:.0f}", "width": 40, "height": _BAR}
        yield element("rect", element("title", "activations are not known"), class_="unknown", **shape)
    verdict = "" if bar.fits is not False else "does not fit"
    cut = "» " if bar.total > end else ""
    figure = f"{cut}{gb(bar.total)}{'' if bar.is_complete else ' + ?'}"
    right = _WIDTH - _FIGURES + 10
    yield _text(right, top + 9, figure, "over" if verdict else "")
    if verdict:
        yield _text(right, top + 22, verdict, "soft over")


def _limit(limit: int, reserve: float, scale: float, height: int) -> Iterator[Markup]:
    x = _NAMES + limit * scale
    if reserve:
        free = reserve * limit * scale
        shape = {"x": f"{x - free:.1f}", "y": _TOP - 8, "width": f"{free:.1f}", "height": height - _TOP - _BOTTOM + 8}
        yield element("rect", element("title", "reserve"), class_="over", opacity=0.12, **shape)
    yield element("line", class_="limit", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP - 14, y2=height - _BOTTOM)
    said = f"memory of the GPU: {gb(limit)}" + (f", of which {reserve:.0%} shall stay free" if reserve else "")
    yield _text(x, _TOP - 19, said, "soft over", anchor="end" if x > _WIDTH / 2 else "start")


def _text(x: float | str, y: float, text: str, style: str = "", anchor: str = "start") -> Markup:
    more = {"class_": style} if style else {}
    return element("text", text, x=x if isinstance(x, str) else f"{x:.1f}", y=f"{y:.0f}", text_anchor=anchor, **more)


def _step(length: float) -> float:
    """A round distance between the marks of an axis of this length: 1, 2 or 5 times a power of ten."""
    rough = length / 6
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def gb(size: float) -> str:
    """Bytes for people, in 10^9 bytes; small sizes in 10^6 bytes."""
    return f"{size / _GB:,.1f} GB" if size >= 0.1 * _GB else f"{size / 1e6:,.1f} MB"
