"""Targets and losses of `CenterDetector`, as sums.

Source: Liu et al. 2019, Training-Time-Friendly Network, arXiv:1909.00700, sections 3.2 and 3.3. Unlike there, each box
has the same weight in the box loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lockstep_recipes.tasks.vision.detection.center_detector import STRIDE, CenterOutput, boxes_of, places
from lockstep_recipes.tasks.vision.detection.models import Targets
from lockstep_recipes.tasks.vision.detection.overlap import area, generalised_overlap

_SHARE = 0.54  # radius of a box's Gaussian, as a fraction of its sides ("alpha" and "beta" in the paper)
_AT_ONCE = 1 << 22  # cells of boxes to draw at a time: 16 MB
_FOCUS, _RELIEF = 2, 4  # exponents of Objects as Points, arXiv:1904.07850, equation 1


class CenterTargets(NamedTuple):
    """The target output of the detector for each cell."""

    heat: Tensor
    """(images, classes, rows, columns) from 0 to 1: 1 at the centres of boxes, and less around them."""
    counts: Tensor
    """bool (images, 1, rows, columns): whether cells without a centre count as background."""
    owner: Tensor
    """int64 (images, rows, columns): the box of each cell, counted over the batch. Cells without a box contain the
    number of boxes."""
    share: Tensor
    """(images, rows, columns): the weight of each cell in the loss of its box. The weights of a box sum to 1. Cells
    without a box have 0."""


def center_targets(targets: Targets, *, classes: int, rows: int, columns: int, like: Tensor) -> CenterTargets:
    """The targets for an output of rows x columns cells.

    Each box is a Gaussian around its centre that is as wide as the box. If several boxes cover a cell, it belongs to
    the smallest. A box whose cells all belong to smaller boxes has no cells.

    Nothing here waits for the device: all shapes follow from the shapes of `targets`. Boxes are drawn a few at a time,
    so that memory does not grow with boxes x cells.
    """
    pictures, boxes = len(targets.counts), targets.boxes.to(like)
    y, x = places(rows, columns, like)
    reach = rows * STRIDE, columns * STRIDE
    vertical, row = _gaussian(y, boxes[:, 1], boxes[:, 3], reach[0])
    horizontal, column = _gaussian(x, boxes[:, 0], boxes[:, 2], reach[1])
    picture = targets.pictures

    # The smallest box of each cell: boxes are numbered by size, and the lowest number wins. Cells that a box does not
    # reach have the highest number. Floating-point numbers are several times faster here on a CPU.
    none = len(boxes)
    order = area(boxes).argsort(stable=True)
    number = like.new_empty(none, 1)
    number[order, 0] = torch.arange(none, dtype=like.dtype, device=order.device)
    down, across = (torch.where(values > 0, number, none) for values in (vertical, horizontal))
    heat = like.new_zeros(pictures * classes, rows, columns)
    numbers = like.new_full((pictures, rows, columns), none)
    for part in _parts(none, rows * columns):
        values = vertical[part, :, None] * horizontal[part, None, :]  # (boxes of the part, rows, columns)
        into = (picture[part] * classes + targets.labels[part])[:, None, None].expand_as(values)
        heat.scatter_reduce_(0, into, values, "amax")
        own = torch.maximum(down[part, :, None], across[part, None, :])
        numbers.scatter_reduce_(0, picture[part, None, None].expand_as(own), own, "amin")
    heat = heat.view(pictures, classes, rows, columns)
    one = heat.new_ones(())  # the host would wait for the copy of a number to a GPU
    heat.index_put_((picture, targets.labels, row, column), one)

    # Row `none` of these is for cells without a box.
    owner = torch.cat([order, order.new_full((1,), none)])[numbers.long()]
    vertical, horizontal = (functional.pad(part, (0, 0, 0, 1)) for part in (vertical, horizontal))
    row, column = (torch.arange(count, device=like.device) for count in (rows, columns))
    share = vertical[owner, row[:, None]] * horizontal[owner, column]
    total = share.new_zeros(none + 1).index_add_(0, owner.flatten(), share.flatten())
    total[none] = 1.0
    return CenterTargets(heat=heat, counts=~_covered(targets, y, x), owner=owner, share=share / total[owner])


def _parts(boxes: int, places_of_box: int) -> list[slice]:
    """Slices of boxes whose cells fit into memory at once."""
    step = max(1, _AT_ONCE // places_of_box)
    return [slice(begin, begin + step) for begin in range(0, boxes, step)]


def _gaussian(middles: Tensor, low: Tensor, high: Tensor, end: float) -> tuple[Tensor, Tensor]:
    """The Gaussian of each box along one axis, and the cell of its centre.

    Returns:
        (boxes, cells): 1 at the cell of the centre, less to both sides, and 0 beyond the radius; int64 (boxes).
    """
    place = (((low + high) / 2).clamp(0, end - 1e-3) / STRIDE).long()
    half = _SHARE * (high - low) / 2
    distance = middles - middles[place][:, None]
    # The radius is three standard deviations.
    values = torch.exp(-(distance**2) / (2 * (half / 3).clamp(min=1e-3)[:, None] ** 2))
    return values * ((distance.abs() <= half[:, None]) | (distance == 0)), place


def _covered(targets: Targets, y: Tensor, x: Tensor) -> Tensor:
    """bool (images, 1, rows, columns): whether a cell is in an ignored region."""
    covered = y.new_zeros(len(targets.counts), len(y), len(x))
    left, top, right, bottom = targets.ignored.to(y).T[..., None]
    across, down = (x > left) & (x < right), (y > top) & (y < bottom)
    picture = targets.ignored_images
    for part in _parts(len(targets.ignored), len(y) * len(x)):
        inside = (down[part, :, None] & across[part, None, :]).to(y)
        covered.scatter_reduce_(0, picture[part, None, None].expand_as(inside), inside, "amax")
    return covered[:, None] > 0


def center_losses(output: CenterOutput, targets: Targets) -> dict[str, Tensor]:
    """`center`: the focal loss of the scores, summed over cells and classes. `box`: one minus the generalised overlap
    of the boxes, as a weighted mean over the cells of each true box, summed over true boxes."""
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
    if not len(targets.boxes):
        return 0.0 * distances.sum()
    found = boxes_of(distances).permute(0, 2, 3, 1)
    edges = functional.pad(targets.boxes.to(found).T, (0, 1))  # (4, boxes + 1)
    true = edges.index_select(1, wanted.owner.flatten()).view(4, *wanted.owner.shape).movedim(0, -1)
    return ((1 - generalised_overlap(found, true)) * wanted.share).sum()
