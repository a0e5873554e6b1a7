"""An order of samples with unlike halves: they expose a loss that depends on which samples are in one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.core.data.tensors import is_plain, map_tensors


def unlike_order(batch: Any, count: int) -> list[int]:
    """The positions of a batch's samples, sorted by their labels; without known labels, by their contents.

    Integers and booleans count as labels. Of several tensors the last decides, because labels come last in most
    batches.

    Args:
        batch: of `count` samples, however its tensors are nested.
    """
    by_place: list[list[float]] = []
    labels: list[list[float]] = []

    def look(tensor: Tensor) -> Tensor:
        if is_plain(tensor) and tensor.ndim and len(tensor) == count and tensor.numel() and not tensor.is_complex():
            means = tensor.detach().double().flatten(1).mean(dim=1) if tensor.ndim > 1 else tensor.detach().double()
            if bool((means != means[0]).any()) and bool(torch.isfinite(means).all()):
                (by_place if tensor.is_floating_point() else labels).append(means.tolist())
        return tensor

    map_tensors(batch, look)
    keys = (labels or by_place or [[0.0] * count])[-1]
    return sorted(range(count), key=keys.__getitem__)
