"""Draws for people: sheets of pictures with captions, masks in colour, boxes, legends, curves and confusion matrices.

It uses Pillow only, with Pillow's own font.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep import atomic

Picture = npt.NDArray[np.uint8]
"""uint8 (height, width, 3), RGB."""

_COMPRESSION = 4  # of 9
_SIDE = 160  # pixels of the longer side of a picture on a sheet, where nobody wishes another
_GAP = 8
_LINE = 14  # pixels from a line of text to the next
_MOST_LINES = 5  # of a caption
_SMALL_TEXT, _SMALL_LINE = 10, 12  # size of texts at boxes, and pixels that a line of it needs
_SEEN = 170  # of 255: how much the ground of a text at a box hides
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_MOST_NAMES, _MOST_NUMBERS, _MOST_CLASSES = 60, 20, 2000  # classes of a matrix that has names, has numbers, is drawn
_NAME_WIDTH = 110  # pixels of a class name beside a matrix
_NARROW = 4  # pixels between pictures that belong together
_GREY, _PALE, _RED = (128, 128, 128), (225, 225, 225), (230, 25, 25)
_GOLDEN = 0.6180339887  # the golden section: its multiples divide a circle evenly


def png(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    # The default level, 6, takes two to three times the time for files that are 2 % smaller.
    Image.fromarray(picture).save(file, "PNG", compress_level=_COMPRESSION)
    return file.getvalue()


def write(path: Path, picture: Picture) -> None:
    """Write the picture as a PNG file, whole or not at all. Its folder is made if it is not there.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.staged_file(path) as staging:
        staging.write_bytes(png(picture))


def sheet(
    pictures: Sequence[Any], captions: Sequence[str], *, columns: int, side: int = _SIDE, width: int | None = None
) -> Picture:
    """Pictures side by side, row by row, with their captions below. Small pictures are enlarged, large ones reduced.

    Args:
        pictures: arrays of uint8 (height, width, 3), of any sizes.
        captions: a text for each picture, of up to five lines. Longer lines are cut.
        columns: pictures in a row.
        side: the most pixels of the longer side of a picture on the sheet. Pictures are enlarged up to 160 pixels.
        width: a sheet that would be wider, in pixels, has half of the columns, or a quarter, down to a single column.

    Raises:
        ValueError: a picture is not such an array.
    """
    from PIL import Image, ImageDraw

    tiles = [_tile(picture, side) for picture in pictures]
    texts = [caption.splitlines()[:_MOST_LINES] for caption in captions]
    lines = max((len(text) for text in texts), default=0)
    wide = max([min(side, _SIDE), *(tile.width for tile in tiles)])
    tall = max((tile.height for tile in tiles), default=0)
    while width is not None and columns > 1 and columns * (wide + _GAP) > width:
        columns //= 2
    rows = -(-len(tiles) // columns)
    across, down = wide + _GAP, tall + _GAP + lines * _LINE
    page = Image.new("RGB", (min(columns, len(tiles)) * across + _GAP, rows * down + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(page), _font()
    for number, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * across, _GAP + row * down
        page.paste(tile, (left + (wide - tile.width) // 2, top + (tall - tile.height) // 2))
        for place, line in enumerate(text):
            draw.text((left, top + tall + 1 + place * _LINE), _fitted(line, wide, font), fill=_INK, font=font)
    return np.asarray(page)


def palette(count: int) -> npt.NDArray[np.uint8]:
    """Colours for `count` classes: uint8 (count, 3). A class has the same colour for every `count`. The first 20 are
    easy to tell apart."""
    steps = np.arange(count)
    hue = (steps * _GOLDEN) % 1.0 * 6  # neighbours are far from each other on the circle of hues
    strength, light = np.array([0.85, 0.55, 1.0])[steps // 7 % 3], np.array([0.95, 1.0, 0.6])[steps // 7 % 3]
    place = (np.array([5.0, 3.0, 1.0]) + hue[:, None]) % 6  # from hue, strength and light to red, green, blue
    fall = np.clip(np.minimum(place, 4 - place), 0, 1)
    colors: npt.NDArray[np.float64] = 255 * light[:, None] * (1 - strength[:, None] * fall)
    return colors.round().astype(np.uint8)


def colored_mask(image: Any, mask: Any, colors: Any, alpha: float = 0.5) -> Picture:
    """A picture with its mask in colour on top.

    Args:
        image: uint8 (height, width, channels) with 1 or 3 channels, or (height, width).
        mask: class numbers (height, width). Negative numbers are ignored pixels: they are white.
        colors: uint8 (classes, 3), by class number.
        alpha: the share of the mask's colour in a pixel. 1: the mask alone.

    Raises:
        ValueError: the mask has another size than the picture, or a class without a colour.
    """
    pixels, numbers = _rgb(image), np.asarray(mask)
    table = np.asarray(colors, dtype=np.float32).reshape(-1, 3)
    if numbers.shape != pixels.shape[:2]:
        raise ValueError(f"a mask of shape {numbers.shape} for a picture of shape {pixels.shape[:2]}")
    if numbers.size and numbers.max() >= len(table):
        raise ValueError(f"the mask has the class {numbers.max()}, but there are {len(table)} colours")
    table = np.concatenate([table, np.full((1, 3), 255, dtype=np.float32)])
    painted = table[np.where(numbers < 0, len(table) - 1, numbers)]
    return (pixels * (1 - alpha) + painted * alpha).round().astype(np.uint8)


def with_boxes(
    image: Any,
    boxes: Any,
    texts: Sequence[str | Sequence[str]] = (),
    colors: Any = (),
    *,
    side: int | None = None,
    thin: bool = False,
) -> Picture:
    """A picture with boxes, and with a text at each box that has room for it.

    A text stands above its box, below it where there is no room, or inside a large box. It is no wider than the box,
    and covers neither another text nor a large part of another box. Where this cannot be, the box has no text: a
    `legend` tells its class. Later boxes are more important: they are drawn over earlier ones, and get their texts
    first.

    Args:
        image: as in `colored_mask`.
        boxes: (boxes, 4): left, top, right, bottom in pixels of `image`. Boxes are cut at the edge of the picture.
        texts: of each box: a text, or several of which the first that has room is drawn, such as `cell 0.93`, `0.93`.
            Empty: no texts.
        colors: uint8 (boxes, 3), or a single colour (3,). Empty: red.
        side: the picture is scaled so that its longer side has `side` pixels, before texts and lines are drawn. So
            they stay readable. None: the picture keeps its size.
        thin: draw lines of one pixel. Otherwise lines are wider in large pictures.
    """
    from PIL import Image, ImageDraw

    pixels = _rgb(image)
    height, width = pixels.shape[:2]
    canvas = _scaled(Image.fromarray(pixels), side) if side else Image.fromarray(pixels)
    factors = np.array([canvas.width / width, canvas.height / height] * 2)
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * factors
    inks = np.asarray(colors if len(colors) else _RED, dtype=np.uint8)
    inks = np.broadcast_to(inks, (len(corners), 3))
    draw = ImageDraw.Draw(canvas)
    thick = 1 if thin else max(1, round(max(canvas.size) / 300))
    far = np.array([canvas.width - 1, canvas.height - 1] * 2)
    kept = np.flatnonzero(np.isfinite(corners).all(axis=1))
    edges = np.clip(np.nan_to_num(corners), 0, far).round().astype(int)
    edges[:, 2:] = np.maximum(edges[:, 2:], edges[:, :2])
    for number in kept:
        draw.rectangle(tuple(edges[number].tolist()), outline=tuple(inks[number]), width=thick)
    if not len(texts):
        return np.asarray(canvas)
    font, labels = _font(_SMALL_TEXT), Image.new("RGBA", canvas.size)
    draw, taken = ImageDraw.Draw(labels), np.zeros((0, 4), dtype=int)
    for number in reversed(kept):
        written = texts[number]
        for text in [written] if isinstance(written, str) else written:
            wide = round(font.getlength(text)) + 3
            others = edges[kept[kept != number]]
            place = _text_place(edges[number], wide, _SMALL_LINE, taken=taken, others=others, far=far)
            if place is None or not text:
                continue
            left, top = place
            draw.rectangle((left, top, left + wide - 1, top + _SMALL_LINE - 1), fill=(*inks[number].tolist(), _SEEN))
            ink = _INK if np.dot(inks[number], (0.299, 0.587, 0.114)) > 128 else _PAPER
            draw.text((left + 2, top), text, fill=ink, font=font)
            taken = np.concatenate([taken, [[left, top, left + wide - 1, top + _SMALL_LINE - 1]]])
            break
    return np.asarray(Image.alpha_composite(canvas.convert("RGBA"), labels).convert("RGB"))


def _text_place(box: Any, wide: int, high: int, *, taken: Any, others: Any, far: Any) -> tuple[int, int] | None:
    """The left upper corner of a text of `wide` x `high` pixels at a box, or None if there is no room.

    Args:
        box: left, top, right, bottom in pixels.
        taken: (texts, 4): places of other texts, which must stay free.
        others: (boxes, 4): boxes of which a text may hide a quarter at most.
        far: the last pixels of the picture.
    """
    left, top, right, bottom = box.tolist()
    if wide > right - left + 1:
        return None
    tops = [top - high, bottom + 1] + ([top + 1] if bottom - top > 4 * high else [])
    areas = (others[:, 2:] - others[:, :2] + 1).prod(axis=1)
    for place in tops:
        area = np.array([left, place, left + wide - 1, place + high - 1])
        if place < 0 or area[3] > far[3]:
            continue
        if not _common(area, taken).any() and (_common(area, others) <= areas / 4).all():
            return left, place
    return None


def _common(one: Any, others: Any) -> Any:
    """Pixels that a rectangle has in common with each of others: (others,)."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2]) + 1
    return sides.clip(min=0).prod(axis=1)


def side_by_side(pictures: Sequence[Any], titles: Sequence[str] = (), *, side: int | None = None) -> Picture:
    """Pictures in one row with a narrow gap, such as image, truth and prediction.

    Args:
        pictures: as `image` in `colored_mask`, of any sizes. They are scaled to the height of the first.
        titles: a short text above each picture. Empty: no texts.
        side: width of the row in pixels: the pictures are scaled. None: the first picture keeps its size.
    """
    from PIL import Image, ImageDraw

    images = [Image.fromarray(_rgb(picture)) for picture in pictures]
    gaps = _NARROW * (len(images) - 1)
    shapes = [image.width / image.height for image in images]
    height = max(1, int((side - gaps) / sum(shapes))) if side else images[0].height
    images = [_resized(image, max(1, int(height * shape)), height) for image, shape in zip(images, shapes, strict=True)]
    head = _LINE + 2 if titles else 0
    row = Image.new("RGB", (side or sum(image.width for image in images) + gaps, height + head), _PAPER)
    draw, font, left = ImageDraw.Draw(row), _font(), 0
    for number, image in enumerate(images):
        row.paste(image, (left, head))
        if titles:
            draw.text((left, 0), _fitted(titles[number], image.width, font), fill=_INK, font=font)
        left += image.width + _NARROW
    return np.asarray(row)


def legend(names: Sequence[str], colors: Any, *, width: int) -> Picture:
    """Names beside their colours, in as many lines as they need: uint8 (height, `width`, 3).

    Args:
        names: of the classes.
        colors: uint8 (classes, 3).
        width: in pixels.
    """
    from PIL import Image, ImageDraw

    font, line, square = _font(), _LINE + 4, _LINE - 2
    places, left, top = [], 0, 2
    for name in names:
        text = _fitted(name, width - square - 4, font)
        wide = square + 4 + round(font.getlength(text)) + 12
        if left and left + wide - 12 > width:
            left, top = 0, top + line
        places.append((left, top, text))
        left += wide
    page = Image.new("RGB", (width, top + line), _PAPER)
    draw = ImageDraw.Draw(page)
    for (left, top, text), color in zip(places, np.asarray(colors, dtype=np.uint8).reshape(-1, 3), strict=True):
        draw.rectangle((left, top, left + square, top + square), fill=tuple(color), outline=_GREY)
        draw.text((left + square + 4, top), text, fill=_INK, font=font)
    return np.asarray(page)


def stacked(pictures: Sequence[Any]) -> Picture:
    """Pictures of equal or different widths below each other, on white: a row of pictures and its legend."""
    parts = [_rgb(picture) for picture in pictures]
    width = max(part.shape[1] for part in parts)
    parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0)), constant_values=255) for part in parts]
    return np.concatenate(parts)


def curves(
    series: Mapping[str, tuple[Any, Any]],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    x_range: tuple[float, float] = (0.0, 1.0),
    y_range: tuple[float, float] = (0.0, 1.0),
    marks: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> Picture:
    """Curves in one diagram, with a legend, such as precision over recall for each class.

    Args:
        series: by name: x and y of the points, (points,) each. Points that are not finite interrupt a line.
        x_range, y_range: what the axes show.
        marks: by name of a series: x and y of points, which are drawn as discs in the colour of the series.
    """
    from PIL import Image, ImageDraw

    left, top, wide, high, times = 56, 30, 480, 320, 2  # lines are drawn at twice the size: they become smooth
    inks = palette(len(series))
    plot = Image.new("RGB", (wide * times, high * times), _PAPER)
    draw = ImageDraw.Draw(plot)
    for share in np.linspace(0, 1, 6)[1:-1]:
        draw.line((share * wide * times, 0, share * wide * times, high * times), fill=_PALE, width=times)
        draw.line((0, share * high * times, wide * times, share * high * times), fill=_PALE, width=times)

    def places(x: Any, y: Any) -> npt.NDArray[np.float64]:
        x, y = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (x, y))
        across = (x - x_range[0]) / (x_range[1] - x_range[0]) * (wide * times - 1)
        down = (1 - (y - y_range[0]) / (y_range[1] - y_range[0])) * (high * times - 1)
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
    draw, font = ImageDraw.Draw(page), _font()
    draw.rectangle((left - 1, top - 1, left + wide, top + high), outline=_GREY)
    for name, ink in zip(series, inks, strict=True):  # on the page, so that discs at the edge are whole
        for across, down in places(*marks.get(name, ((), ()))) / times:
            if np.isfinite(across + down):
                middle = (left + across, top + down)
                draw.ellipse(tuple(m - 4 for m in middle) + tuple(m + 4 for m in middle), fill=tuple(ink))
    for share in np.linspace(0, 1, 6):
        x, y = (low + share * (high_end - low) for low, high_end in (x_range, y_range))
        draw.text((left + share * wide, top + high + 4), f"{x:.3g}", fill=_INK, font=font, anchor="ma")
        draw.text((left - 5, top + (1 - share) * high), f"{y:.3g}", fill=_INK, font=font, anchor="rm")
    draw.text((left + wide / 2, top - 8), _fitted(title, wide, font), fill=_INK, font=font, anchor="ms")
    draw.text((left + wide / 2, top + high + 24), _fitted(x_label, wide, font), fill=_INK, font=font, anchor="ma")
    _draw_upright(page, y_label, left=4, bottom=top + (high + round(font.getlength(y_label))) // 2, font=font)
    if not series:
        return np.asarray(page)
    names = np.pad(legend(list(series), inks, width=wide), ((0, _GAP), (left, 24), (0, 0)), constant_values=255)
    return stacked([np.asarray(page), names])


def confusion_matrix(counts: Any, names: Sequence[str] = ()) -> Picture | None:
    """A confusion matrix: a row for each true class, a column for each predicted class. The darker, the larger the
    share of the row.

    Args:
        counts: numbers (classes, classes).
        names: of the classes. Empty: their numbers.

    Returns:
        None for more than 2000 classes. Up to 60 classes have their names beside the matrix, and up to 20 classes have
        the counts in its cells.
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
    draw, font = ImageDraw.Draw(page), _font()
    draw.rectangle((margin - 1, margin - 1, margin + classes * cell, margin + classes * cell), outline=(128, 128, 128))
    draw.text((margin, 2), "prediction", fill=_INK, font=font)
    _draw_upright(page, "truth", left=2, bottom=side - _GAP, font=font)
    for number in range(classes if has_names else 0):
        name = _fitted(str(names[number]) if names else str(number), _NAME_WIDTH, font)
        middle = margin + number * cell + cell // 2
        draw.text((margin - 4, middle), name, fill=_INK, font=font, anchor="rm")
        _draw_upright(page, name, left=middle - _LINE // 2, bottom=margin - 3, font=font)
    for row, column in np.argwhere(counts) if classes <= _MOST_NUMBERS else ():
        ink = _PAPER if shares[row, column] > 0.5 else _INK
        place = (margin + column * cell + cell // 2, margin + row * cell + cell // 2)
        draw.text(place, _short(counts[row, column]), fill=ink, font=font, anchor="mm")
    return np.asarray(page)


def _rgb(picture: Any) -> Picture:
    """The picture with three channels.

    Raises:
        ValueError: it is no uint8 array of (height, width), or of (height, width, channels) with 1 or 3 channels.
    """
    array = np.asarray(picture)
    if array.ndim == 2:
        array = array[..., None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        raise ValueError(
            f"a picture has dtype {array.dtype} and shape {array.shape}; "
            "it must be uint8 of shape (height, width), or (height, width, channels) with 1 or 3 channels"
        )
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def _scaled(image: Any, side: int) -> Any:
    """A Pillow image with `side` as its longer side."""
    longer = max(image.size)
    return _resized(image, max(1, round(image.width * side / longer)), max(1, round(image.height * side / longer)))


def _resized(image: Any, width: int, height: int) -> Any:
    from PIL import Image

    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BOX if width < image.width else Image.Resampling.BICUBIC)


def _tile(picture: Any, side: int) -> Any:
    """A Pillow image of the picture, with `side` as its longer side if it is larger. A smaller picture is enlarged to
    `_SIDE`, or to a little less."""
    from PIL import Image

    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(
            f"a picture has dtype {array.dtype} and shape {array.shape}; it must be uint8 of shape (height, width, 3)"
        )
    image = Image.fromarray(np.ascontiguousarray(array))
    longer, least = max(image.size), min(side, _SIDE)
    if longer <= least // 2:  # whole pixels of a small picture stay sharp
        times = least // longer
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    return _scaled(image, min(side, max(longer, least)))


def _draw_upright(page: Any, text: str, *, left: int, bottom: int, font: Any) -> None:
    """Write `text` from `bottom` upwards."""
    from PIL import Image, ImageDraw

    strip = Image.new("L", (max(1, round(font.getlength(text)) + 1), _LINE), 255)
    ImageDraw.Draw(strip).text((0, 0), text, fill=20, font=font)
    page.paste(strip.rotate(90, expand=True), (left, bottom - strip.width))


def _fitted(text: str, width: int, font: Any) -> str:
    """`text`, cut where it is wider than `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def _short(count: float) -> str:
    """A count in at most five characters."""
    if count < 10_000:
        return f"{count:.4g}"
    return f"{count / 1000:.0f}k" if count < 1e6 else f"{count / 1e6:.0f}M"


def _font(size: int = 12) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
