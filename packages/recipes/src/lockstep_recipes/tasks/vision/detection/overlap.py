"""The overlap of boxes, and non-maximum suppression."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 1e-7
_BLOCK = 512  # boxes to compare with each other at a time: 13 MB per image


def area(boxes: Tensor) -> Tensor:
    """Areas of boxes (..., 4) of left, top, right and bottom: (...). 0 for boxes with swapped edges."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def intersection_over_union(first: Tensor, second: Tensor) -> Tensor:
    """The overlap of each box of `first` (..., n, 4) with each of `second` (..., m, 4): (..., n, m), from 0 to 1."""
    one, other = first[..., :, None, :], second[..., None, :, :]
    inner = (torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])).clamp(min=0)
    both = inner.prod(-1)
    return both / (area(one) + area(other) - both).clamp(min=_SMALL)


def generalised_overlap(first: Tensor, second: Tensor) -> Tensor:
    """Generalised intersection over union of pairs of boxes (..., 4): (...), from -1 to 1.

    The edges of boxes must not be swapped. Source: Rezatofighi et al. 2019, arXiv:1902.09630.
    """
    # Edge by edge: the gradient of `prod` would wait for the device, and rows of two numbers would be slow.
    (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = first.unbind(-1), second.unbind(-1)
    width, height, width_2, height_2 = right - left, bottom - top, right_2 - left_2, bottom_2 - top_2
    across = torch.minimum(right, right_2) - torch.maximum(left, left_2)  # below 0: the boxes are apart
    down = torch.minimum(bottom, bottom_2) - torch.maximum(top, top_2)
    both = across.clamp(min=0) * down.clamp(min=0)
    union = (width * height + width_2 * height_2 - both).clamp(min=_SMALL)
    around = ((width + width_2 - across) * (height + height_2 - down)).clamp(min=_SMALL)  # the box around both
    return both / union + union / around - 1


def suppressed(boxes: Tensor, labels: Tensor, most: float) -> Tensor:
    """Greedy non-maximum suppression within each class: which boxes are removed.

    A box is removed if an earlier remaining box of its class overlaps it by more than `most`.

    Args:
        boxes: (..., n, 4), the best first.
        labels: (..., n): boxes of different labels do not compete.
        most: the maximum intersection over union, from 0 to 1. 1: no box is removed.

    Returns:
        bool (..., n).
    """
    if most >= 1 or not boxes.shape[-2]:
        return torch.zeros_like(labels, dtype=torch.bool)
    if boxes.shape[-2] <= _BLOCK:
        return _suppressed_at_once(boxes, labels, most)
    number = labels.shape[-1]
    gone = torch.ones_like(labels, dtype=torch.bool).reshape(-1, number)
    for place, picture in enumerate(zip(boxes.reshape(-1, number, 4), labels.reshape(-1, number), strict=True)):
        gone[place, remaining(*picture, most)] = False
    return gone.view_as(labels)


def remaining(boxes: Tensor, labels: Tensor, most: float, *, count: int | None = None) -> Tensor:
    """The boxes of an image that `suppressed` does not remove, with little memory for any number of boxes.

    Boxes are processed in blocks. Each block is compared with the remaining boxes of earlier blocks, and then with
    itself.

    Args:
        boxes, labels, most: (n, 4), (n) and a number, as in `suppressed`.
        count: stop when this many boxes remain. None: process all.

    Returns:
        int64 (remaining boxes): their indices, the best first.
    """
    kept = torch.arange(0, device=boxes.device)
    for begin in range(0, len(boxes), _BLOCK):
        places = torch.arange(begin, min(begin + _BLOCK, len(boxes)), device=boxes.device)
        for before in torch.split(kept, _BLOCK):
            places = places[~_competes(boxes[before], labels[before], boxes[places], labels[places], most).any(0)]
        places = places[~suppressed(boxes[places], labels[places], most)]
        kept = torch.cat([kept, places])
        if count is not None and len(kept) >= count:
            break
    return kept[:count]


def _suppressed_at_once(boxes: Tensor, labels: Tensor, most: float) -> Tensor:
    """`suppressed`, with memory for n x n numbers of each image.

    The greedy choice is the fixed point of an iteration on all boxes at once (Zheng et al. 2020, arXiv:2005.03572,
    section 4.2).
    """
    earlier = _competes(boxes, labels, boxes, labels, most).triu(1)  # [i, j]: box i comes before box j
    gone = torch.zeros_like(labels, dtype=torch.bool)
    for _ in range(boxes.shape[-2]):  # the first k boxes are correct after k rounds; usually a few rounds are enough
        now = (earlier & ~gone[..., :, None]).any(-2)
        if torch.equal(now, gone):
            break
        gone = now
    return gone


def _competes(first: Tensor, first_labels: Tensor, second: Tensor, second_labels: Tensor, most: float) -> Tensor:
    """bool (..., n, m): whether boxes have the same label, and overlap by more than `most`."""
    return (intersection_over_union(first, second) > most) & (first_labels[..., :, None] == second_labels[..., None, :])
