"""Convert pixels to the numbers that a model takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Means of red, green and blue over ImageNet's training images, as fractions of 255. These are the usual values."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviations of red, green and blue, as fractions of 255."""

_GREY = 0.5
_Key = tuple[tuple[float, ...], tuple[float, ...], torch.device, torch.dtype]
_CONSTANTS: dict[_Key, tuple[Tensor, Tensor]] = {}


def usual_mean_and_std(channels: int) -> tuple[list[float], list[float]]:
    """Default mean and standard deviation of each channel: ImageNet's for three channels, otherwise 0.5."""
    if channels == 3:
        return list(IMAGENET_MEAN), list(IMAGENET_STD)
    return [_GREY] * channels, [_GREY] * channels


def normalise(
    images: Tensor, mean: Sequence[float], std: Sequence[float], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(images / 255 - mean) / std for each channel.

    Call it on the device: a uint8 batch needs a quarter of the transfer from the loader to the device.

    Args:
        images: (batch, channels, height, width), values from 0 to 255: uint8, or floating-point after mixing.
        mean, std: a number for each channel, as fractions of 255.
        dtype: the number format of the result.

    Returns:
        (batch, channels, height, width) on the device of `images`, in their memory format.

    Raises:
        ValueError: the lengths of `mean` and `std` differ from the number of channels.
    """
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise ValueError(f"images with {channels} channels, {len(mean)} means and {len(std)} standard deviations")
    divisor, offset = _constants(images, tuple(mean), tuple(std), dtype)
    return torch.addcdiv(offset, images.to(dtype), divisor)


def _constants(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """255 std and -mean / std, each (channels, 1, 1).

    They are cached, because copying to a GPU makes the host wait.
    """
    key = (mean, std, images.device, dtype)
    # Tensors of a different class, such as fake tensors that only have a shape, must not be cached for ordinary
    # tensors.
    kept = _CONSTANTS.get(key) if type(images) is Tensor else None
    if kept is None:
        with torch.inference_mode(False):
            exact = torch.tensor([mean, std], dtype=torch.float64)
            pair = torch.stack([255 * exact[1], -exact[0] / exact[1]]).reshape(2, -1, 1, 1)
            divisor, offset = pair.to(device=images.device, dtype=dtype).unbind()
        kept = divisor, offset
        if type(images) is Tensor:
            _CONSTANTS[key] = kept
    return kept
