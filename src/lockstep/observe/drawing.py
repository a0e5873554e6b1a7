"""Draws sheets of pictures with captions, and confusion matrices. Pillow only, with its own font."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep import atomic

Picture = npt.NDArray[np.uint8]
"""uint8 (height, width, 3), RGB."""

_SIDE = 160  # pixels of the longer side of a picture on a sheet
_GAP = 8
_LINE = 14  # pixels from a line of text to the next
_MOST_LINES = 3  # of a caption
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_MOST_NAMES, _MOST_NUMBERS, _MOST_CLASSES = 60, 20, 2000  # classes of a matrix that has names, has numbers, is drawn
_NAME_WIDTH = 110  # pixels of a class name beside a matrix


def png(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def write(path: Path, picture: Picture) -> None:
    """Write the picture as a PNG file, whole or not at all. Its folder is made if it is not there.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.staged_file(path) as staging:
        staging.write_bytes(png(picture))


def sheet(pictures: Sequence[Any], captions: Sequence[str], *, columns: int) -> Picture:
    """Pictures side by side, row by row, with their captions below. Small pictures are enlarged, large ones reduced.

    Args:
        pictures: arrays of uint8 (height, width, 3), of any sizes.
        captions: a text for each picture, of up to three lines. Longer lines are cut.
        columns: pictures in a row.

    Raises:
        ValueError: a picture is not such an array.
    """
    from PIL import Image, ImageDraw

    tiles = [_tile(picture) for picture in pictures]
    texts = [caption.splitlines()[:_MOST_LINES] for caption in captions]
    lines = max((len(text) for text in texts), default=0)
    rows = -(-len(tiles) // columns)
    width, height = _SIDE + _GAP, _SIDE + _GAP + lines * _LINE
    page = Image.new("RGB", (min(columns, len(tiles)) * width + _GAP, rows * height + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(page), _font()
    for number, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = _GAP + column * width, _GAP + row * height
        page.paste(tile, (left + (_SIDE - tile.width) // 2, top + (_SIDE - tile.height) // 2))
        for place, line in enumerate(text):
            draw.text((left, top + _SIDE + 1 + place * _LINE), _fitted(line, _SIDE, font), fill=_INK, font=font)
    return np.asarray(page)


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


def _tile(picture: Any) -> Any:
    """A Pillow image of the picture with `_SIDE` as its longer side, or a little less where it is enlarged."""
    from PIL import Image

    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(
            f"a picture has dtype {array.dtype} and shape {array.shape}; it must be uint8 of shape (height, width, 3)"
        )
    image = Image.fromarray(np.ascontiguousarray(array))
    longer = max(image.size)
    if longer <= _SIDE // 2:  # whole pixels of a small picture stay sharp
        times = _SIDE // longer
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    size = (max(1, image.width * _SIDE // longer), max(1, image.height * _SIDE // longer))
    return image.resize(size, Image.Resampling.BOX if longer > _SIDE else Image.Resampling.BICUBIC)


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


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(12)
