"""A small convolutional classifier without batch statistics: the same result however the batch is cut."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three 3x3 convolutions with GroupNorm, halving the image twice, then a linear head on a grid of means.

    (batch, channels, image_size, image_size) -> (batch, classes) logits. image_size: at least 4.
    """

    def __init__(self, channels: int, classes: int, image_size: int, width: int = 32) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

        self.features = nn.Sequential(
            block(channels, width, 1), block(width, 2 * width, 2), block(2 * width, 4 * width, 2)
        )
        side = -(-image_size // 4)
        window = max(1, side // 4)  # to a grid of 4x4 to 7x7, where the image is large enough
        self.pool = nn.AvgPool2d(window)
        self.head = nn.Linear(4 * width * (side // window) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.features(images)).flatten(1)
        logits: Tensor = self.head(features)
        return logits
