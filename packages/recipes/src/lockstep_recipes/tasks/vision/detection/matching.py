"""The true boxes that a prediction found, for people. Metrics use pycocotools."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep_recipes.tasks.vision.detection.overlap import area, intersection_over_union

OVERLAP = 0.5
"""The least intersection over union of a found box with its true box."""


class Matched(NamedTuple):
    """Found and true boxes of an image."""

    found: Tensor
    """bool (true boxes): whether a prediction found it."""
    right: Tensor
    """bool (found boxes): whether it is a true box that no better prediction found, or lies in a crowd."""

    @property
    def missed(self) -> int:
        """Number of true boxes that were not found."""
        return int((~self.found).sum())

    @property
    def invented(self) -> int:
        """Number of found boxes that are not true."""
        return int((~self.right).sum())


def match(boxes: Tensor, labels: Tensor, true_boxes: Tensor, true_labels: Tensor, crowd: Tensor) -> Matched:
    """Give each found box, the best first, the true box of its class that it overlaps most and that is still free.

    Args:
        boxes, labels: (found, 4) and (found), the best first.
        true_boxes, true_labels: (true, 4) and (true).
        crowd: bool (true): such boxes are not missed, and hold any number of found boxes.
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
