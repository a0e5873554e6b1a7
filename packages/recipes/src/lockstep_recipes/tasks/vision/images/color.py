"""Colour operations on an image: uint8 (channels, height, width), 1 or 3 channels, channels_last in memory.

The results are those of PIL's ImageEnhance and ImageOps, within 1 level: PIL truncates, these functions round. For an
image of 224x224 pixels, PIL needs 0.2 ms to convert a tensor and back. Torch does most of the operations in about that
time. `equalize` and `hue` take longer in torch, so they call PIL. To measure this, run `python
benchmarks/image_pipeline.py --operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep_recipes.tasks.vision.images.annotated import rows

if TYPE_CHECKING:
    from PIL import Image as PILImage

_LUMA = torch.tensor([0.299, 0.587, 0.114])  # ITU-R BT.601


def brightness(image: Tensor, factor: float) -> Tensor:
    """Values times `factor`: 0 gives black, 1 the same image."""
    return _to_uint8(image.to(torch.float32).mul_(factor))


def contrast(image: Tensor, factor: float) -> Tensor:
    """Distances from the mean grey level times `factor`: 0 gives grey, 1 the same image."""
    values = rows(image).to(torch.float32)
    mean = int(_grey(values).add_(0.5).floor_().mean() + 0.5)
    return _to_uint8(values.mul_(factor).add_((1 - factor) * mean).permute(2, 0, 1))


def saturation(image: Tensor, factor: float) -> Tensor:
    """Distances of the channels from grey times `factor`: 0 gives grey, 1 the same image. Grey images stay."""
    if len(image) == 1:
        return image
    values = rows(image).to(torch.float32)
    grey = _grey(values).mul_(1 - factor)
    return _to_uint8(values.mul_(factor).add_(grey[..., None]).permute(2, 0, 1))


def sharpness(image: Tensor, factor: float) -> Tensor:
    """Distances from a smoothed image times `factor`: 0 smooths, 1 gives the same image. Pixels at the edges stay.

    The smoothing has the weights of PIL's filter SMOOTH: 5/13 for the pixel, 1/13 for each of its eight neighbours.
    """
    if min(image.shape[1:]) < 3:
        return image
    values = rows(image).to(torch.int16)
    inner = values[1:-1, 1:-1]
    lines = values[:-2] + values[1:-1] + values[2:]
    thirteen = lines[:, :-2] + lines[:, 1:-1] + lines[:, 2:] + 4 * inner
    smooth = thirteen.to(torch.float32).div_(13).add_(0.5).floor_()
    result = rows(image).clone()
    result[1:-1, 1:-1] = _to_uint8(smooth.mul_(1 - factor).add_(inner, alpha=factor))
    return result.permute(2, 0, 1)


def posterize(image: Tensor, bits: int) -> Tensor:
    """Only the highest `bits` bits of each value; the others become 0."""
    return image & (0xFF << (8 - bits) & 0xFF)


def solarize(image: Tensor, threshold: float) -> Tensor:
    """Values of at least `threshold` are inverted."""
    values = rows(image).numpy()
    inverted = np.negative((values >= threshold).view(np.uint8))  # 255 where True
    return torch.from_numpy(values ^ inverted).permute(2, 0, 1)


def auto_contrast(image: Tensor) -> Tensor:
    """Each channel is stretched so that its minimum is 0 and its maximum 255. Constant channels do not change."""
    values = rows(image)
    least = values.amin(0).amin(0).to(torch.float32)
    greatest = values.amax(0).amax(0).to(torch.float32)
    one_value = greatest == least
    factor = torch.where(one_value, 1.0, 255 / (greatest - least))
    offset = torch.where(one_value, 0.0, -least * factor)
    return _to_uint8(values.to(torch.float32).mul_(factor).add_(offset).permute(2, 0, 1))


def equalize(image: Tensor) -> Tensor:
    """The values of each channel are spread so that they become about equally frequent."""
    from PIL import ImageOps

    return _by_pil(image, ImageOps.equalize)


def hue(image: Tensor, turn: float) -> Tensor:
    """Hues moved by `turn` of the colour circle, -0.5 to 0.5. Grey images stay.

    PIL's hues and saturations have 8 bits, so colours may be off by about 6 levels, even at `turn` 0.
    """
    if len(image) == 1:
        return image
    from PIL import Image

    def moved(pil: PILImage.Image) -> PILImage.Image:
        hues, saturations, values = pil.convert("HSV").split()
        hues = hues.point([(level + round(turn * 255)) % 256 for level in range(256)])
        return Image.merge("HSV", (hues, saturations, values)).convert("RGB")

    return _by_pil(image, moved)


def _by_pil(image: Tensor, change: Callable[[PILImage.Image], PILImage.Image]) -> Tensor:
    from PIL import Image

    pixels = rows(image).contiguous().numpy()
    changed = np.array(change(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)))
    return torch.from_numpy(changed.reshape(pixels.shape)).permute(2, 0, 1)


def _grey(values: Tensor) -> Tensor:
    """(height, width) grey levels of (height, width, channels), in new memory."""
    return values[..., 0].clone() if values.shape[2] == 1 else values @ _LUMA


def _to_uint8(values: Tensor) -> Tensor:
    """Rounded and clipped, in the memory format of `values`, which are overwritten."""
    return values.add_(0.5).clamp_(0, 255).to(torch.uint8)
