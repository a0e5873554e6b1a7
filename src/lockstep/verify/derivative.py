"""Whether the gradient of a loss is its derivative: they are compared along two directions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.verify.comparable_task import sum_of_heads
from lockstep.verify.reference import data
from lockstep.verify.repetition import unchanged_buffers

_STEP = 1e-6  # of the 2-norm of all parameters
_ALLOWED = 1e-2  # of the gradient's norm; where an activation has a kink, the difference is not the derivative


def wrong_derivative(call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> str:
    """How the gradient differs from the derivative of the loss by central differences; empty where it does not.

    The directions are that of the gradient, and the same with random signs. Parameters are put back, bit for bit.

    Args:
        call: returns the loss, or losses by head.
        model: in float64. Its forward pass draws no random numbers.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with unchanged_buffers(model):
        objective = sum_of_heads(data.heads(call(model, batch)))
    if not parameters or not objective.requires_grad:
        return ""
    found = torch.autograd.grad(objective, parameters, allow_unused=True)
    pairs = [(parameter, grad) for parameter, grad in zip(parameters, found, strict=True) if grad is not None]
    norm = sum(float(grad.square().sum()) for _, grad in pairs) ** 0.5
    if not norm or any(parameter.dtype != torch.float64 for parameter, _ in pairs):
        return ""
    size = _STEP * max(1.0, sum(float(parameter.detach().square().sum()) for parameter, _ in pairs) ** 0.5)
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(0, 2, grad.shape, generator=generator).to(grad) * 2 - 1 for _, grad in pairs]
    for directions in (
        [grad / norm for _, grad in pairs],
        [s * g / norm for s, (_, g) in zip(signs, pairs, strict=True)],
    ):
        expected = sum(float((grad * one).sum()) for (_, grad), one in zip(pairs, directions, strict=True))
        values = [
            _moved(call, model, batch, [parameter for parameter, _ in pairs], directions, by) for by in (size, -size)
        ]
        slope = (values[0] - values[1]) / (2 * size)
        if abs(slope - expected) > _ALLOWED * norm:
            return f"along a direction in which the loss rises by {slope:.4g}, the gradient says {expected:.4g}"
    return ""


def _moved(
    call: Callable[[nn.Module, Any], Any],
    model: nn.Module,
    batch: Any,
    parameters: list[nn.Parameter],
    directions: list[Tensor],
    by: float,
) -> float:
    """The loss where the parameters are moved."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_(direction, alpha=by)
        try:
            with unchanged_buffers(model):
                return float(sum_of_heads(data.heads(call(model, batch))))
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
