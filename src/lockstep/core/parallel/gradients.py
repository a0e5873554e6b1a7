"""The norm of the gradients, clipping and scaling, whether every rank holds whole gradients or some rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together: a scalar on the device, equal on all ranks. A collective if sharded."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    meshes: list[Any] = [parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")]
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


def _local_grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The part of each gradient that this rank holds, as a plain tensor that shares the gradient's memory."""
    grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():  # so that `to_local` is a look-up, and no node of a graph
        return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
