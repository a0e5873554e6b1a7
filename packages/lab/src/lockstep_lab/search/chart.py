"""Charts of a search, as SVG or as pixels: points and lines over numbers, powers of ten, or names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.drawing.markup import Markup, element, shortened
from lockstep_lab.report import svg

MARK = "lockstep search chart"
"""A part of every file, in its first bytes."""
BLUE, ORANGE, GREEN, PALE, GRID = "#3b82c4", "#d9731a", "#2f9e5b", "#9a9a9a", "#c9c9c9"
_LEFT, _RIGHT, _TOP, _BELOW = 66, 18, 40, 44  # around the plot
_TIMES = 2  # scale of pixel images


@dataclass(frozen=True)
class Axis:
    """The values that an axis shows, and its labels."""

    label: str
    values: Sequence[Any]
    log: bool = False
    names: Sequence[str] = ()
    """For an axis without numbers: its values are positions in this list."""

    def ticks(self) -> list[tuple[float, str]]:
        """Positions with their labels."""
        if self.names:
            return [(float(place), shortened(name, 14)) for place, name in enumerate(self.names)]
        low, high = self.range()
        if self.log:
            powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
            every = max(1, math.ceil(len(powers) / 9))
            decades = [(float(power), f"1e{power}") for power in powers if power % every == 0]
            return decades if len(decades) > 1 else [(at, f"{10**at:.2g}") for at in (low, (low + high) / 2, high)]
        step = 10.0 ** math.floor(math.log10((high - low) / 2))
        step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= 7), 10)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [(number * step, f"{number * step:.4g}") for number in range(first, last + 1)]

    def place(self, value: float) -> float:
        """The value on the axis: its logarithm, if the axis has powers of ten."""
        return math.log10(value) if self.log else float(value)

    def range(self) -> tuple[float, float]:
        """The first and the last position of the axis."""
        if self.names:
            return -0.5, len(self.names) - 0.5
        places = [self.place(value) for value in self.values] or [0.0]
        low, high = min(places), max(places)
        room = (high - low) / 30 or abs(high) / 10 or 1.0
        return low - room, high + room


@dataclass
class SweepChart:
    """A chart. Colours are those of SVG, as #3b82c4."""

    title: str
    x: Axis
    y: Axis
    lines: list[tuple[Sequence[float], Sequence[float], str]] = field(default_factory=list)
    """x, y and colour of each line."""
    dots: list[tuple[float, float, str]] = field(default_factory=list)
    """x, y and colour of each dot."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """By label: the x of a vertical line."""
    width: int = 640
    height: int = 380

    def svg(self) -> Markup:
        """The chart as an element of a page."""
        drawn = [_svg_of(shape) for shape in self._shapes()]
        return svg.drawing(
            self.width,
            self.height,
            drawn,
            width=self.width,
            font_family="ui-monospace, monospace",
            font_size=11,
            fill="currentColor",
            aria_label=f"{self.title}: {self.y.label} over {self.x.label}",
            data_made_by=MARK,
        )

    def write(self, path: Path) -> None:
        """Write a `.png` file, or a `.svg` file for any other name.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            if path.suffix == ".png":
                self._write_pixels(path)
            else:
                path.write_text(str(self.svg()).replace("<svg ", '<svg style="background: white" ', 1) + "\n")
        except OSError as error:
            what = f"cannot be written: {error.strerror}"
            raise UsageError(what, where=str(path), remedy="choose a different path with --out") from error

    def _write_pixels(self, path: Path) -> None:
        from PIL import Image, ImageDraw, PngImagePlugin

        from lockstep.drawing.drawing import font_of

        page = Image.new("RGB", (self.width * _TIMES, self.height * _TIMES), (255, 255, 255))
        draw, font = ImageDraw.Draw(page), font_of(11 * _TIMES)
        for kind, points, colour, text in self._shapes():
            places = [(x * _TIMES, y * _TIMES) for x, y in points]
            ink = "#141414" if colour == "currentColor" else colour
            if kind == "line":
                draw.line(places, fill=ink, width=_TIMES if colour in (PALE, GRID) else 2 * _TIMES, joint="curve")
            elif kind == "dot":
                ((x, y),) = places
                draw.ellipse((x - 4 * _TIMES, y - 4 * _TIMES, x + 4 * _TIMES, y + 4 * _TIMES), fill=ink)
            else:
                anchor = {"middle": "ms", "end": "rs", "start": "ls"}[kind]
                draw.text(places[0], text, fill=ink, font=font, anchor=anchor)
        about = PngImagePlugin.PngInfo()
        about.add_text("Software", MARK)
        page.save(path, pnginfo=about)

    def _shapes(self) -> Iterator[tuple[str, list[tuple[float, float]], str, str]]:
        """Kind (line, dot, or the anchor of a text), points, colour and text, in drawing order."""
        right, bottom = self.width - _RIGHT, self.height - _BELOW
        (left_value, right_value), (low, high) = self.x.range(), self.y.range()

        def across(place: float) -> float:
            return _LEFT + (place - left_value) / (right_value - left_value) * (right - _LEFT)

        def down(place: float) -> float:
            return bottom - (place - low) / (high - low) * (bottom - _TOP)

        for place, text in self.y.ticks():
            yield "line", [(_LEFT, down(place)), (right, down(place))], GRID, ""
            yield "end", [(_LEFT - 6, down(place) + 4)], "currentColor", text
        for place, text in self.x.ticks():
            yield "line", [(across(place), bottom), (across(place), bottom + 5)], PALE, ""
            yield "middle", [(across(place), bottom + 18)], "currentColor", text
        yield "line", [(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], PALE, ""
        for number, (label, value) in enumerate(self.marks.items()):
            x = across(self.x.place(value))
            colour = (ORANGE, GREEN)[number % 2]
            yield "line", [(x, _TOP), (x, bottom)], colour, ""
            side, shift = ("end", -5) if x > (_LEFT + right) / 2 else ("start", 5)
            yield side, [(x + shift, _TOP + 14 + 15 * number)], colour, label
        for xs, ys, colour in self.lines:
            points = [
                (across(self.x.place(x)), max(_TOP, min(bottom, down(self.y.place(y)))))
                for x, y in zip(xs, ys, strict=True)
            ]
            yield "line", points, colour, ""
        for x, y, colour in self.dots:
            yield "dot", [(across(self.x.place(x)), down(self.y.place(y)))], colour, ""
        yield "start", [(_LEFT, 14)], "currentColor", self.title
        yield "start", [(4, _TOP - 12)], "currentColor", self.y.label
        yield "middle", [((_LEFT + right) / 2, self.height - 8)], "currentColor", self.x.label


def _svg_of(shape: tuple[str, list[tuple[float, float]], str, str]) -> Markup:
    kind, points, colour, text = shape
    if kind == "line":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width = 1 if colour in (PALE, GRID) else 2
        return element("polyline", points=path, fill="none", stroke=colour, stroke_width=width)
    ((x, y),) = points
    if kind == "dot":
        return element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill=colour)
    return svg.text(x, y, text, kind, fill=colour)
