"""Draw figures: sheets of images with captions, coloured masks, boxes and legends. `diagrams` has curves. It uses only
Pillow, with Pillow's own font."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core import atomic

ImageArray = npt.NDArray[np.uint8]
"""uint8 (height, width, 3), RGB."""

_COMPRESSION = 4  # of 9
_SIDE = 160  # default longer side of an image on a sheet, in pixels
_TALLER = 1.25  # maximum height of an image on a sheet, relative to the median height
_GAP = 8
_TEXT = 12  # size of texts
_LINE = 14  # height of a line of text in pixels
_MOST_LINES = 5  # of a caption
_SMALL_TEXT, _SMALL_LINE = 10, 12  # size of box captions, and height of a line in pixels
_LINES_IN_SIDE = 200  # the longer side of an image, in line widths of boxes
_USUAL_SIDE = 800  # up to this longer side in pixels, texts have their default size
_SEEN = 170  # opacity of the background of a box caption, of 255
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_NARROW = 4  # pixels between images that belong together
_DARK = 40  # a colour with all components below this is nearly black; above 255 - 40, nearly white
_NEAR = 60  # colours look alike if the sum of the differences of red, green and blue is smaller
_GREY, _RED = (128, 128, 128), (230, 25, 25)
_GOLDEN = 0.6180339887  # the golden ratio: its multiples divide a circle evenly


def png(picture: ImageArray) -> bytes:
    """The image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    # The default level, 6, takes two to three times as long for files that are 2 % smaller.
    Image.fromarray(picture).save(file, "PNG", compress_level=_COMPRESSION)
    return file.getvalue()


def write(path: Path, picture: ImageArray) -> None:
    """Write the image as a PNG file atomically. Its folder is created if it does not exist.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.staged_file(path) as staging:
        staging.write_bytes(png(picture))


def sheet(
    images: Sequence[Any], captions: Sequence[str], *, columns: int, side: int = _SIDE, width: int | None = None
) -> ImageArray:
    """Images side by side, row by row, with their captions below. Small images are enlarged, large ones reduced.

    A row is as tall as its tallest image. A very tall image is reduced to 1.25 times the median height.

    Args:
        images: arrays of uint8 (height, width, 3), of any sizes.
        captions: a text for each image, of up to five lines. Longer lines are truncated.
        columns: images in a row.
        side: the maximum longer side of an image on the sheet, in pixels. Images are enlarged up to 160 pixels.
        width: the maximum width of the sheet in pixels. If necessary, the number of columns is halved, down to a single
            column.

    Raises:
        ValueError: an image is not a valid array.
    """
    from PIL import Image, ImageDraw

    tiles = [_tile(picture, side) for picture in images]
    if tiles:
        tallest = max(min(side, _SIDE), round(_TALLER * float(np.median([tile.height for tile in tiles]))))
        tiles = [_at_most(tile, tallest) for tile in tiles]
    texts = [caption.splitlines()[:_MOST_LINES] for caption in captions]
    wide = max([min(side, _SIDE), *(tile.width for tile in tiles)])
    while width is not None and columns > 1 and columns * (wide + _GAP) > width:
        columns //= 2
    rows = [range(begin, min(begin + columns, len(tiles))) for begin in range(0, len(tiles), columns)]
    heights = [max(tiles[number].height for number in row) for row in rows]
    downs = [
        tall + _GAP + _LINE * max(len(texts[number]) for number in row) for row, tall in zip(rows, heights, strict=True)
    ]
    across = wide + _GAP
    page = Image.new("RGB", (min(columns, len(tiles)) * across + _GAP, sum(downs) + _GAP), _PAPER)
    draw, font, top = ImageDraw.Draw(page), font_of(), _GAP
    for row, tall, down in zip(rows, heights, downs, strict=True):
        for column, number in enumerate(row):
            tile, left = tiles[number], _GAP + column * across
            page.paste(tile, (left + (wide - tile.width) // 2, top + (tall - tile.height) // 2))
            for place, line in enumerate(texts[number]):
                draw.text((left, top + tall + 1 + place * _LINE), fitted(line, wide, font), fill=_INK, font=font)
        top += down
    return np.asarray(page)


def palette(count: int) -> npt.NDArray[np.uint8]:
    """Colours for `count` classes: uint8 (count, 3). A class has the same colour for every `count`. The first 20 are
    easy to distinguish."""
    steps = np.arange(count)
    hue = (steps * _GOLDEN) % 1.0 * 6  # neighbours are far from each other on the circle of hues
    strength, light = np.array([0.85, 0.55, 1.0])[steps // 7 % 3], np.array([0.95, 1.0, 0.6])[steps // 7 % 3]
    place = (np.array([5.0, 3.0, 1.0]) + hue[:, None]) % 6  # from hue, saturation and lightness to red, green, blue
    fall = np.clip(np.minimum(place, 4 - place), 0, 1)
    colors: npt.NDArray[np.float64] = 255 * light[:, None] * (1 - strength[:, None] * fall)
    return colors.round().astype(np.uint8)


def colored_mask(image: Any, mask: Any, colors: Any, alpha: float = 0.5) -> ImageArray:
    """An image with its mask in colour on top.

    Args:
        image: uint8 (height, width, channels) with 1 or 3 channels, or (height, width).
        mask: class numbers (height, width). Negative numbers are ignored pixels: they are hatched in grey.
        colors: uint8 (classes, 3), by class number.
        alpha: the opacity of the mask. 1: only the mask is visible.

    Raises:
        ValueError: the mask and the image differ in size, or a class has no colour.
    """
    pixels, numbers = _rgb(image), np.asarray(mask)
    table = np.asarray(colors, dtype=np.float32).reshape(-1, 3)
    if numbers.shape != pixels.shape[:2]:
        raise ValueError(f"a mask of shape {numbers.shape} for an image of shape {pixels.shape[:2]}")
    if numbers.size and numbers.max() >= len(table):
        raise ValueError(f"the mask has the class {numbers.max()}, but there are {len(table)} colours")
    ignored = numbers < 0
    painted = np.concatenate([table, np.zeros((1, 3), dtype=np.float32)])[np.where(ignored, len(table), numbers)]
    if ignored.any():
        painted[ignored] = _hatched(*numbers.shape)[ignored]
    return (pixels * (1 - alpha) + painted * alpha).round().astype(np.uint8)


def _hatched(height: int, width: int) -> npt.NDArray[np.float32]:
    """Grey and white diagonals: (height, width, 3). They are wider in large images."""
    step = max(2, round(4 * scale_of(max(height, width))))
    stripe = (np.add.outer(np.arange(height), np.arange(width)) // step) % 2
    grey: npt.NDArray[np.float32] = np.where(stripe, 255.0, 96.0).astype(np.float32)
    return np.repeat(grey[..., None], 3, axis=2)


def distinct(colors: Any) -> npt.NDArray[np.uint8]:
    """Distinguishable colours of classes for drawing: uint8 (classes, 3).

    A colour is replaced if it is nearly black (which only darkens an image), nearly white, or similar to the colour of
    an earlier class. The first black becomes grey. Otherwise the replacement is the next free colour of `palette`.

    Args:
        colors: (classes, 3), from the user.
    """
    found = np.asarray(colors, dtype=np.int64).reshape(-1, 3).copy()
    spare = np.concatenate([[_GREY], palette(2 * len(found) + 16)]).astype(np.int64)
    nearest = np.full(len(spare), 3 * 255)  # distance of each spare colour to the nearest colour in use
    changed: list[int] = []
    for place, color in enumerate(found):
        earlier = np.delete(found[:place], changed, axis=0)
        if color.max() < _DARK or color.min() > 255 - _DARK or (abs(earlier - color).sum(axis=1) < _NEAR).any():
            changed.append(place)
        else:
            nearest = np.minimum(nearest, abs(spare - color).sum(axis=1))
    for place in changed:
        free = np.flatnonzero(nearest >= _NEAR)
        if found[place].max() >= _DARK:
            free = free[free > 0]  # grey is for black
        chosen = int(free[0]) if len(free) else int(nearest.argmax())
        found[place] = spare[chosen]
        nearest = np.minimum(nearest, abs(spare - spare[chosen]).sum(axis=1))
    return found.astype(np.uint8)


def with_boxes(
    image: Any, boxes: Any, texts: Sequence[str | Sequence[str]] = (), colors: Any = (), *, side: int | None = None
) -> ImageArray:
    """An image with boxes, and with a caption for each box if there is space.

    A caption is above its box, below it if there is no space above, or inside a large box. It is not wider than the
    box, and does not cover other captions or a large part of another box. If that is impossible, the box has no
    caption; a `legend` shows its class. Later boxes are more important: they are drawn over earlier ones, and get their
    captions first.

    Args:
        image: as in `colored_mask`.
        boxes: (boxes, 4): left, top, right, bottom in pixels of `image`. Boxes are clipped at the edge of the image.
        texts: for each box a caption, or several alternatives such as `cell 0.93`, `0.93`; the first that fits is
            drawn. Empty: no captions.
        colors: uint8 (boxes, 3), or a single colour (3,). Empty: red.
        side: the image is scaled so that its longer side has `side` pixels, before texts and lines are drawn, so that
            they stay readable. None: the image keeps its size.

    Lines are as wide as 1/200 of the longer side of the image, and at most a sixth of the shorter side of their box.
    Texts are larger in images of more than 800 pixels.
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
    thick = max(1, round(max(canvas.size) / _LINES_IN_SIDE))
    far = np.array([canvas.width - 1, canvas.height - 1] * 2)
    kept = np.flatnonzero(np.isfinite(corners).all(axis=1))
    edges = np.clip(np.nan_to_num(corners), 0, far).round().astype(int)
    edges[:, 2:] = np.maximum(edges[:, 2:], edges[:, :2])
    shorter = (edges[:, 2:] - edges[:, :2]).min(axis=1, initial=max(canvas.size))
    for number in kept:
        wide = min(thick, max(1, int(shorter[number]) // 6))
        draw.rectangle(tuple(edges[number].tolist()), outline=tuple(inks[number]), width=wide)
    if not len(texts):
        return np.asarray(canvas)
    scale = scale_of(max(canvas.size))
    font, labels, high = font_of(round(_SMALL_TEXT * scale)), Image.new("RGBA", canvas.size), round(_SMALL_LINE * scale)
    draw, taken = ImageDraw.Draw(labels), np.zeros((0, 4), dtype=int)
    for number in reversed(kept):
        written = texts[number]
        for text in [written] if isinstance(written, str) else written:
            wide = round(font.getlength(text)) + 3
            others = edges[kept[kept != number]]
            place = _text_place(edges[number], wide, high, taken=taken, others=others, far=far)
            if place is None or not text:
                continue
            left, top = place
            draw.rectangle((left, top, left + wide - 1, top + high - 1), fill=(*inks[number].tolist(), _SEEN))
            ink = _INK if np.dot(inks[number], (0.299, 0.587, 0.114)) > 128 else _PAPER
            draw.text((left + 2, top), text, fill=ink, font=font)
            taken = np.concatenate([taken, [[left, top, left + wide - 1, top + high - 1]]])
            break
    return np.asarray(Image.alpha_composite(canvas.convert("RGBA"), labels).convert("RGB"))


def scale_of(longer: int) -> float:
    """The scale of texts in an image with a longer side of `longer` pixels: 1 or more."""
    return max(1.0, longer / _USUAL_SIDE)


def _text_place(box: Any, wide: int, high: int, *, taken: Any, others: Any, far: Any) -> tuple[int, int] | None:
    """The upper left corner of a caption of `wide` x `high` pixels at a box, or None if there is no space.

    Args:
        box: left, top, right, bottom in pixels.
        taken: (texts, 4): rectangles of other captions, which must not be covered.
        others: (boxes, 4): boxes; a caption may cover at most a quarter of each.
        far: the last pixels of the image.
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
    """Pixels that a rectangle shares with each of the others: (others,)."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2]) + 1
    return sides.clip(min=0).prod(axis=1)


def side_by_side(images: Sequence[Any], titles: Sequence[str] = (), *, side: int | None = None) -> ImageArray:
    """Images in one row with a narrow gap, such as image, truth and prediction.

    Args:
        images: as in `colored_mask`, of any sizes. They are scaled to the height of the first.
        titles: a short text above each image. Empty: no texts.
        side: width of the row in pixels, to which the images are scaled. None: the first image keeps its size.
    """
    from PIL import Image, ImageDraw

    tiles = [Image.fromarray(_rgb(picture)) for picture in images]
    gaps = _NARROW * (len(tiles) - 1)
    shapes = [image.width / image.height for image in tiles]
    height = max(1, int((side - gaps) / sum(shapes))) if side else tiles[0].height
    tiles = [_resized(image, max(1, int(height * shape)), height) for image, shape in zip(tiles, shapes, strict=True)]
    head = _LINE + 2 if titles else 0
    row = Image.new("RGB", (side or sum(image.width for image in tiles) + gaps, height + head), _PAPER)
    draw, font, left = ImageDraw.Draw(row), font_of(), 0
    for number, image in enumerate(tiles):
        row.paste(image, (left, head))
        if titles:
            draw.text((left, 0), fitted(titles[number], image.width, font), fill=_INK, font=font)
        left += image.width + _NARROW
    return np.asarray(row)


def legend(
    names: Sequence[str], colors: Any, *, width: int, ignored: str | None = None, scale: float = 1.0
) -> ImageArray:
    """Names next to their colours, in as many lines as needed: uint8 (height, `width`, 3).

    Args:
        names: the names of the classes.
        colors: uint8 (classes, 3).
        width: the width in pixels.
        ignored: a name for hatched pixels, which comes last. None: there are none.
        scale: the scale of the texts; see `scale_of`.
    """
    from PIL import Image, ImageDraw

    font, line, square = font_of(round(_TEXT * scale)), round((_LINE + 4) * scale), round((_LINE - 2) * scale)
    gap, places, left, top = round(12 * scale), [], 0, 2
    for name in [*names, *([] if ignored is None else [ignored])]:
        text = fitted(name, width - square - 4, font)
        wide = square + 4 + round(font.getlength(text)) + gap
        if left and left + wide - gap > width:
            left, top = 0, top + line
        places.append((left, top, text))
        left += wide
    page = Image.new("RGB", (width, top + line), _PAPER)
    draw = ImageDraw.Draw(page)
    inks = [tuple(color) for color in np.asarray(colors, dtype=np.uint8).reshape(-1, 3)]
    for (left, top, text), ink in zip(places, [*inks, *([] if ignored is None else [_PAPER])], strict=True):
        draw.rectangle((left, top, left + square, top + square), fill=ink, outline=_GREY)
        draw.text((left + square + 4, top), text, fill=_INK, font=font)
    if ignored is not None:
        left, top, _ = places[-1]
        stripes = Image.fromarray(_hatched(square - 1, square - 1).astype(np.uint8))
        page.paste(stripes, (left + 1, top + 1))
    return np.asarray(page)


def stacked(pictures: Sequence[Any]) -> ImageArray:
    """Images of equal or different widths below each other, on white: a row of images and its legend."""
    parts = [_rgb(picture) for picture in pictures]
    width = max(part.shape[1] for part in parts)
    parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0)), constant_values=255) for part in parts]
    return np.concatenate(parts)


def _rgb(picture: Any) -> ImageArray:
    """The image with three channels.

    Raises:
        ValueError: it is not a uint8 array of (height, width), or of (height, width, channels) with 1 or 3 channels.
    """
    array = np.asarray(picture)
    if array.ndim == 2:
        array = array[..., None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        raise ValueError(
            f"an image has dtype {array.dtype} and shape {array.shape}; "
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
    """A Pillow image of the image, with `side` as its longer side if it is larger. A smaller image is enlarged to
    `_SIDE`, or to a little less."""
    from PIL import Image

    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(
            f"an image has dtype {array.dtype} and shape {array.shape}; it must be uint8 of shape (height, width, 3)"
        )
    image = Image.fromarray(np.ascontiguousarray(array))
    longer, least = max(image.size), min(side, _SIDE)
    if longer <= least // 2:  # an integer factor keeps the pixels of a small image sharp
        times = least // longer
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    return _scaled(image, min(side, max(longer, least)))


def _at_most(image: Any, height: int) -> Any:
    """A Pillow image, reduced if it is taller than `height`."""
    if image.height <= height:
        return image
    return _resized(image, max(1, round(image.width * height / image.height)), height)


def fitted(text: str, width: int, font: Any) -> str:
    """`text`, truncated to `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def font_of(size: int = _TEXT) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
