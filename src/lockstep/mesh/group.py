"""What sharded layers need from the other ranks of their tensor group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it
Note = Callable[[str, int], None]
"""Called for a collective: with its name, and the bytes of the whole tensor that each rank has before or after it."""


class TensorGroup(Protocol):
    """The ranks of a tensor group. Its methods are collectives, and return plain tensors without a graph."""

    ranks: int
    rank: int
    """The position of this rank in the group."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks: (ranks, *shape)."""

    def add(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over the ranks."""

    def scatter(self, parts: Tensor) -> Tensor:
        """The sum over the ranks of this rank's slice, from one slice for each rank: (ranks, *shape)."""


class Joined(TensorGroup):
    """Ranks of a process group."""

    def __init__(self, ranks: int, rank: int, group: Any) -> None:
        self.ranks, self.rank, self.group = ranks, rank, group

    def gather(self, tensor: Tensor) -> Tensor:
        found = tensor.new_empty((self.ranks, *tensor.shape))
        dist.all_gather([*found], tensor.contiguous(), group=self.group)
        return found

    def add(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def scatter(self, parts: Tensor) -> Tensor:
        found = torch.empty_like(parts[0])
        _reduce_scatter(found, parts.flatten(0, 1), group=self.group)
        return found


class Alone(TensorGroup):
    """The first rank of a group whose other ranks do not exist. Their messages are made up, and passed to `note`."""

    rank = 0

    def __init__(self, ranks: int, note: Note) -> None:
        self.ranks, self.note = ranks, note

    def gather(self, tensor: Tensor) -> Tensor:
        self.note("all_gather", self.ranks * tensor.nbytes)
        return torch.stack([tensor] * self.ranks)

    def add(self, tensor: Tensor) -> None:
        self.note("all_reduce", tensor.nbytes)

    def scatter(self, parts: Tensor) -> Tensor:
        self.note("reduce_scatter", parts.nbytes)
        return parts[0].clone()
