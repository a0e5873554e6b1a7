"""Combine the logits and weights of groups of slices into results for volumes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def mean_of_groups(logits: Tensor, attention: Tensor, counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over the groups of each volume.

    Args:
        logits: (groups, questions).
        attention: (slices): the weights of a group sum to 1.
        counts: int64 (groups), the number of slices of each group.
        groups: int64 (volumes), the number of groups of each volume.

    Returns:
        logits (volumes, questions); weights (slices), which sum to 1 for each volume; and the number of slices of each
        volume, int64 (volumes).
    """
    of_group = torch.repeat_interleave(groups, output_size=len(counts))
    means = logits.new_zeros(len(groups), logits.shape[1]).index_add(0, of_group, logits) / groups[:, None]
    of_slice = torch.repeat_interleave(counts, output_size=len(attention))
    return means, attention / groups[of_group][of_slice], torch.zeros_like(groups).index_add(0, of_group, counts)


def largest_weights(batch: Mapping[str, Tensor], attention: Tensor, counts: Tensor, most: int) -> dict[str, Tensor]:
    """The slices of each volume with the largest weights, from feet to head.

    Args:
        batch: `places`, int64 (slices), and `positions`, float32 (slices).
        attention: (slices).
        counts: int64 (volumes): slices of each volume.
        most: the maximum number of slices of a volume to return.

    Returns:
        `attention`, `slices` and `positions`, (volumes, `most`): weights, numbers of the slices in their volumes, and
        millimetres. Entries without a slice contain 0, -1 and 0.
    """
    row = torch.repeat_interleave(counts, output_size=len(attention))
    # By volume, then by falling weight: a stable sort by the second key, then by the first.
    order = torch.argsort(attention, descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    rank = torch.arange(len(order), device=row.device) - (counts.cumsum(0) - counts)[row[order]]
    chosen = order[rank < most].sort().values
    chosen = chosen[torch.argsort(batch["places"][chosen], stable=True)]
    chosen = chosen[torch.argsort(row[chosen], stable=True)]
    taken = counts.clamp_max(most)
    column = torch.arange(len(chosen), device=row.device) - (taken.cumsum(0) - taken)[row[chosen]]
    at = (row[chosen], column)
    shape = (len(counts), most)
    return {
        "attention": attention.new_zeros(shape).index_put(at, attention[chosen]),
        "slices": batch["places"].new_full(shape, -1).index_put(at, batch["places"][chosen]),
        "positions": batch["positions"].new_zeros(shape).index_put(at, batch["positions"][chosen]),
    }
