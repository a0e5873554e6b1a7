"""Match predictions with true boxes for display. Metrics use pycocotools."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep_recipes.tasks.vision.detection.overlap import area, intersection_over_union

OVERLAP = 0.5
"""Minimum intersection over union of a detected box with its true box."""


class Matched(NamedTuple):
    """Detected and true boxes of an image."""

    found: Tensor
    """bool (true boxes): whether a prediction detects it."""
    right: Tensor
    """bool (detected boxes): whether it matches a true box that no better prediction matches, or is inside a crowd."""

    @property
    def missed(self) -> int:
        """Number of true boxes that were not detected."""
        return int((~self.found).sum())

    @property
    def invented(self) -> int:
        """Number of detected boxes without a true box (false positives)."""
        return int((~self.right).sum())


def match(boxes: Tensor, labels: Tensor, true_boxes: Tensor, true_labels: Tensor, crowd: Tensor) -> Matched:
    """Assign to each detected box, the best first, the unassigned true box of its class that it overlaps most.

    Args:
        boxes, labels: (detected, 4) and (detected), the best first.
        true_boxes, true_labels: (true, 4) and (true).
        crowd: bool (true): these boxes never count as missed, and match any number of detected boxes.
    """
    overlap = intersection_over_union(boxes, true_boxes) * (labels[:, None] == true_labels)
    free = (~crowd).clone()
    right = torch.zeros(len(boxes), dtype=torch.bool)
    for number in range(len(boxes) if len(true_boxes) else 0):
        best, place = (overlap[number] * free).max(0)
        if best >= OVERLAP:
            right[number], free[place] = True, False
    if bool(crowd.any()) and len(boxes):
        lefts = torch.maximum(boxes[:, None, :2], true_boxes[None, crowd, :2])
        rights = torch.minimum(boxes[:, None, 2:], true_boxes[None, crowd, 2:])
        inside = (rights - lefts).clamp(min=0).prod(-1) / area(boxes).clamp(min=1e-7)[:, None]
        right |= ((inside >= OVERLAP) & (labels[:, None] == true_labels[crowd])).any(1)
    return Matched(crowd | ~free, right)
