"""Prepare an image for a batch: with random changes in training, deterministically in evaluation.

All random numbers are drawn from torch's global generator, which the loader seeds for each sample by seed, epoch and
index.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.images import color, geometry
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, contiguous, rows
from lockstep_recipes.tasks.vision.images.geometry import Region, Size
from lockstep_recipes.tasks.vision.images.options import (
    AugmentOptions,
    ColorJitterOptions,
    Interpolation,
    RandomErasingOptions,
)
from lockstep_recipes.tasks.vision.images.policies import rand_augment, trivial_augment

__all__ = ["AugmentOptions", "eval_image", "train_image"]

_ATTEMPTS = 10  # rectangles to draw before the centre is used


def train_image(
    picture: AnnotatedImage, size: int | Size, options: AugmentOptions, *, mask_fill: int = 255, fit: Size | None = None
) -> AnnotatedImage:
    """A training image after the random changes that `options` describe. The input is not modified.

    Crop, flips, and the geometry of RandAugment and TrivialAugment are applied to image, mask and boxes. Colour and
    erasing change only the image.

    Args:
        size: side, or (height, width), of the result in pixels.
        mask_fill: value of the mask outside the image: the value that the loss ignores.
        fit: for scale_jitter, the (height, width) into which the image fits at the factor 1. None: `size`.

    Returns:
        An image of this size, contiguous, channels_last.

    Raises:
        ValueError: the mask's type cannot hold `mask_fill`.
    """
    frame = (size, size) if isinstance(size, int) else size
    if picture.mask is not None:
        dtype = picture.mask.dtype
        limits = torch.iinfo(dtype)
        if not limits.min <= mask_fill <= limits.max:
            raise ValueError(f"a mask of {dtype} cannot hold mask_fill={mask_fill}")
    picture = _crop(picture, frame, options, mask_fill, fit=fit or frame)
    if options.flip and _happens(options.flip):
        picture = geometry.flip(picture)
    if options.vertical_flip and _happens(options.vertical_flip):
        picture = geometry.flip(picture, vertical=True)
    if options.randaugment is not None:
        chosen = options.randaugment
        picture = rand_augment(
            picture, operations=chosen.operations, magnitude=chosen.magnitude, options=options, mask_fill=mask_fill
        )
    if options.trivialaugment:
        picture = trivial_augment(picture, options=options, mask_fill=mask_fill)
    jitter = options.color_jitter
    if jitter is not None and _happens(jitter.probability):
        picture = replace(picture, image=_jitter(picture.image, jitter))
    erasing = options.random_erasing
    if erasing is not None and _happens(erasing.probability):
        picture = replace(picture, image=_erase(picture.image, erasing, options.fill))
    return contiguous(picture)


def eval_image(
    picture: AnnotatedImage, size: int, *, resize: int | None, interpolation: Interpolation = "bilinear"
) -> AnnotatedImage:
    """An evaluation image: resized and centre-cropped.

    Args:
        size: side of the result in pixels.
        resize: length of the image's shorter side before the crop, usually 8/7 of `size`, at least `size`. None: the
            whole image is resized to `size`, whatever its aspect ratio.

    Raises:
        UsageError: `resize` is smaller than `size`.
    """
    if resize is None:
        return contiguous(geometry.resize(picture, (size, size), interpolation=interpolation))
    if resize < size:
        what = f"images are resized to {resize} pixels, but the crop needs {size}"
        raise UsageError(what, remedy=f"resize to {size} or more")
    # The longer side is rounded down, as in torchvision's `Resize`.
    (height, width), shorter = picture.size, min(picture.size)
    whole = max(int(resize * height / shorter), size), max(int(resize * width / shorter), size)
    # Halves are rounded down, as in the image processors of transformers, which exported models use.
    top, left = (whole[0] - size) // 2, (whole[1] - size) // 2
    return contiguous(geometry.resize_crop(picture, whole, (top, left, size, size), interpolation=interpolation))


def _crop(picture: AnnotatedImage, size: Size, options: AugmentOptions, mask_fill: int, *, fit: Size) -> AnnotatedImage:
    if options.crop == "random_resized":
        picture = geometry.crop(picture, _resized_region(picture, size, options), min_visible=options.min_visible)
        return geometry.resize(picture, size, interpolation=options.interpolation)
    if options.crop == "scale_jitter":
        return _scale_jitter(picture, size, options, mask_fill, fit=fit)
    if options.crop == "fit":
        fill, interpolation = options.fill, options.interpolation
        return geometry.letterbox(picture, size, interpolation=interpolation, fill=fill, mask_fill=mask_fill)[0]
    if picture.image.shape[1:] != size:
        picture = geometry.resize(picture, size, interpolation=options.interpolation)
    most = options.shift
    if options.crop == "resize" or most == 0:
        return picture
    top, left = torch.randint(0, 2 * most + 1, (2,)).tolist()
    picture = geometry.pad(
        picture, top=most, left=most, bottom=most, right=most, fill=options.fill, mask_fill=mask_fill
    )
    return geometry.crop(picture, (top, left, *size), min_visible=options.min_visible)


def _resized_region(picture: AnnotatedImage, size: Size, options: AugmentOptions) -> Region:
    """The region of the image to resize."""
    shape = (options.ratio[0] * size[1] / size[0], options.ratio[1] * size[1] / size[0])
    boxes = _boxes_to_keep(picture, options)
    for _ in range(_ATTEMPTS):
        region = _rectangle(picture.size, options.scale, shape) or _middle(picture.size, shape)
        if boxes is None or geometry.any_box_in(boxes, region, min_visible=options.min_visible):
            return region
    return 0, 0, *picture.size


def _scale_jitter(
    picture: AnnotatedImage, size: Size, options: AugmentOptions, mask_fill: int, *, fit: Size
) -> AnnotatedImage:
    """The image at a random scale. A side that is longer than the frame is cropped, and a shorter side is padded, both
    at random offsets."""
    boxes, (height, width) = _boxes_to_keep(picture, options), picture.size
    fits = min(fit[0] / height, fit[1] / width)
    for _ in range(_ATTEMPTS):
        drawn, down, across = torch.rand(3, dtype=torch.float64).tolist()
        factor = fits * (options.jitter[0] + (options.jitter[1] - options.jitter[0]) * drawn)
        whole = geometry.scaled_size((height, width), factor)
        (top, high, above), (left, wide, before) = _place(whole[0], size[0], down), _place(whole[1], size[1], across)
        if boxes is None:
            break
        scaled = boxes * boxes.new_tensor([whole[1] / width, whole[0] / height] * 2)
        if geometry.any_box_in(scaled, (top, left, high, wide), min_visible=options.min_visible):
            break
    else:
        whole = high, wide = geometry.fitted_size((height, width), size)
        top = left = above = before = 0
    picture = geometry.resize_crop(
        picture, whole, (top, left, high, wide), interpolation=options.interpolation, min_visible=options.min_visible
    )
    below, after = size[0] - high - above, size[1] - wide - before
    if not (above or before or below or after):
        return picture
    sides = {"top": above, "left": before, "bottom": below, "right": after}
    return geometry.pad(picture, **sides, fill=options.fill, mask_fill=mask_fill)


def _place(length: int, frame: int, share: float) -> tuple[int, int, int]:
    """The start and the length of the part of a side to keep, and the padding before it. `share` (0 to 1) chooses the
    offset."""
    begin = min(int(share * (abs(length - frame) + 1)), abs(length - frame))
    return (begin, frame, 0) if length > frame else (0, length, begin)


def _boxes_to_keep(picture: AnnotatedImage, options: AugmentOptions) -> Tensor | None:
    """The boxes if a crop must contain at least one of them. None: any crop is acceptable."""
    boxes = picture.boxes
    return boxes if options.keep_boxes and boxes is not None and len(boxes) else None


def _happens(probability: float) -> bool:
    return float(torch.rand(())) < probability


def _uniform(least: float, greatest: float) -> float:
    return least + (greatest - least) * float(torch.rand(()))


def _rectangle(size: Size, area: tuple[float, float], ratio: tuple[float, float]) -> Region | None:
    """A random rectangle inside an image, or None if ten drawn rectangles did not fit.

    Args:
        area: range of its area, as a fraction of the image's.
        ratio: range of width / height, whose logarithm is drawn uniformly.
    """
    height, width = size
    logarithms = math.log(ratio[0]), math.log(ratio[1])
    for share, shape, down, across in torch.rand(_ATTEMPTS, 4, dtype=torch.float64).tolist():
        pixels = height * width * (area[0] + (area[1] - area[0]) * share)
        wide = math.exp(logarithms[0] + (logarithms[1] - logarithms[0]) * shape)
        rows_, columns = round(math.sqrt(pixels / wide)), round(math.sqrt(pixels * wide))
        if 0 < rows_ <= height and 0 < columns <= width:
            return int(down * (height - rows_ + 1)), int(across * (width - columns + 1)), rows_, columns
    return None


def _middle(size: Size, ratio: tuple[float, float]) -> Region:
    """The largest centred rectangle of an image with width / height in the range."""
    height, width = size
    rows_, columns = height, width
    if width / height < ratio[0]:
        rows_ = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        columns = min(width, max(1, round(height * ratio[1])))
    return (height - rows_) // 2, (width - columns) // 2, rows_, columns


def _jitter(image: Tensor, options: ColorJitterOptions) -> Tensor:
    """Random factors in random order, as in torchvision's `ColorJitter`."""
    for which in torch.randperm(4).tolist():
        name = ("brightness", "contrast", "saturation", "hue")[which]
        most = getattr(options, name)
        if most and name == "hue":
            image = color.hue(image, _uniform(-most, most))
        elif most:
            image = getattr(color, name)(image, _uniform(max(0.0, 1 - most), 1 + most))
    return image


def _erase(image: Tensor, options: RandomErasingOptions, fill: int) -> Tensor:
    region = _rectangle((image.shape[1], image.shape[2]), options.area, options.ratio)
    if region is None:
        return image
    top, left, height, width = region
    result = rows(image).clone()  # the image may belong to the data set
    place = result[top : top + height, left : left + width]
    if options.content == "noise":
        place.copy_(torch.randint(0, 256, place.shape, dtype=torch.uint8))
    else:
        place.fill_(fill)
    return result.permute(2, 0, 1)
