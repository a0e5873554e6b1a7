"""The small networks of `image_folder`, without batch statistics: the result does not depend on how the batch is
split."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional

_CHANNELS_OF_A_GROUP = 16  # Wu and He 2018, arXiv:1803.08494, table 3


class StandardizedConv2d(nn.Conv2d):
    """A 3x3 convolution without bias, whose weights have mean 0 and variance 1 for each output channel.

    Together with GroupNorm it replaces batch norm for small batches: Qiao et al. 2019, arXiv:1903.10520.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / (variance + 1e-5).sqrt()
        return functional.conv2d(images, weight, padding=self.padding)


class ResNet9(nn.Module):
    """Eight 3x3 convolutions (four of them in two residual blocks), and a linear layer on the means of the channels.

    (batch, channels, height, width) -> (batch, classes) logits. Pooling halves the image three times, so a side must
    have 8 pixels or more. The layers are those of Page 2018, https://myrtle.ai/how-to-train-your-resnet/, with mean
    pooling at the end, with GroupNorm and standardized weights instead of batch norm, and narrower.

    Args:
        width: channels after the first convolution, a multiple of 16. The last has 8 times as many.
    """

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _block(channels, width),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _Residual(2 * width),
            _block(2 * width, 4 * width),
            nn.MaxPool2d(2),
            _block(4 * width, 8 * width),
            nn.MaxPool2d(2),
            _Residual(8 * width),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


class ConvNet4(nn.Module):
    """Four 3x3 convolutions, each followed by max-pooling, and a linear layer on the means of the channels.

    (batch, channels, height, width) -> (batch, classes) logits. The layers have GroupNorm and standardized weights,
    like those of `ResNet9`. Pooling rounds sides up, so an image may have any size.

    Args:
        width: channels after the first convolution, a multiple of 16. The next have 2, 4 and 4 times as many.
    """

    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()
        widths = (channels, width, 2 * width, 4 * width, 4 * width)
        blocks = [
            (_block(inputs, outputs), nn.MaxPool2d(2, ceil_mode=True)) for inputs, outputs in itertools.pairwise(widths)
        ]
        self.layers = nn.Sequential(*itertools.chain(*blocks))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_block(channels, channels), _block(channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = images + self.layers(images)
        return result


def _block(inputs: int, outputs: int) -> nn.Sequential:
    norm = nn.GroupNorm(outputs // _CHANNELS_OF_A_GROUP, outputs)
    return nn.Sequential(StandardizedConv2d(inputs, outputs), norm, nn.ReLU())
