"""A small anchor-free detector: for each cell, a score for being the centre of an object, and the box around it.

It trains from scratch in minutes, and needs only torch. The heads, and the targets in `center_losses`, are those of Liu
et al. 2019, Training-Time-Friendly Network for Real-Time Object Detection, arXiv:1909.00700, which extends Zhou et al.
2019, Objects as Points, arXiv:1904.07850. The features come from a residual network with a feature pyramid (Lin et al.
2017, arXiv:1612.03144), whose finest level is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep_recipes.tasks.vision.detection.overlap import suppressed

STRIDE = 4
"""Pixels of the image between two cells of the output."""
_FIRST_SIDE = 4.0  # distance from a centre to a side before training, in cells
_PRIOR = 0.01  # score of every cell before training, as in Lin et al. 2017, Focal Loss, arXiv:1708.02002, section 4.1
_CHANNELS_OF_GROUP = 16  # Wu and He 2018, Group Normalization, arXiv:1803.08494, table 3
_LARGEST = 8.0  # logarithm of the largest distance, in cells: exp() must stay finite

Norm = Callable[[int], nn.Module]


class CenterOutput(NamedTuple):
    """The output of the detector for each cell: (height / 4, width / 4) cells, rounded up."""

    logits: Tensor
    """(images, classes, rows, columns): the probability of the centre of an object of the class."""
    distances: Tensor
    """(images, 4, rows, columns): pixels from the middle of the cell to the left, top, right and bottom edge."""


def group_norm(channels: int) -> nn.Module:
    """GroupNorm with 16 channels per group."""
    return nn.GroupNorm(max(1, channels // _CHANNELS_OF_GROUP), channels)


class CenterDetector(nn.Module):
    """(images, channels, height, width), normalised -> `CenterOutput`.

    Args:
        width: channels of the features at a quarter of the size of the images. They double from level to level, up to
            eight times.
        depth: residual blocks of each level.
        levels: levels of the pyramid: 4 have strides of 4, 8, 16 and 32 pixels.
        norm: makes the normalisation layer for a number of channels.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        width: int = 32,
        depth: int = 1,
        levels: int = 4,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        widths = [width * min(2**level, 8) for level in range(levels)]
        self.stem = nn.Sequential(
            _convolution(channels, width // 2, norm, stride=2), _convolution(width // 2, width, norm, stride=2)
        )
        self.stages = nn.ModuleList()
        for level, outputs in enumerate(widths):
            inputs = widths[max(0, level - 1)]
            first = _Block(inputs, outputs, norm, stride=1 if level == 0 else 2)
            self.stages.append(nn.Sequential(first, *(_Block(outputs, outputs, norm) for _ in range(depth - 1))))
        features = 2 * width
        self.laterals = nn.ModuleList(nn.Conv2d(inputs, features, 1) for inputs in widths)
        self.merge = _convolution(features, features, norm)
        self.class_head = nn.Sequential(_convolution(features, features, norm), nn.Conv2d(features, classes, 1))
        self.box_head = nn.Sequential(_convolution(features, features, norm), nn.Conv2d(features, 4, 1))
        for head, bias in ((self.class_head, math.log(_PRIOR / (1 - _PRIOR))), (self.box_head, 0.0)):
            last = head[-1]
            assert isinstance(last, nn.Conv2d)
            assert last.bias is not None
            nn.init.normal_(last.weight, std=0.01)
            nn.init.constant_(last.bias, bias)

    def forward(self, images: Tensor) -> CenterOutput:
        levels = []
        features = self.stem(images)
        for stage in self.stages:
            features = stage(features)
            levels.append(features)
        merged: Tensor | None = None
        for lateral, level in zip(reversed(self.laterals), reversed(levels), strict=True):
            own = lateral(level)
            merged = own if merged is None else own + functional.interpolate(merged, own.shape[-2:], mode="nearest")
        features = self.merge(merged)
        logits, logarithms = self.class_head(features), self.box_head(features)
        if logits.dtype != torch.float64:
            logits, logarithms = logits.float(), logarithms.float()
        return CenterOutput(logits, STRIDE * _FIRST_SIDE * logarithms.clamp(max=_LARGEST).exp())


class _Block(nn.Module):
    """Two 3x3 convolutions with a residual connection (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, *, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, norm, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs))
        past: list[nn.Module] = [nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)] if stride == 2 else []
        if inputs != outputs:
            past += [nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs)]
        self.past = nn.Sequential(*past)

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(features)) + self.past(features))


def _convolution(inputs: int, outputs: int, norm: Norm, *, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, norm(outputs), nn.ReLU(inplace=True))


def places(rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The middles of the cells in pixels: y (rows) and x (columns)."""
    y = torch.arange(rows, dtype=like.dtype, device=like.device)
    x = torch.arange(columns, dtype=like.dtype, device=like.device)
    return (y + 0.5) * STRIDE, (x + 0.5) * STRIDE


def boxes_of(distances: Tensor) -> Tensor:
    """The box around each cell: (images, 4, rows, columns), left, top, right and bottom in pixels."""
    y, x = places(distances.shape[2], distances.shape[3], distances)
    left, top, right, bottom = distances.unbind(1)
    row, column = y[:, None], x[None, :]
    return torch.stack([column - left, row - top, column + right, row + bottom], 1)


def best_boxes(
    output: CenterOutput, *, size: tuple[int, int], most: int, overlap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The best boxes of each image: cells whose score is the highest in their 3x3 neighbourhood, then non-maximum
    suppression within each class.

    Args:
        size: height and width of the images in pixels, to which boxes are clipped.
        most: the maximum number of boxes per image. overlap: see `overlap.suppressed`.

    Returns:
        boxes (images, `most`, 4) in pixels, scores (images, `most`), labels (images, `most`), the best first; entries
        without a box have the score 0 and the label -1.
    """
    scores = output.logits.float().sigmoid()
    peaks = scores * (functional.max_pool2d(scores, 3, 1, 1) == scores)
    classes, rows, columns = scores.shape[1:]
    best, flat = peaks.flatten(1).topk(min(most, classes * rows * columns))
    labels, place = flat // (rows * columns), flat % (rows * columns)
    boxes = boxes_of(output.distances.float()).flatten(2).gather(2, place[:, None].expand(-1, 4, -1)).mT
    height, width = size
    boxes = torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))
    gone = suppressed(boxes, labels, overlap) | (best <= 0)
    best = best.masked_fill(gone, 0.0)
    order = best.argsort(dim=1, descending=True, stable=True)
    labels = labels.masked_fill(gone, -1).gather(1, order)
    return boxes.gather(1, order[..., None].expand(-1, -1, 4)), best.gather(1, order), labels
