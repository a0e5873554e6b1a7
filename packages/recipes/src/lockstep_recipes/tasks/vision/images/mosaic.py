"""Mosaic: four images in one, with their masks and boxes.

As in mixup (`images/mix.py`), each sample is changed individually: the other images are drawn from the whole data set
with the sample's own random numbers, so the result does not depend on ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, rows
from lockstep_recipes.tasks.vision.images.augment import train_image
from lockstep_recipes.tasks.vision.images.geometry import Size
from lockstep_recipes.tasks.vision.images.options import AugmentOptions

_LEAST = 0.25  # the shortest side of a quarter, as a fraction of the frame's side


def draw_others(samples: int, probability: float) -> list[int]:
    """The indices of the three samples that are combined with a sample in a mosaic, uniform over `samples` samples.
    Empty: no mosaic.

    Draws from torch's global generator: whether to make a mosaic, and the three indices.
    """
    joins = float(torch.rand(())) < probability
    others: list[int] = torch.randint(samples, (3,)).tolist()
    return others if joins else []


def mosaic(
    images: Sequence[AnnotatedImage], size: int | Size, options: AugmentOptions, *, mask_fill: int = 255
) -> AnnotatedImage:
    """Four training images in the quarters of one. The point where the quarters meet is random.

    Each image is processed by `train_image` separately, at the size of its quarter. `scale_jitter` scales it as for the
    whole frame, so that objects keep their sizes, and crops the quarter.

    Source: Bochkovskiy et al. 2020, YOLOv4, arXiv:2004.10934, section 3.3.

    Args:
        images: four, upper left, upper right, lower left and lower right. All have boxes or none; all have masks or
            none.
        size: side, or (height, width), of the result in pixels, at least 4.
        options: options of `train_image`.
        mask_fill: value of the mask outside the images.

    Returns:
        an image of this size, channels_last. Its `box_indices` are indices into the concatenated boxes of the four
        input images: take labels from `torch.cat([labels of the first, ..., of the fourth])`.

    Raises:
        ValueError: there are not four images.
    """
    if (count := len(images)) != 4:
        raise ValueError(f"a mosaic has 4 images, not {count}")
    height, width = frame = (size, size) if isinstance(size, int) else size
    down, across = (_LEAST + (1 - 2 * _LEAST) * torch.rand(2, dtype=torch.float64)).tolist()
    middle, centre = round(height * down), round(width * across)
    places = [
        (lines, columns) for lines in ((0, middle), (middle, height)) for columns in ((0, centre), (centre, width))
    ]
    image = rows(images[0].image).new_empty((height, width, len(images[0].image)))
    mask = None if images[0].mask is None else images[0].mask.new_empty(frame)
    boxes, indices, before = [], [], 0
    for picture, ((top, bottom), (left, right)) in zip(images, places, strict=True):
        part = train_image(picture, (bottom - top, right - left), options, mask_fill=mask_fill, fit=frame)
        image[top:bottom, left:right] = rows(part.image)
        if mask is not None and part.mask is not None:
            mask[top:bottom, left:right] = part.mask
        if picture.boxes is not None and part.boxes is not None and part.box_indices is not None:
            boxes.append(part.boxes + part.boxes.new_tensor([left, top, left, top]))
            indices.append(part.box_indices + before)
            before += len(picture.boxes)
    return AnnotatedImage(
        image.permute(2, 0, 1), mask, torch.cat(boxes) if boxes else None, torch.cat(indices) if indices else None
    )
