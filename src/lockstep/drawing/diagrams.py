"""Diagrams: curves, panels of curves, and confusion matrices."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.drawing.drawing import ImageArray, fitted, font_of, legend, palette, stacked

_GAP = 8
_LINE = 14  # height of a line of text in pixels
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_MOST_NAMES, _MOST_NUMBERS, _MOST_CLASSES = (
    60,
    20,
    2000,
)  # maximum number of classes to show names, show numbers, draw the matrix
_NAME_WIDTH = 110  # width of a class name next to a matrix, in pixels
_MOST_CURVES, _MOST_PANELS = 5, 6  # curves per diagram, diagrams per figure
_GREY, _PALE = (128, 128, 128), (225, 225, 225)


def curves(
    series: Mapping[str, tuple[Any, Any]],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    x_range: tuple[float, float] = (0.0, 1.0),
    marks: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    grey: Container[str] = (),
) -> ImageArray:
    """Curves in one diagram, with a legend, such as the precision-recall curve of each class.

    Args:
        series: by name, x and y of the points, (points,) each. Points that are not finite interrupt a line.
        x_range: the range of the x axis. The y axis shows 0 to 1.
        marks: by name of a series, x and y of points, which are drawn as discs in the colour of the series.
        grey: names of series that are drawn in grey, such as chance.
    """
    from PIL import Image, ImageDraw

    left, top, wide, high, times = 56, 30, 480, 320, 2  # lines are drawn at twice the size, for antialiasing
    inks = palette(len(series))
    inks[[name in grey for name in series]] = _GREY
    plot = Image.new("RGB", (wide * times, high * times), _PAPER)
    draw = ImageDraw.Draw(plot)
    for share in np.linspace(0, 1, 6)[1:-1]:
        draw.line((share * wide * times, 0, share * wide * times, high * times), fill=_PALE, width=times)
        draw.line((0, share * high * times, wide * times, share * high * times), fill=_PALE, width=times)

    def places(x: Any, y: Any) -> npt.NDArray[np.float64]:
        x, y = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (x, y))
        across = (x - x_range[0]) / (x_range[1] - x_range[0]) * (wide * times - 1)
        down = (1 - y) * (high * times - 1)
        return np.stack([across, down], axis=1)

    for line, ink in zip(series.values(), inks, strict=True):
        points = places(*line)
        breaks = np.flatnonzero(~np.isfinite(points).all(axis=1))
        for run in np.split(points, breaks):
            run = run[np.isfinite(run).all(axis=1)]
            if len(run):
                draw.line([tuple(point) for point in run.tolist()], fill=tuple(ink), width=2 * times, joint="curve")
    page = Image.new("RGB", (left + wide + 24, top + high + 44), _PAPER)
    page.paste(plot.resize((wide, high), Image.Resampling.BOX), (left, top))
    draw, font = ImageDraw.Draw(page), font_of()
    draw.rectangle((left - 1, top - 1, left + wide, top + high), outline=_GREY)
    for name, ink in zip(series, inks, strict=True):  # on the page, so that discs at the edge are not clipped
        for across, down in places(*marks.get(name, ((), ()))) / times:
            if np.isfinite(across + down):
                middle = (left + across, top + down)
                draw.ellipse(tuple(m - 4 for m in middle) + tuple(m + 4 for m in middle), fill=tuple(ink))
    for share in np.linspace(0, 1, 6):
        x = x_range[0] + share * (x_range[1] - x_range[0])
        draw.text((left + share * wide, top + high + 4), f"{x:.3g}", fill=_INK, font=font, anchor="ma")
        draw.text((left - 5, top + (1 - share) * high), f"{share:.3g}", fill=_INK, font=font, anchor="rm")
    draw.text((left + wide / 2, top - 8), fitted(title, wide, font), fill=_INK, font=font, anchor="ms")
    draw.text((left + wide / 2, top + high + 24), fitted(x_label, wide, font), fill=_INK, font=font, anchor="ma")
    _draw_upright(page, y_label, left=4, bottom=top + (high + round(font.getlength(y_label))) // 2, font=font)
    if not series:
        return np.asarray(page)
    names = np.pad(legend(list(series), inks, width=wide), ((0, _GAP), (left, 24), (0, 0)), constant_values=255)
    return stacked([np.asarray(page), names])


def panels(
    groups: Mapping[str, Mapping[str, tuple[Any, Any]]],
    *,
    title: str,
    also: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    marks: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    x_label: str = "",
    y_label: str = "",
) -> ImageArray:
    """Several diagrams of `curves`, two in a row, with at most five curves each, so that curves can be distinguished. A
    group with more curves has several diagrams. At most six diagrams are drawn; the remaining curves are named below.

    Args:
        groups: by name of a group, its curves, as in `curves`. The name is part of the title; it may be empty.
        also: additional curves of every diagram, such as chance.
        marks: as in `curves`.
    """
    parts = [
        (name, dict(list(series.items())[begin : begin + _MOST_CURVES]))
        for name, series in groups.items()
        for begin in range(0, len(series), _MOST_CURVES)
    ]
    drawn = [
        curves(
            {**series, **also},
            title=f"{name}: {title}" if name else title,
            x_label=x_label,
            y_label=y_label,
            marks={key: value for key, value in marks.items() if key in series},
            grey=also,
        )
        for name, series in parts[:_MOST_PANELS]
    ]
    high = max(page.shape[0] for page in drawn)
    drawn = [np.pad(page, ((0, high - page.shape[0]), (0, 0), (0, 0)), constant_values=255) for page in drawn]
    rows = [np.concatenate(drawn[begin : begin + 2], axis=1) for begin in range(0, len(drawn), 2)]
    page = stacked(rows)
    left = [name for _, series in parts[_MOST_PANELS:] for name in series]
    if not left:
        return page
    return stacked([page, _text(f"not drawn: {', '.join(left)}", page.shape[1])])


def _text(text: str, width: int) -> ImageArray:
    """A text in as many lines as it needs: uint8 (height, `width`, 3)."""
    from PIL import Image, ImageDraw

    font, lines = font_of(), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if font.getlength(longer) <= width - 2 * _GAP else [*lines, word]
    page = Image.new("RGB", (width, len(lines) * _LINE + _GAP), _PAPER)
    draw = ImageDraw.Draw(page)
    for place, line in enumerate(lines):
        draw.text((_GAP, place * _LINE), line, fill=_INK, font=font)
    return np.asarray(page)


def confusion_matrix(counts: Any, names: Sequence[str] = ()) -> ImageArray | None:
    """A confusion matrix: a row for each true class, a column for each predicted class. Darker cells are larger
    fractions of their row.

    Args:
        counts: numbers (classes, classes).
        names: the names of the classes. Empty: their numbers.

    Returns:
        None for more than 2000 classes. With up to 60 classes, names are next to the matrix; with up to 20, counts are
        in its cells.
    """
    from PIL import Image, ImageDraw

    counts = np.asarray(counts, dtype=np.float64)
    classes = len(counts)
    if classes > _MOST_CLASSES:
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-30)
    cell = 40 if classes <= _MOST_NUMBERS else 16 if classes <= _MOST_NAMES else max(1, 960 // classes)
    has_names = classes <= _MOST_NAMES
    margin = _NAME_WIDTH + _LINE + _GAP if has_names else _LINE + _GAP
    side = margin + classes * cell + _GAP
    page = Image.new("RGB", (side, side), _PAPER)
    faded = 255 - shares[..., None] * (255 - np.array([8, 48, 107]))  # from white to a dark blue
    heat = np.repeat(np.repeat(faded.round().astype(np.uint8), cell, axis=0), cell, axis=1)
    page.paste(Image.fromarray(heat), (margin, margin))
    draw, font = ImageDraw.Draw(page), font_of()
    draw.rectangle((margin - 1, margin - 1, margin + classes * cell, margin + classes * cell), outline=(128, 128, 128))
    draw.text((margin, 2), "prediction", fill=_INK, font=font)
    _draw_upright(page, "truth", left=2, bottom=side - _GAP, font=font)
    for number in range(classes if has_names else 0):
        name = fitted(str(names[number]) if names else str(number), _NAME_WIDTH, font)
        middle = margin + number * cell + cell // 2
        draw.text((margin - 4, middle), name, fill=_INK, font=font, anchor="rm")
        _draw_upright(page, name, left=middle - _LINE // 2, bottom=margin - 3, font=font)
    for row, column in np.argwhere(counts) if classes <= _MOST_NUMBERS else ():
        ink = _PAPER if shares[row, column] > 0.5 else _INK
        place = (margin + column * cell + cell // 2, margin + row * cell + cell // 2)
        draw.text(place, _short(counts[row, column]), fill=ink, font=font, anchor="mm")
    return np.asarray(page)


def _draw_upright(page: Any, text: str, *, left: int, bottom: int, font: Any) -> None:
    """Write `text` from `bottom` upwards."""
    from PIL import Image, ImageDraw

    strip = Image.new("L", (max(1, round(font.getlength(text)) + 1), _LINE), 255)
    ImageDraw.Draw(strip).text((0, 0), text, fill=20, font=font)
    page.paste(strip.rotate(90, expand=True), (left, bottom - strip.width))


def _short(count: float) -> str:
    """A count in at most five characters."""
    if count < 10_000:
        return f"{count:.4g}"
    return f"{count / 1000:.0f}k" if count < 1e6 else f"{count / 1e6:.0f}M"
