"""A small U-Net that trains from scratch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Literal["group", "batch"]
_MOST_GROUPS = 8
_WIDEST = 8  # times the width of the first level


class UNet(nn.Module):
    """An encoder that repeatedly halves the image, and a decoder that concatenates the encoder's features of each size.

    (batch, channels, height, width) -> (batch, classes, ceil(height / stride), ceil(width / stride)) logits, for any
    height and width.

    The blocks are residual (He et al., arXiv:1512.03385), the rest follows Ronneberger et al., arXiv:1505.04597. With
    `norm: group`, the result for an image does not depend on other images.

    Args:
        width: channels of the first level. Each level has twice the channels of the level before, up to 8 times.
        depth: how many times the image is halved after the stem.
        blocks: residual blocks in each level of the encoder. Each level of the decoder has a single block.
        stride: the stride of the stem, 1 or more. With 2, logits have half the height and width of the image, and a
            step takes a quarter of the time.
        norm: GroupNorm or BatchNorm.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        width: int = 32,
        depth: int = 4,
        blocks: int = 1,
        stride: int = 1,
        norm: Norm = "group",
    ) -> None:
        super().__init__()
        widths = [width * min(2**level, _WIDEST) for level in range(depth + 1)]
        size = 3 if stride < 3 else stride + 3
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, size, stride, padding=(size - 1) // 2, bias=False), _norm(norm, width), nn.ReLU()
        )

        def level_of(level: int, outputs: int) -> nn.Sequential:
            first = Block(widths[max(level - 1, 0)], outputs, norm=norm, stride=2 if level else 1)
            return nn.Sequential(first, *(Block(outputs, outputs, norm=norm) for _ in range(blocks - 1)))

        self.encoder = nn.ModuleList(level_of(level, outputs) for level, outputs in enumerate(widths))
        self.decoder = nn.ModuleList(
            Block(widths[level + 1] + widths[level], widths[level], norm=norm) for level in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        levels = []
        for level in self.encoder:
            features = level(features)
            levels.append(features)
        levels.pop()
        for block in self.decoder:
            skip = levels.pop()
            features = functional.interpolate(features, size=skip.shape[-2:], mode="nearest")
            features = block(features, skip)
        logits: Tensor = self.head(features)
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions with normalisation, added to their input: (batch, inputs, h, w) -> (batch, outputs, h /
    stride, w / stride)."""

    def __init__(self, inputs: int, outputs: int, *, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(norm, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = _norm(norm, outputs)
        changes = stride > 1 or inputs != outputs
        self.stride = stride
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if changes else nn.Identity()

    def forward(self, features: Tensor, skip: Tensor | None = None) -> Tensor:
        """The features of the block; `skip`, of the same height and width, is concatenated to the input's channels."""
        if skip is not None:
            features = torch.cat([features, skip], dim=1)
        inner = functional.relu(self.first_norm(self.first(features)), inplace=True)
        inner = self.second_norm(self.second(inner))
        # As a convolution with a stride: otherwise the backward pass writes out of bounds for some numbers of channels,
        # with channels_last on the CPU (torch 2.13).
        return functional.relu(inner + self.shortcut(features[..., :: self.stride, :: self.stride]), inplace=True)


def _norm(norm: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(_MOST_GROUPS, channels), channels)
