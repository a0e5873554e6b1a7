"""Targets and losses of `CenterDetector`, as sums.

Source: Liu et al. 2019, Training-Time-Friendly Network, arXiv:1909.00700, sections 3.2 and 3.3. Unlike there, each box
has the same share in the loss of the boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.tasks.detection.center_detector import STRIDE, CenterOutput, boxes_of, places
from lockstep.tasks.detection.models import Targets
from lockstep.tasks.detection.overlap import area, generalised_overlap

_SHARE = 0.54  # of a box's sides: how far its Gaussian reaches ("alpha" and "beta" in the paper)
_FOCUS, _RELIEF = 2, 4  # exponents of Objects as Points, arXiv:1904.07850, equation 1


class CenterTargets(NamedTuple):
    """What the detector should say of each place."""

    heat: Tensor
    """(pictures, classes, rows, columns) from 0 to 1: 1 at the centres of boxes, and less around them."""
    counts: Tensor
    """bool (pictures, 1, rows, columns): whether the places without a centre count as background."""
    owner: Tensor
    """int64 (places): the box of each place that has a box, counted over the batch."""
    at: Tensor
    """int64 (places): these places, as indices into (pictures, rows, columns)."""
    share: Tensor
    """(places): the weight of each of these places. The weights of a box add to 1."""


def center_targets(targets: Targets, *, classes: int, rows: int, columns: int, like: Tensor) -> CenterTargets:
    """The targets for an output of rows x columns places.

    Each box is a Gaussian around its centre that is as wide as the box. Where several boxes cover a place, the
    smallest has it. A box whose every place belongs to smaller boxes has no place.
    """
    pictures, boxes = len(targets.counts), targets.boxes.to(like)
    y, x = places(rows, columns, like)
    reach = rows * STRIDE, columns * STRIDE
    vertical, row = _gaussian(y, boxes[:, 1], boxes[:, 3], reach[0])
    horizontal, column = _gaussian(x, boxes[:, 0], boxes[:, 2], reach[1])
    values = vertical[:, :, None] * horizontal[:, None, :]  # (boxes, rows, columns)
    picture = targets.pictures

    heat = like.new_zeros(pictures * classes, rows, columns)
    into = (picture * classes + targets.labels)[:, None, None].expand_as(values)
    heat.scatter_reduce_(0, into, values, "amax")
    heat = heat.view(pictures, classes, rows, columns)
    heat[picture, targets.labels, row, column] = 1.0

    # The smallest box of each place: boxes have numbers by size, and the least number wins.
    order = area(boxes).argsort(stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)
    none = len(order)
    numbers = torch.where(values > 0, number[:, None, None], none)
    owners = numbers.new_full((pictures, rows, columns), none)
    owners.scatter_reduce_(0, picture[:, None, None].expand_as(numbers), numbers, "amin")
    at = (owners.flatten() < none).nonzero().squeeze(1)
    owner = order[owners.flatten()[at]]
    share = values.flatten(1)[owner, at % (rows * columns)]
    total = share.new_zeros(len(boxes)).index_add_(0, owner, share)
    return CenterTargets(
        heat=heat,
        counts=~_covered(targets, y, x),
        owner=owner,
        at=at,
        share=share / total[owner],
    )


def _gaussian(middles: Tensor, low: Tensor, high: Tensor, end: float) -> tuple[Tensor, Tensor]:
    """The Gaussian of each box along one axis, and the place of its centre.

    Returns:
        (boxes, places): 1 at the place of the centre, less to both sides, and 0 beyond the reach; int64 (boxes).
    """
    centre = ((low + high) / 2).clamp(0, end - 1e-3)
    place = (centre / STRIDE).long()
    half = _SHARE * (high - low) / 2
    distance = middles - middles[place][:, None]
    # Three standard deviations are the reach.
    values = torch.exp(-(distance**2) / (2 * (half / 3).clamp(min=1e-3)[:, None] ** 2))
    inside = (distance.abs() <= half[:, None]) | (distance == 0)
    return values * inside, place


def _covered(targets: Targets, y: Tensor, x: Tensor) -> Tensor:
    """bool (pictures, 1, rows, columns): whether a place lies in an ignored region."""
    covered = torch.zeros(len(targets.counts), 1, len(y), len(x), dtype=torch.bool, device=y.device)
    pictures = torch.arange(len(targets.counts), device=y.device).repeat_interleave(targets.ignored_counts)
    for picture, (left, top, right, bottom) in zip(pictures.tolist(), targets.ignored.tolist(), strict=True):
        covered[picture, 0] |= ((y > top) & (y < bottom))[:, None] & ((x > left) & (x < right))[None, :]
    return covered


def center_losses(output: CenterOutput, targets: Targets) -> dict[str, Tensor]:
    """`center`: the focal loss of the scores, summed over places and classes. `box`: one minus the generalised overlap
    of the boxes, a weighted mean over the places of each true box, summed over true boxes."""
    logits, distances = output
    wanted = center_targets(
        targets, classes=logits.shape[1], rows=logits.shape[2], columns=logits.shape[3], like=logits
    )
    return {"center": _focal(logits, wanted), "box": _overlap(distances, wanted, targets)}


def _focal(logits: Tensor, wanted: CenterTargets) -> Tensor:
    """Objects as Points, arXiv:1904.07850, equation 1, without its division by the number of objects."""
    probability, centre = logits.sigmoid(), wanted.heat == 1
    there = functional.logsigmoid(logits) * (1 - probability) ** _FOCUS
    elsewhere = functional.logsigmoid(-logits) * probability**_FOCUS * (1 - wanted.heat) ** _RELIEF
    return -torch.where(centre, there, elsewhere * wanted.counts).sum()


def _overlap(distances: Tensor, wanted: CenterTargets, targets: Targets) -> Tensor:
    if not len(wanted.at):
        return 0.0 * distances.sum()
    found = boxes_of(distances).permute(0, 2, 3, 1).reshape(-1, 4)[wanted.at]
    true = targets.boxes.to(found)[wanted.owner]
    return ((1 - generalised_overlap(found, true)) * wanted.share).sum()
