"""A small convolutional classifier without batch statistics: the result does not depend on how the batch is split."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Three 3x3 convolutions with GroupNorm, halving the image twice, then a linear head on a grid of means.

    (batch, channels, height, width) -> (batch, classes) logits.

    Args:
        image_size: height and width in pixels of the smallest images. The side of the grid is a quarter of it, but at
            most 7. Larger images give the same grid.
        width: channels after the first convolution.
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
        self.grid = side // max(1, side // 4)  # 4 to 7, if the image is large enough
        self.head = nn.Linear(4 * width * self.grid**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        # Equal windows that may overlap: adaptive pooling is not deterministic on CUDA.
        height, width = features.shape[-2:]
        stride = (height // self.grid, width // self.grid)
        window = (height - (self.grid - 1) * stride[0], width - (self.grid - 1) * stride[1])
        logits: Tensor = self.head(functional.avg_pool2d(features, window, stride).flatten(1))
        return logits
