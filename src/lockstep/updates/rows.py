"""Rows of tensors, such as embeddings of samples, from all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.core.parallel.world import World


def gather_rows(tensors: Sequence[Tensor], world: World) -> tuple[list[Tensor], int]:
    """The rows of all ranks, in rank order, on every rank. All travel in one message.

    Args:
        tensors: of shape (rows, ...), with equally many rows, which may be none. Ranks may have different numbers.

    Returns:
        a tensor of the rows of all ranks for each tensor, and the place of this rank's first row.
    """
    if world.size == 1:
        return list(tensors), 0
    counts = [
        int(count)
        for count in world.all_sum([len(tensors[0]) * float(rank == world.rank) for rank in range(world.size)])
    ]
    flat = [tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in tensors]
    packed = torch.cat([rows.contiguous().view(torch.uint8) for rows in flat], dim=1)
    padded = packed.new_zeros(max(counts), packed.shape[1])
    padded[: len(packed)] = packed
    whole = torch.cat([part[:count] for part, count in zip(world.gather_tensors(padded), counts, strict=True)])
    columns = torch.split(whole, [rows.shape[1] * rows.element_size() for rows in flat], dim=1)
    found = [  # a single row would be contiguous already, at an address that the dtype may not allow
        values.clone(memory_format=torch.contiguous_format).view(tensor.dtype).reshape(-1, *tensor.shape[1:])
        for values, tensor in zip(columns, tensors, strict=True)
    ]
    return found, sum(counts[: world.rank])
