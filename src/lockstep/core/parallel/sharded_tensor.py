"""The part of a sharded tensor that is on this rank, and the whole tensor. All functions take plain tensors too.

A sharded tensor is a DTensor whose rows (its first dimension) are spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import TrainingError
from lockstep.core.parallel.world import World


@dataclass(frozen=True)
class LocalShard:
    """The rows of a tensor that one rank holds; all rows where the tensor is not sharded."""

    local: Tensor
    """The rows, as a plain tensor."""
    start: int
    """Number of the first of these rows in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    writer: bool | None = None
    """True if this rank is the one to save these rows. None: every rank holds them."""


def is_sharded(tensor: Tensor) -> bool:
    """True if this rank holds only a part of the tensor."""
    return hasattr(tensor, "device_mesh")  # a DTensor; to import its class would take a second


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is on this rank, as a plain tensor that shares its memory."""
    plain: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return plain


def local_shard(tensor: Any, number: int = 0) -> LocalShard:
    """The part of `tensor` that is on this rank, and its place in the whole.

    Args:
        number: of the tensor among those that are saved. Replicas of the rows take turns to be the writer, by this
            number.

    Raises:
        TrainingError: the tensor is spread in another way than by rows.
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return LocalShard(tensor, 0, tuple(tensor.shape))
    mesh = tensor.device_mesh
    placements = [type(placement).__name__ for placement in tensor.placements]
    if placements[-1] != "Shard" or tensor.placements[-1].dim != 0 or placements[:-1] not in ([], ["Replicate"]):
        raise TrainingError(
            f"a tensor of shape {tuple(tensor.shape)} is spread as {placements}; only rows over ranks are known"
        )
    position, ranks = mesh.get_local_rank("shard"), mesh.size(mesh.mesh_dim_names.index("shard"))
    each = -(-tensor.shape[0] // ranks)  # as torch.chunk cuts
    writer = mesh.ndim == 1 or number % mesh.size(0) == mesh.get_local_rank("replicate")
    return LocalShard(local(tensor), min(position * each, tensor.shape[0]), tuple(tensor.shape), writer)


def like(rows: Tensor, model: Any) -> Tensor:
    """`rows`, this rank's part of a tensor, as a sharded tensor that is spread as `model` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def gather(tensor: Any) -> Tensor:
    """The whole tensor, on every rank. A collective where the tensor is sharded."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def gather_on_rank0(tensor: Tensor, world: World) -> Tensor:
    """The whole tensor in host memory on rank 0; an empty tensor elsewhere. A collective if the tensor is sharded."""
    whole = gather(tensor.detach())
    return whole.cpu() if world.rank == 0 else torch.empty(0)
