"""The program of an exported model of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from lockstep.core.program import Computed, Program

SCRIPT = Path(__file__).with_name("use_images.py")
"""The script of models of images."""


class ComputedOfImages(Computed):
    """`compute(model, images)` as a module, which is called as `module(images=...)`."""

    def forward(self, images: Tensor) -> Any:
        return self.compute(self.model, images)


def program_of_images(
    compute: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, size: tuple[int, int, int], *, varies: bool
) -> Program:
    """A program with the input `images`, uint8 (images, channels, height, width), for any number of images.

    Args:
        compute: called with the model and the images.
        size: channels, height and width of the example.
        varies: whether images differ in height and width.
    """
    channels, height, width = size
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, channels, height, width), dtype=torch.uint8, generator=draw)
    dynamic: dict[int, Any] = {0: Dim.AUTO} | ({2: Dim.AUTO, 3: Dim.AUTO} if varies else {})
    other = functional.pad(images[:1], (3, 4, 2, 3), value=128) if varies else images[:1]
    return Program(
        ComputedOfImages(compute, model), {"images": images}, {"images": dynamic}, {"images": other}, script=SCRIPT
    )
