"""The part of a sharded tensor that is on this rank, and the whole tensor. All functions take plain tensors too.

A sharded tensor is a DTensor whose rows (its first dimension) are spread over ranks. On a mesh, a tensor group may have
split it before: by rows, and each piece is spread again, or by columns (its second dimension).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.errors import TrainingError
from lockstep.core.parallel.world import World


@dataclass(frozen=True)
class LocalShard:
    """The rows of a tensor that one rank holds; all rows if the tensor is not sharded."""

    local: Tensor
    """The rows, as a plain tensor."""
    start: int
    """Number of the first of these rows in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    writer: bool | None = None
    """True if this rank is the one to save these rows. None: every rank holds them."""
    columns: slice | None = None
    """The columns that this rank holds of the rows. None: all."""


def is_sharded(tensor: Tensor) -> bool:
    """True if this rank holds only a part of the tensor."""
    return hasattr(tensor, "device_mesh")  # a DTensor; to import its class would take a second


def is_spread(parameter: Any) -> bool:
    """True while FSDP has not gathered a parameter. A gathered one may still be split over a tensor group."""
    return is_sharded(parameter) and "shard" in parameter.device_mesh.mesh_dim_names


def local(tensor: Any) -> Tensor:
    """The part of a tensor that is on this rank, as a plain tensor that shares its memory."""
    plain: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return plain


def rows_by_rank(tensor: Any) -> list[int]:
    """The rows that each rank of a group of shards holds. Empty: the tensor is not sharded.

    If a tensor group also splits the rows, each of its ranks has such a group for its part.
    """
    if not is_spread(tensor):
        return []
    mesh, rows = tensor.device_mesh, len(tensor)
    for name, placement in zip(mesh.mesh_dim_names, tensor.placements, strict=True):
        rows //= _place(mesh, name)[1] if name == "tensor" and _cut_of(placement) == 0 else 1
    return chunks(rows, _place(mesh, "shard")[1])


def chunks(rows: int, ranks: int) -> list[int]:
    """The sizes of the chunks of `torch.chunk`, and zeros for the ranks that get none."""
    each = -(-rows // ranks)
    return [min(each, max(0, rows - rank * each)) for rank in range(ranks)]


def local_shard(tensor: Any, number: int = 0, place: tuple[int, int] = (0, 1)) -> LocalShard:
    """The part of `tensor` that is on this rank, and its place in the whole.

    Args:
        number: of the tensor among those that are saved. Replicas of the rows take turns to be the writer, by this
            number.
        place: of this rank in its tensor group, and the size of the group. A tensor that the group does not cut does
            not know the group, and each of its ranks has a replica.

    Raises:
        TrainingError: the tensor is not spread by rows, or by columns over a tensor group.
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return LocalShard(tensor, 0, tuple(tensor.shape))
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    cuts = {name: _cut_of(placement) for name, placement in zip(mesh.mesh_dim_names, tensor.placements, strict=True)}
    cut = cuts.get("tensor")
    if cuts["shard"] != 0 or cuts.get("replicate") is not None or cut not in (None, 0, 1):
        placed = [type(placement).__name__ for placement in tensor.placements]
        raise TrainingError(f"a tensor of shape {shape} is spread as {placed}; only rows over ranks are known")
    rows, start, columns = shape[0], 0, None
    replica, replicas = (0, 1) if "tensor" in cuts else place
    if cut is not None:
        number_in_group, parts = _place(mesh, "tensor")
        width = shape[cut] // parts
        if cut == 0:
            rows, start = width, number_in_group * width
        else:
            columns = slice(number_in_group * width, (number_in_group + 1) * width)
    for name in [name for name in cuts if cuts[name] is None]:
        of_dimension, parts = _place(mesh, name)
        replica, replicas = replica * parts + of_dimension, replicas * parts
    of_shard, parts = _place(mesh, "shard")
    start += sum(chunks(rows, parts)[:of_shard])
    return LocalShard(local(tensor), start, shape, number % replicas == replica, columns)


def _cut_of(placement: Any) -> int | None:
    """The dimension that a placement splits. None: it splits none. torch has several classes of such placements."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def _place(mesh: Any, name: str) -> tuple[int, int]:
    """The place of this rank in a dimension of a mesh, and the size of the dimension."""
    return mesh.get_local_rank(name), mesh.size(mesh.mesh_dim_names.index(name))


def whole_rows(shard: LocalShard, tensor: Any) -> LocalShard:
    """Whole rows of a tensor that is split by columns: each rank of the tensor group gets some of the group's rows.

    A collective of the tensor group if it is split so, else `shard` itself: files hold rows on any mesh.
    """
    if shard.columns is None:
        return shard
    place, ranks = _place(tensor.device_mesh, "tensor")
    parts = [torch.empty_like(shard.local) for _ in range(ranks)]
    dist.all_gather(parts, shard.local.contiguous(), group=tensor.device_mesh.get_group("tensor"))
    counts = chunks(len(shard.local), ranks)
    begin = sum(counts[:place])
    rows = torch.cat([part[begin : begin + counts[place]] for part in parts], dim=1)
    # On the host at once: a GPU then holds the rows of one tensor at a time.
    return LocalShard(rows.cpu(), shard.start + begin, shard.shape, writer=True)


def own_columns(rows: Tensor, target: Any) -> Tensor:
    """From whole rows of the tensor `target`, the columns that this rank holds."""
    columns = local_shard(target).columns if rows.ndim > 1 and is_sharded(target) else None
    return rows if columns is None else rows[:, columns]


def like(rows: Tensor, model: Any) -> Tensor:
    """`rows`, this rank's part of a tensor, as a sharded tensor that is spread as `model` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def gather(tensor: Any) -> Tensor:
    """The whole tensor, on every rank. A collective if the tensor is sharded."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def gather_on_rank0(tensor: Tensor, world: World) -> Tensor:
    """The whole tensor in host memory on rank 0; an empty tensor elsewhere. A collective if the tensor is sharded."""
    whole = gather(tensor.detach())
    return whole.cpu() if world.rank == 0 else torch.empty(0)
