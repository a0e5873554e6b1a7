"""The norm of the gradients, clipping and scaling, whether every rank holds whole gradients or some rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def grad_norm(parameters: Sequence[nn.Parameter], *, same_bits: bool = False) -> Tensor:
    """The 2-norm of all gradients together: a scalar on the device, equal on all ranks. A collective if sharded.

    Args:
        same_bits: it must not depend on how gradients are sharded. It then takes longer.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    meshes: list[Any] = [parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")]
    if same_bits:
        return (
            _norm_of_whole(parameters, meshes[0].get_group()) if meshes else _norm_of(_norms(_local_grads(parameters)))
        )
    if not meshes:
        return nn.utils.get_total_norm(_local_grads(parameters))
    mesh = max(meshes, key=lambda mesh: mesh.ndim)  # some parameters of a mesh are not split over tensor groups
    cut = "tensor" in mesh.mesh_dim_names
    counted = [p for p in parameters if not cut or mesh.get_local_rank("tensor") == 0 or is_cut(p)]
    grads = _local_grads(counted)
    norm = nn.utils.get_total_norm(grads) if grads else _local_grads(parameters)[0].new_zeros(())
    square = norm.double().square()
    for name in ("shard", "tensor") if cut else ("shard",):
        dist.all_reduce(square, group=mesh.get_group(name))
    return square.sqrt().to(norm.dtype)


def _norm_of_whole(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """The norm of gradients whose rows are sharded over `group`, with the bits that the norm of whole gradients has.

    Each rank gets some of the gradients as a whole, and computes their norms. As many bytes travel as in a
    reduce-scatter.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    grads, begins = _local_grads(parameters), [0, *accumulate(parameter.numel() for parameter in parameters)]
    owners = [begin * ranks // max(1, begins[-1] + 1) for begin in begins[:-1]]
    mine = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner == rank]
    sent = torch.cat([grad.contiguous().view(-1).view(torch.uint8) for grad in grads])
    sent_sizes = [sum(g.nbytes for g, owner in zip(grads, owners, strict=True) if owner == to) for to in range(ranks)]
    sizes = [[_bytes_of(parameter, of, ranks) for parameter in mine] for of in range(ranks)]  # by rank, by gradient
    received = sent.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, sent, [sum(of_rank) for of_rank in sizes], sent_sizes, group=group)
    shards = torch.split(received, [size for of_rank in sizes for size in of_rank])
    wholes = [
        torch.cat(shards[place :: len(mine)]).view(parameter.dtype).view(parameter.shape)
        for place, parameter in enumerate(mine)
    ]
    norms = sent.new_zeros(len(parameters), dtype=torch.float64)
    if mine:  # a slice: a list of places would be copied to the device, and the host would wait for that
        first = owners.index(rank)
        norms[first : first + len(mine)] = torch.stack(_norms(wholes))
    dist.all_reduce(norms, group=group)  # each of them is zero on all ranks but one
    dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads))  # the dtype that a stack has
    total: Tensor = torch.linalg.vector_norm(norms.to(dtype))
    return total


def _bytes_of(parameter: nn.Parameter, rank: int, ranks: int) -> int:
    """The size of the rows of a sharded parameter that a rank holds."""
    rows, each = parameter.shape[0], -(-parameter.shape[0] // ranks)
    held = max(0, min(each, rows - rank * each))
    return held * (parameter.numel() // max(1, rows)) * parameter.element_size()


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(list(tensors))) if tensors else []


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors together, from their norms."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def is_cut(parameter: Any) -> bool:
    """True if the ranks of a tensor group hold different elements of a sharded parameter, and no copies."""
    return parameter.device_mesh.mesh_dim_names[-1] == "tensor" and not parameter.placements[-1].is_replicate()


def clip_grads(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Multiply all gradients by max_norm / norm, if `norm` is larger than `max_norm`. Each rank scales its part."""
    held: Any = [SimpleNamespace(grad=grad) for grad in _local_grads(parameters)]
    nn.utils.clip_grads_with_norm_(held, max_norm, norm)


def scale_grads(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by `factor`. Each rank scales its part."""
    with torch.no_grad():
        for grad in _local_grads(parameters):
            grad.mul_(factor)


def clear_grads(optimizer: torch.optim.Optimizer) -> None:
    """What `optimizer.zero_grad()` does. torch also records it for a profiler, which takes longer."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:  # the user's own may do more
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The part of each gradient that this rank holds, as a plain tensor that shares the gradient's memory."""
    grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():  # so that `to_local` is a look-up, and no node of a graph
        return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
