"""A small convolutional classifier without batch statistics: the same result however the batch is cut."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three 3x3 convolutions with GroupNorm, halving the image twice, then a linear head on the mean.

    (batch, channels, height, width) -> (batch, classes) logits. Any image of at least 4x4.
    """

    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

        self.features = nn.Sequential(block(channels, width, 1), block(width, 2 * width, 2), block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits
