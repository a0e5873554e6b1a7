"""An image with its targets, and batches of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.core.errors import DataError


@dataclass(slots=True)
class AnnotatedImage:
    """An image with its mask and boxes. Geometry changes all of them; colour changes only `image`.

    Coordinates count pixels from the upper left corner of the image: the pixel in row r and column c covers the
    square from (c, r) to (c + 1, r + 1).
    """

    image: Tensor
    """uint8 (channels, height, width). In memory, the channels of a pixel are adjacent (channels_last). May be a view
    of a larger image."""
    mask: Tensor | None = None
    """Integers (height, width): the class of each pixel."""
    boxes: Tensor | None = None
    """float32 (n, 4): left, top, right and bottom edge of each box, in pixels."""
    box_indices: Tensor | None = None
    """int64 (n): the indices of these boxes among the original boxes of the image. Boxes that are outside after a crop
    are removed."""

    @classmethod
    def from_pixels(
        cls, pixels: npt.NDArray[np.uint8], mask: Tensor | None = None, boxes: Tensor | None = None
    ) -> AnnotatedImage:
        """An image that shares the memory of decoded pixels.

        Args:
            pixels: uint8 (height, width, channels), writable.
            mask: integers (height, width).
            boxes: (n, 4) left, top, right, bottom, in pixels.

        Raises:
            DataError: the mask and the image differ in size, or boxes have a wrong shape or are not finite.
        """
        size = pixels.shape[:2]
        if mask is not None and tuple(mask.shape) != size:
            remedy = "give each image a mask of its height and width"
            raise DataError(f"the mask has {tuple(mask.shape)} pixels, but the image has {size}", remedy=remedy)
        if boxes is not None:
            boxes = boxes.to(torch.float32).reshape(-1, 4) if boxes.numel() == 0 else boxes.to(torch.float32)
            if boxes.ndim != 2 or boxes.shape[1] != 4 or not bool(boxes.isfinite().all()):
                what = f"boxes of shape {tuple(boxes.shape)} are not rows of four finite numbers"
                raise DataError(what, remedy="give left, top, right and bottom of each box in pixels")
        indices = None if boxes is None else torch.arange(len(boxes))
        return cls(torch.from_numpy(pixels).permute(2, 0, 1), mask, boxes, indices)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.image.shape[1], self.image.shape[2]


def contiguous(picture: AnnotatedImage) -> AnnotatedImage:
    """The same image, contiguous in memory: channels_last for the image."""
    return AnnotatedImage(
        image=picture.image.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        mask=None if picture.mask is None else picture.mask.contiguous(),
        boxes=picture.boxes,
        box_indices=picture.box_indices,
    )


def rows(image: Tensor) -> Tensor:
    """An image (channels, height, width) as (height, width, channels), which is its memory layout."""
    return image.permute(1, 2, 0)


def stack_images(images: Sequence[Tensor]) -> Tensor:
    """A batch of images of the same size. In a loader worker it is in shared memory, and is not copied again.

    Args:
        images: (channels, height, width) each.

    Returns:
        (batch, channels, height, width), channels_last in memory. With one channel, this is also the ordinary order.
    """
    batch: Tensor = default_collate([image.permute(1, 2, 0) for image in images])
    if batch.shape[3] == 1:  # the same memory; convolutions treat these strides like those of an ordinary tensor
        return batch.squeeze(3).unsqueeze(1)
    return batch.permute(0, 3, 1, 2)
