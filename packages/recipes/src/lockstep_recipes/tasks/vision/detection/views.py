"""Views of an image for a detector: whole, or overlapping tiles, each fitted into a square; and the inverse mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep_recipes.tasks.vision.detection.options import DetectionOptions
from lockstep_recipes.tasks.vision.images import geometry
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, contiguous
from lockstep_recipes.tasks.vision.images.geometry import Region
from lockstep_recipes.tasks.vision.images.options import Interpolation
from lockstep_recipes.tasks.vision.use_images import tiles_along


@dataclass(frozen=True)
class View:
    """An image, or a tile of it, as a detector sees it."""

    picture: AnnotatedImage
    """A square with the boxes in it, and padding at the right and at the bottom."""
    shape: tuple[int, int]
    """Height and width in pixels without padding."""
    scale: tuple[float, float]
    """Pixels of the square per pixel of the image: across, down."""
    offset: tuple[int, int]
    """The offset of the tile in the image, in pixels of the image: from the left, from the top."""


def fitted(
    picture: AnnotatedImage, size: int, *, fill: int, interpolation: Interpolation, offset: tuple[int, int] = (0, 0)
) -> View:
    """The image, resized so that all of it just fits into a square, with padding at the right and at the bottom.

    Args:
        size: side of the square in pixels.
        fill: grey level of the padding.
        offset: kept in the result.
    """
    height, width = picture.size
    inside, shape = geometry.letterbox(picture, (size, size), interpolation=interpolation, fill=fill)
    return View(contiguous(inside), shape, (shape[1] / width, shape[0] / height), offset)


def tiles(size: tuple[int, int], side: int, overlap: float) -> list[Region]:
    """Equal tiles that cover an image, row by row. An image that is not larger than a tile has one tile.

    Args:
        size: height and width of the image in pixels.
        side: the longest side of a tile in pixels.
        overlap: the minimum fraction of a tile that overlaps the next tile.

    Returns:
        (top, left, height, width) in pixels.
    """
    rows, columns = (tiles_along(length, side, overlap) for length in size)
    return [(top, left, height, width) for top, height in rows for left, width in columns]


def views(picture: AnnotatedImage, size: int, options: DetectionOptions) -> list[View]:
    """The whole image as one view; or with `options.tile`, overlapping tiles of at most that many pixels per side.

    Args:
        size: side of each view in pixels.
        options: a box is removed from a tile if the fraction of its area inside the tile is below
            `augment.min_visible`.
    """
    tile, augment = options.tile, options.augment
    look: dict[str, Any] = {"fill": augment.fill, "interpolation": augment.interpolation}
    if tile is None or max(picture.size) <= tile:
        return [fitted(picture, size, **look)]
    found = []
    for region in tiles(picture.size, tile, options.tile_overlap):
        part = geometry.crop(picture, region, min_visible=augment.min_visible)
        found.append(fitted(part, size, **look, offset=(region[1], region[0])))
    return found


def in_image(boxes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Boxes of views in pixels of the original images.

    Args:
        boxes: (views, entries, 4), in pixels of the views.
        scale, offset: (views, 2), as in `View`.
    """
    twice = torch.cat([scale, scale], -1)[:, None], torch.cat([offset, offset], -1)[:, None]
    return boxes / twice[0].to(boxes) + twice[1].to(boxes)
