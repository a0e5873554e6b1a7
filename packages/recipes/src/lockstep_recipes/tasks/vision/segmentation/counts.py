"""Segmentation metrics from counts that are summed over images: masks are neither kept nor sent between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric

from lockstep_recipes.tasks.counting import counted
from lockstep_recipes.tasks.vision.segmentation.losses import IGNORED


class PixelCounts(Metric):
    """Counts of pixels by (true class, predicted class), and counts of boundary pixels that match.

    `compute` returns `miou`, `pixel_accuracy`, `iou/NAME` of each class that is true or predicted somewhere,
    `boundary_f1` if requested, and `confusion`: int64 (classes, classes), a row for each true class. All classes have
    the same weight in `miou`, whatever their number of pixels. Classes that neither occur nor are predicted are left
    out of the means. A mean over nothing is left out: without a valid pixel, `compute` returns only `confusion`.
    """

    confusion: Tensor
    boundaries: Tensor

    def __init__(self, classes: Sequence[str], *, boundary: bool) -> None:
        super().__init__()
        self.classes, self.boundary = list(classes), boundary
        count = len(self.classes)
        self.add_state("confusion", torch.zeros(count, count, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("boundaries", torch.zeros(4, count, dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self, predicted: Sequence[Tensor], masks: Sequence[Tensor], tolerances: Sequence[int] | None = None
    ) -> None:
        """Count the pixels of images.

        Args:
            predicted: class numbers (height, width) of each image.
            masks: true class numbers (height, width) of each image; ignored pixels are -1.
            tolerances: for each image, the distance in pixels at which boundaries match. None: boundaries are not
                counted.
        """
        for number, (output, mask) in enumerate(zip(predicted, masks, strict=True)):
            mask = mask.to(output.device)
            self.confusion += confusion(output, mask, len(self.classes)).to(self.confusion)
            if self.boundary and tolerances is not None:
                tolerance = tolerances[number]
                self.boundaries += boundary_counts(output, mask, len(self.classes), tolerance).to(self.boundaries)

    def compute(self) -> dict[str, Any]:
        values: dict[str, Any] = summarise(self.confusion, self.classes)
        if self.boundary and bool(self.boundaries.any()):
            values["boundary_f1"] = boundary_f1(self.boundaries)
        return values | {"confusion": self.confusion}


def summarise(confusion: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """`miou`, `pixel_accuracy` and `iou/NAME` from counts by (true class, predicted class).

    The IoU of a class is the number of pixels where it is true and predicted, divided by those where it is true or
    predicted. Empty if nothing was counted.
    """
    counts = confusion.double().cpu()
    if not counts.any():
        return {}
    right, either = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    seen = either > 0
    iou = right / either.clamp(min=1)
    values = {"miou": float(iou[seen].mean()), "pixel_accuracy": float(right.sum() / counts.sum())}
    return values | {f"iou/{name}": float(iou[number]) for number, name in enumerate(classes) if seen[number]}


def confusion(predicted: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Counts of pixels by (true class, predicted class), without ignored pixels: int64 (classes, classes).

    Args:
        predicted, mask: class numbers of the same shape; ignored pixels of `mask` are -1.
    """
    pairs = torch.where(mask == IGNORED, classes * classes, mask.long() * classes + predicted.long())
    return counted(pairs, classes * classes + 1)[:-1].reshape(classes, classes)


def boundary_counts(predicted: Tensor, mask: Tensor, classes: int, tolerance: int) -> Tensor:
    """Counts of boundary pixels of each class: int64 (4, classes).

    A boundary pixel of a class has the class, and a pixel above, below, left or right of it has a different class.
    Ignored pixels do not have a class in truth and prediction. A boundary pixel matches if the other mask has a
    boundary pixel of the same class within a disc of radius `tolerance`.

    Source: Csurka et al., What is a good evaluation measure for semantic segmentation?, BMVC 2013, section 2.3; here,
    the counts are summed over images, while the paper takes the mean over images.

    Returns:
        true boundary pixels, how many match, predicted boundary pixels, how many match.
    """
    told = torch.where(mask == IGNORED, torch.full_like(mask, IGNORED), predicted.to(mask.dtype))
    true_edges, told_edges = (
        torch.where(_edges(labels), labels, torch.full_like(labels, IGNORED)) for labels in (mask, told)
    )
    counts = torch.zeros(4, classes, dtype=torch.int64, device=mask.device)
    counts[0], counts[2] = _by_class(true_edges, classes), _by_class(told_edges, classes)
    in_both = counts[0].clamp(max=1) * counts[2]
    for number, found in enumerate(in_both.tolist()):  # the only point at which the host waits for the device
        if found:
            true, said = true_edges == number, told_edges == number
            counts[1, number] = (true & _dilated(said, tolerance)).sum()
            counts[3, number] = (said & _dilated(true, tolerance)).sum()
    return counts


def _by_class(labels: Tensor, classes: int) -> Tensor:
    """The number of pixels of each class, without pixels of -1: int64 (classes)."""
    return counted(labels.long() + 1, classes + 1)[1:]


def boundary_f1(counts: Tensor) -> float:
    """The mean over classes of 2 P R / (P + R), from the counts of `boundary_counts`.

    R is the fraction of true boundary pixels that match, P that of predicted boundary pixels. Classes without any
    boundary are left out.
    """
    true, true_matched, said, said_matched = counts.double().cpu()
    seen = (true + said) > 0
    precision, recall = said_matched / said.clamp(min=1), true_matched / true.clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=torch.finfo(torch.float64).tiny)
    return float(f1[seen].mean()) if seen.any() else 0.0


def tolerance_in_pixels(size: tuple[int, int], share: float) -> int:
    """The tolerance for an image of (height, width) pixels: a fraction of its diagonal, rounded, at least 1 pixel."""
    return max(1, round(share * math.hypot(*size)))


def _edges(labels: Tensor) -> Tensor:
    """True where a neighbour of a pixel has a different class: bool (height, width). Ignored pixels do not count as
    neighbours."""
    edge = torch.zeros_like(labels, dtype=torch.bool)
    for one, other in (
        ((slice(None), slice(1, None)), (slice(None), slice(None, -1))),
        ((slice(1, None), slice(None)), (slice(None, -1), slice(None))),
    ):
        differ = (labels[one] != labels[other]) & (labels[one] != IGNORED) & (labels[other] != IGNORED)
        edge[one] |= differ
        edge[other] |= differ
    return edge


def _dilated(pixels: Tensor, radius: int) -> Tensor:
    """True where a pixel is within a disc around some pixel of `pixels`: bool (height, width).

    A disc is a column of rows; rows of the same length are found at once.
    """
    height = pixels.shape[0]
    plain = pixels[None, None].float()
    result = pixels.clone()
    reach = [int((radius**2 - down**2) ** 0.5) for down in range(radius + 1)]
    for half in sorted(set(reach)):
        wide = functional.max_pool2d(plain, (1, 2 * half + 1), 1, (0, half))[0, 0] > 0 if half else pixels
        for down in (down for down, other in enumerate(reach) if other == half and down < height):
            result[down:] |= wide[: height - down]
            result[: height - down] |= wide[down:]
    return result


def by_class(values: Mapping[str, Any], classes: Sequence[str]) -> str:
    """IoU, and percentages of true and predicted pixels of each class, as text for the log; or a warning that no pixel
    was counted."""
    counts: Tensor = values["confusion"].double()
    total = float(counts.sum())
    if not total:
        return "warning: every pixel of the evaluation masks is ignored, so there are no metrics: check task.ignore"
    wide = max(len("class"), *(len(name) for name in classes))
    lines = [f"  {'class':<{wide}}     IoU  truth %  predicted %"]
    for number, name in enumerate(classes):
        iou = values.get(f"iou/{name}")
        shown = f"{float(iou):6.4f}" if iou is not None else "     -"
        true, said = (100 * float(counts.sum(axis)[number]) / total for axis in (1, 0))
        lines.append(f"  {name:<{wide}}  {shown}  {true:7.2f}  {said:11.2f}")
    lines.append(f"  {'mean':<{wide}}  {float(values['miou']):6.4f}")
    return "\n".join(lines)
