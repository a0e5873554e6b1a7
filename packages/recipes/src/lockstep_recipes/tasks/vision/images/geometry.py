"""Geometry of images, applied consistently to image, mask and boxes. All images are uint8, before and after.

Images are resized with antialiasing, masks take the value of the nearest pixel, boxes are moved and clipped. Functions
that crop have `min_visible`: boxes are removed if the fraction of their area inside the crop is smaller.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, rows
from lockstep_recipes.tasks.vision.images.options import Interpolation

Size = tuple[int, int]
"""(height, width) in pixels."""
Region = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""
Matrix = tuple[tuple[float, float, float], tuple[float, float, float]]
"""((a, b, c), (d, e, f)): the point (x, y) moves to (a x + b y + c, d x + e y + f)."""

MIN_VISIBLE = 0.1
_SUPPORT = {"bilinear": 1, "bicubic": 2}  # radius of the filter, in pixels of the smaller grid


def crop(picture: AnnotatedImage, region: Region, *, min_visible: float = MIN_VISIBLE) -> AnnotatedImage:
    """A region of the image. The image is not copied.

    Raises:
        ValueError: the region is empty or not inside the image.
    """
    top, left, height, width = region
    _, all_rows, all_columns = picture.image.shape
    inside = top >= 0 and left >= 0 and top + height <= all_rows and left + width <= all_columns
    if not inside or min(height, width) < 1:
        where = f"the image of {all_rows} x {all_columns} pixels"
        raise ValueError(f"region {region} (top, left, height, width) is empty or not inside {where}")
    boxes = picture.boxes
    moved = replace(
        picture,
        image=picture.image[:, top : top + height, left : left + width],
        mask=None if picture.mask is None else picture.mask[top : top + height, left : left + width],
        boxes=None if boxes is None else boxes - boxes.new_tensor([left, top, left, top]),
    )
    return moved if boxes is None else _clip_boxes(moved, min_visible)


def resize(picture: AnnotatedImage, size: Size, *, interpolation: Interpolation = "bilinear") -> AnnotatedImage:
    """The whole image, resized.

    Image pixels are within 2 levels of PIL's `resize`. Only bicubic interpolation that enlarges one side and reduces
    the other may differ more, because PIL and torch then start with different sides.
    """
    if size == picture.size:
        return picture
    return replace(
        picture,
        image=_interpolate(picture.image, interpolation, size=size),
        mask=None if picture.mask is None else _nearest(picture.mask, size, (0, 0, *size)),
        boxes=_scale_boxes(picture, size),
    )


def resize_crop(
    picture: AnnotatedImage,
    size: Size,
    region: Region,
    *,
    interpolation: Interpolation = "bilinear",
    min_visible: float = MIN_VISIBLE,
) -> AnnotatedImage:
    """The same as `crop(resize(picture, size), region)`, without most of the pixels that the crop would drop.

    Args:
        size: the size of the whole image after resizing.
        region: the region of the resized image to return.
    """
    if size == picture.size:
        return crop(picture, region, min_visible=min_visible)
    top, left, height, width = region
    small = _upper_left(picture.image, size, (top + height, left + width), interpolation)
    boxes = _scale_boxes(picture, size)
    moved = replace(
        picture,
        image=small[:, top : top + height, left : left + width],
        mask=None if picture.mask is None else _nearest(picture.mask, size, region),
        boxes=None if boxes is None else boxes - boxes.new_tensor([left, top, left, top]),
    )
    return _clip_boxes(moved, min_visible)


def fitted_size(size: Size, frame: Size) -> Size:
    """The largest size with the aspect ratio of `size` that fits into `frame`, in whole pixels, at least 1."""
    return scaled_size(size, min(frame[0] / size[0], frame[1] / size[1]), most=frame)


def scaled_size(size: Size, factor: float, *, most: Size | None = None) -> Size:
    """`size` times `factor`, in whole pixels, at least 1 and at most `most`."""
    height, width = (max(1, round(side * factor)) for side in size)
    return (height, width) if most is None else (min(height, most[0]), min(width, most[1]))


def letterbox(
    picture: AnnotatedImage,
    frame: Size,
    *,
    interpolation: Interpolation = "bilinear",
    fill: int = 0,
    mask_fill: int = 0,
) -> tuple[AnnotatedImage, Size]:
    """The whole image, resized so that it just fits into a frame, with padding at the right and at the bottom.

    Args:
        frame: (height, width) of the result.
        fill: grey level of the padding, 0 to 255.
        mask_fill: value of the mask in the padding.

    Returns:
        the image in its frame, and the (height, width) that it occupies there, from the upper left corner. So a point
        (x, y) of the result is the point (x * old width / width, y * old height / height) of the image.
    """
    inner = fitted_size(picture.size, frame)
    resized = resize(picture, inner, interpolation=interpolation)
    if inner == frame:
        return resized, inner
    bottom, right = frame[0] - inner[0], frame[1] - inner[1]
    return pad(resized, bottom=bottom, right=right, fill=fill, mask_fill=mask_fill), inner


def flip(picture: AnnotatedImage, *, vertical: bool = False) -> AnnotatedImage:
    """The image flipped left to right; with `vertical`, top to bottom."""
    height, width = picture.size
    boxes = picture.boxes
    if boxes is not None:
        x0, y0, x1, y1 = boxes.unbind(1)
        boxes = torch.stack([x0, height - y1, x1, height - y0] if vertical else [width - x1, y0, width - x0, y1], 1)
    return replace(
        picture,
        image=picture.image.flip(1 if vertical else 2),
        mask=None if picture.mask is None else picture.mask.flip(0 if vertical else 1),
        boxes=boxes,
    )


def pad(
    picture: AnnotatedImage,
    *,
    top: int = 0,
    left: int = 0,
    bottom: int = 0,
    right: int = 0,
    fill: int = 0,
    mask_fill: int = 0,
) -> AnnotatedImage:
    """The image with borders.

    Args:
        top, left, bottom, right: widths of the borders in pixels, at least 0.
        fill: grey level of the borders, 0 to 255.
        mask_fill: value of the mask in the borders.
    """
    _, height, width = picture.image.shape
    inner = (slice(top, top + height), slice(left, left + width))
    size = (top + height + bottom, left + width + right)
    image = picture.image.new_full((*size, len(picture.image)), fill)
    image[inner] = picture.image.permute(1, 2, 0)
    mask, boxes = picture.mask, picture.boxes
    if mask is not None:
        padded = mask.new_full(size, mask_fill)
        padded[inner] = mask
        mask = padded
    if boxes is not None:
        boxes = boxes + boxes.new_tensor([left, top, left, top])
    return AnnotatedImage(image.permute(2, 0, 1), mask, boxes, picture.box_indices)


def affine(
    picture: AnnotatedImage, matrix: Matrix, *, fill: int = 0, mask_fill: int = 0, min_visible: float = MIN_VISIBLE
) -> AnnotatedImage:
    """The image moved by an affine map, within its old frame.

    The image is interpolated bilinearly. A box becomes the smallest upright rectangle around its moved corners.

    Args:
        matrix: the map of points of the image, in pixels.
        fill: grey level of areas without a source pixel. mask_fill: value of the mask in these areas.

    Raises:
        ValueError: the map cannot be inverted.
    """
    height, width = picture.size
    x, y = _origins(matrix, (height, width))
    # grid_sample fills the outside with zero, so grey levels are counted from `fill`.
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], dim=-1)[None]
    counted = rows(picture.image)[None].permute(0, 3, 1, 2).to(torch.float32).sub_(fill)
    sampled = functional.grid_sample(counted, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    mask = picture.mask
    if mask is not None:
        columns, lines = x.floor().long(), y.floor().long()
        inside = (columns >= 0) & (columns < width) & (lines >= 0) & (lines < height)
        mask = mask[lines.clamp(0, height - 1), columns.clamp(0, width - 1)].masked_fill(~inside, mask_fill)
    moved = replace(
        picture,
        image=sampled[0].add_(fill + 0.5).clamp_(0, 255).to(torch.uint8),
        mask=mask,
        boxes=None if picture.boxes is None else _move_boxes(picture.boxes, matrix),
    )
    return _clip_boxes(moved, min_visible)


def about(point: tuple[float, float], matrix: Matrix) -> Matrix:
    """The same map as `matrix`, but relative to `point` (x, y) instead of the upper left corner."""
    (a, b, c), (d, e, f) = matrix
    x, y = point
    return (a, b, c + x - a * x - b * y), (d, e, f + y - d * x - e * y)


def rotation(degrees: float) -> Matrix:
    """The rotation about the upper left corner, counter-clockwise as the image is seen."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (cosine, sine, 0.0), (-sine, cosine, 0.0)


# ---- images


def _interpolate(
    image: Tensor, interpolation: Interpolation, *, size: Size | None = None, scale: tuple[float, float] | None = None
) -> Tensor:
    # With a batch dimension, torch recognises that the memory is channels_last (1.5 times as fast).
    batch = rows(image)[None].permute(0, 3, 1, 2)
    resized: Tensor = functional.interpolate(
        batch, size=size, scale_factor=scale, mode=interpolation, antialias=True, align_corners=False
    )
    return resized[0]


def _upper_left(image: Tensor, size: Size, wanted: Size, interpolation: Interpolation) -> Tensor:
    """At least `wanted` rows and columns of the image resized to `size`, from the rows and columns they depend on."""
    height, width = image.shape[1:]
    scale = (size[0] / height, size[1] / width)
    needed = [
        min(side, math.ceil(count / factor + _SUPPORT[interpolation] / min(factor, 1)) + 1)
        for side, count, factor in zip((height, width), wanted, scale, strict=True)
    ]
    if needed == [height, width]:
        return _interpolate(image, interpolation, size=size)
    part = _interpolate(image[:, : needed[0], : needed[1]], interpolation, scale=scale)
    # torch rounds the size down. If that gives the old size, it copies the pixels and ignores the scale.
    enough = all(side >= count for side, count in zip(part.shape[1:], wanted, strict=True))
    copied = any(side == old and factor != 1 for side, old, factor in zip(part.shape[1:], needed, scale, strict=True))
    return part if enough and not copied else _interpolate(image, interpolation, size=size)


# ---- masks


def _nearest(mask: Tensor, size: Size, region: Region) -> Tensor:
    """A region of the mask resized to `size`: the values at the centres of the new pixels."""
    top, left, height, width = region
    lines = ((2 * torch.arange(top, top + height) + 1) * mask.shape[0]) // (2 * size[0])
    columns = ((2 * torch.arange(left, left + width) + 1) * mask.shape[1]) // (2 * size[1])
    return mask.index_select(0, lines).index_select(1, columns)


def _origins(matrix: Matrix, size: Size) -> tuple[Tensor, Tensor]:
    """The source positions of the centres of the new pixels: x and y in pixels, each (height, width)."""
    (a, b, c), (d, e, f) = matrix
    determinant = a * e - b * d
    if determinant == 0:
        raise ValueError(f"the map {matrix} cannot be inverted")
    x = torch.arange(size[1], dtype=torch.float32) + (0.5 - c)
    y = (torch.arange(size[0], dtype=torch.float32) + (0.5 - f))[:, None]
    return (e * x - b * y) / determinant, (a * y - d * x) / determinant


# ---- boxes


def _scale_boxes(picture: AnnotatedImage, size: Size) -> Tensor | None:
    if picture.boxes is None:
        return None
    down, across = size[0] / picture.size[0], size[1] / picture.size[1]
    return picture.boxes * picture.boxes.new_tensor([across, down, across, down])


def _move_boxes(boxes: Tensor, matrix: Matrix) -> Tensor:
    (a, b, c), (d, e, f) = matrix
    x, y = boxes[:, [0, 2, 0, 2]], boxes[:, [1, 1, 3, 3]]
    moved_x, moved_y = a * x + b * y + c, d * x + e * y + f
    return torch.stack([moved_x.amin(1), moved_y.amin(1), moved_x.amax(1), moved_y.amax(1)], dim=1)


def _clip_boxes(picture: AnnotatedImage, min_visible: float) -> AnnotatedImage:
    """The image with boxes clipped to its frame, without boxes that are mostly outside."""
    boxes, indices = picture.boxes, picture.box_indices
    if boxes is None or indices is None:
        return picture
    clipped, kept = _visible(boxes, (0, 0, *picture.size), min_visible)
    return AnnotatedImage(picture.image, picture.mask, clipped[kept], indices[kept])


def any_box_in(boxes: Tensor, region: Region, *, min_visible: float = MIN_VISIBLE) -> bool:
    """True if `crop` to this region keeps a box.

    Args:
        boxes: (n, 4) left, top, right, bottom, in pixels.
        min_visible: as in `crop`.
    """
    return bool(_visible(boxes, region, min_visible)[1].any())


def _visible(boxes: Tensor, region: Region, min_visible: float) -> tuple[Tensor, Tensor]:
    """Boxes clipped to a region, and which of them are kept."""
    top, left, height, width = region
    x, y = boxes[:, 0::2].clamp(left, left + width), boxes[:, 1::2].clamp(top, top + height)
    clipped = torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], dim=1)
    visible = _area(clipped)
    return clipped, (visible > 0) & (visible >= min_visible * _area(boxes))


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
