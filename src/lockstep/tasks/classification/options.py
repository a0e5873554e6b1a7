"""Options of image classification."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lockstep.tasks.options import TaskOptions


class ClassificationOptions(TaskOptions):
    """Image classification with a small convolutional network."""

    task: ClassVar[str] = "lockstep.tasks.classification.task:Classification"

    image_size: Annotated[int, Field(ge=4)] = 32
    """Height and width in pixels to which images from folders are resized. Digits stay 8x8."""
    channels: Literal[1, 3] = 3
    """1 for grey images, 3 for RGB."""
    width: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    """Channels after the first convolution of the network."""
    shift: Annotated[int, Field(ge=0)] = 0
    """In training, each image is moved by up to this many pixels in each direction."""
