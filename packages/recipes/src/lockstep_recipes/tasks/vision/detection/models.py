"""What a detection task needs from a model: losses as sums, the units of these sums, and boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lockstep_recipes.tasks.vision.image_models import Models


def image_of_each(counts: Tensor, total: int) -> Tensor:
    """int64 (total): counts[0] times 0, counts[1] times 1, and so on, without waiting for the device.

    Args:
        total: the sum of `counts`, which the caller knows from the shape of a tensor.
    """
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)


@dataclass(frozen=True)
class Targets:
    """The true boxes of a batch of prepared images. The boxes of all images are concatenated."""

    boxes: Tensor
    """float32 (boxes, 4): left, top, right and bottom in pixels of the prepared image."""
    labels: Tensor
    """int64 (boxes): class numbers, from 0."""
    counts: Tensor
    """int64 (images): the number of boxes of each image."""
    ignored: Tensor
    """float32 (regions, 4): regions with a crowd of objects. They count neither as objects nor as background."""
    ignored_counts: Tensor
    """int64 (images): the number of ignored regions of each image."""
    shapes: Tensor
    """int64 (images, 2): height and width in pixels of each prepared image without padding. This area starts in the
    upper left corner. In training, an augmentation may leave empty areas inside."""

    @property
    def pictures(self) -> Tensor:
        """int64 (boxes): the image of each box."""
        return image_of_each(self.counts, len(self.boxes))

    @property
    def ignored_images(self) -> Tensor:
        """int64 (regions): the image of each ignored region."""
        return image_of_each(self.ignored_counts, len(self.ignored))

    def by_picture(self) -> list[tuple[Tensor, Tensor]]:
        """Boxes (n, 4) and labels (n) of each image."""
        counts = self.counts.tolist()
        return list(zip(torch.split(self.boxes, counts), torch.split(self.labels, counts), strict=True))

    def part(self, begin: int, end: int) -> Targets:
        """The targets of the images `begin` to `end` - 1."""
        if begin == 0 and end >= len(self.counts):
            return self  # the sums below wait for the device

        def rows(values: Tensor, counts: Tensor) -> Tensor:
            return values[int(counts[:begin].sum()) : int(counts[:end].sum())]

        return Targets(
            boxes=rows(self.boxes, self.counts),
            labels=rows(self.labels, self.counts),
            counts=self.counts[begin:end],
            ignored=rows(self.ignored, self.ignored_counts),
            ignored_counts=self.ignored_counts[begin:end],
            shapes=self.shapes[begin:end],
        )

    def units(self) -> Tensor:
        """The sum over images of max(1, boxes of the image): float32 scalar.

        This is the unit of losses that background contributes to. In an image with boxes, the unit is the box. An image
        without boxes counts as one, so that the model learns from it that nothing is there, even in a global batch
        without any box.
        """
        return self.counts.clamp(min=1).sum().float()


class Detections(NamedTuple):
    """The boxes that a model detects in a batch, with the same number of entries for each image, the best first."""

    boxes: Tensor
    """float32 (images, entries, 4): left, top, right and bottom in pixels of the prepared image."""
    scores: Tensor
    """float32 (images, entries), from 0 to 1, descending. 0 for entries without a box."""
    labels: Tensor
    """int64 (images, entries): class numbers. -1 for entries without a box."""


class DetectionModels(Models):
    """Makes models of one kind, and computes their losses and boxes."""

    stretches: Any = False
    """True if `forward` removes the padding of each image and stretches it to the whole square."""
    suppresses: ClassVar[bool] = False
    """True if `detections` leaves out boxes that overlap a better box of their class."""

    def coefficients(self) -> Mapping[str, float]:
        """The factor of each head's mean in the total loss. The default for a head is 1."""
        raise NotImplementedError

    def weights(self, targets: Targets) -> dict[str, Tensor]:
        """The units of each head: scalars, computed only from the labels.

        The engine divides the sum of each head over the global batch by the sum of its units over the global batch.
        For most heads the unit is the box (`targets.counts.sum()`) or `targets.units()`.
        """
        raise NotImplementedError

    def forward(self, model: nn.Module, images: Tensor, shapes: Tensor, targets: Targets | None) -> Any:
        """The outputs of the model, for `losses` and `detections`.

        Args:
            images: (images, 3, size, size), normalised.
            shapes: int64 (images, 2): height and width of each image without padding.
            targets: the true boxes while the model trains, for models that denoise them. Otherwise None.
        """
        raise NotImplementedError

    def losses(self, model: nn.Module, outputs: Any, targets: Targets) -> dict[str, Tensor]:
        """The SUM of each head's loss over the units that `weights` counts: scalars with the keys of `weights`.

        Every head depends on the outputs, even for a batch without boxes: its sum is then zero times an output.
        """
        raise NotImplementedError

    def detections(self, model: nn.Module, outputs: Any, *, size: tuple[int, int], most: int) -> Detections:
        """The best boxes of each image.

        Args:
            size: height and width in pixels of the prepared images.
            most: the maximum number of boxes per image.
        """
        raise NotImplementedError

    def candidates(self, model: nn.Module, images: Tensor, shapes: Tensor, *, most: int) -> Detections:
        """The best boxes of each image, before non-maximum suppression, by operations that torch can trace.

        Args:
            images: (images, channels, size, size), normalised; with `stretches`, without padding.
            shapes: as for `forward`. Boxes are in pixels of this area of the images, also with `stretches`.
        """
        raise NotImplementedError
