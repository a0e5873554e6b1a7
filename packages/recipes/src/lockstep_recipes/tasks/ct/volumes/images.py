"""Convert slices in Hounsfield units to the images of a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep_recipes.tasks.ct.volumes.windows import HounsfieldWindow, windowed
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, contiguous, stack_images
from lockstep_recipes.tasks.vision.images.augment import eval_image, train_image
from lockstep_recipes.tasks.vision.images.geometry import letterbox
from lockstep_recipes.tasks.vision.images.options import AugmentOptions


def slice_images(
    slices: npt.NDArray[np.int16],
    windows: tuple[HounsfieldWindow, ...],
    size: int,
    *,
    augment: AugmentOptions | None,
    keep_shape: bool = False,
) -> Tensor:
    """Slices as images, with a channel for each HU window.

    Random changes are the same for all slices of the call: the same crop, flip, brightness and so on. Contrast is
    changed about the mean of each slice.

    Args:
        slices: int16 (n, rows, columns) in HU.
        size: height and width of the images in pixels.
        augment: random changes, drawn from torch's global generator. Hue and saturation should stay 0, since channels
            are not colours. None: no random changes.
        keep_shape: without `augment`, whether a slice that is not square keeps its aspect ratio and is padded with 0 at
            the right and at the bottom, as `augment` does with `crop: fit`. Otherwise it is stretched to a square.

    Returns:
        uint8 (n, windows, size, size), channels_last in memory.
    """
    seed = None if augment is None else int(torch.randint(1 << 62, ()))
    pictures = []
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        for pixels in slices:  # one slice at a time: the pixels of all would not fit into the processor's cache
            picture = AnnotatedImage.from_pixels(windowed(np.ascontiguousarray(pixels), windows))
            if augment is not None and seed is not None:
                torch.default_generator.manual_seed(seed)  # each slice draws the same numbers
                picture = train_image(picture, size, augment)
            elif keep_shape:
                picture = contiguous(letterbox(picture, (size, size))[0])
            else:
                picture = eval_image(picture, size, resize=None)
            pictures.append(picture.image)
    return stack_images(pictures)
