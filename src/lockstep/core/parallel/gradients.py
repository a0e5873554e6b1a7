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
    grads = _local_grads(parameters)
    norm = nn.utils.get_total_norm(grads)
    mesh: Any = getattr(parameters[0], "device_mesh", None) if grads else None
    if mesh is None:
        return norm
    square = norm.double().square()
    dist.all_reduce(square, group=mesh.get_group("shard"))
    return square.sqrt().to(norm.dtype)


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
