"""A check that the gradient of a loss is its derivative: they are compared along two directions, in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep_lab.verify.comparable_task import sum_of_heads
from lockstep_lab.verify.reference import data
from lockstep_lab.verify.repetition import unchanged_buffers

Pairs = list[tuple[nn.Parameter, Tensor]]
"""Parameters with their gradients."""
_STEP = 1e-6  # of the 2-norm of all parameters
_ALLOWED = 1e-2  # of the gradient's norm; at a kink of an activation, the difference is not the derivative
_ALLOWED_OWN = 1e-4  # for custom backward passes, with two step sizes that measure the effect of a kink
_TORCH = "torch."


def own_backwards(objective: Tensor) -> dict[str, list[Tensor]]:
    """The classes of `torch.autograd.Function` in the graph of a loss, each with the parameters below it.

    They are named with file and line. Classes of torch itself are left out.
    """
    found: dict[str, dict[int, Tensor]] = {}
    for node in _below(objective.grad_fn):
        written = getattr(type(node), "_forward_cls", None)
        if written is not None and not written.__module__.startswith(_TORCH):
            variables = [variable for one in _below(node) if (variable := getattr(one, "variable", None)) is not None]
            found.setdefault(_name(written), {}).update((id(variable), variable) for variable in variables)
    return {name: list(variables.values()) for name, variables in found.items() if variables}


def _below(start: Any) -> list[Any]:
    """The nodes of a graph that a backward pass reaches from `start`."""
    nodes, waiting = dict.fromkeys([] if start is None else [start]), [] if start is None else [start]
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - nodes.keys()
        nodes |= dict.fromkeys(following)
        waiting += following
    return list(nodes)


def _name(written: type) -> str:
    try:
        line = inspect.getsourcelines(written)[1]
        return f"{written.__qualname__} ({Path(inspect.getfile(written)).name}:{line})"
    except (OSError, TypeError):
        return written.__qualname__


def wrong_derivative(
    call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, *, epsilon: float = 2.0**-52
) -> str:
    """The difference of the gradient from the derivative of the loss by central differences; empty if there is none.

    The directions are the gradient's, and the same with random signs. For each custom `torch.autograd.Function`, only
    the parameters below it are also moved, including in a random direction, with a stricter bound. Parameters are
    restored, bit for bit.

    Args:
        call: returns the loss, or losses by head.
        model: in float64. Its forward pass draws no random numbers.
        epsilon: relative rounding of the coarsest number format in the forward pass.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with unchanged_buffers(model):
        objective = sum_of_heads(data.heads(call(model, batch)))
    if not parameters or not objective.requires_grad:
        return ""
    functions = own_backwards(objective)
    found = torch.autograd.grad(objective, parameters, allow_unused=True)
    pairs = [(parameter, grad) for parameter, grad in zip(parameters, found, strict=True) if grad is not None]
    norm = _norm([grad for _, grad in pairs])
    if any(parameter.dtype != torch.float64 for parameter, _ in pairs):
        return ""
    probe = _Probe(call, model, batch, epsilon)
    if norm:
        for directions in _directions(pairs, norm)[:2]:
            slope, expected = probe.slope(pairs, directions), _along(pairs, directions)
            if abs(slope - expected) > max(_ALLOWED * norm, probe.rounding(pairs)):
                return _words(slope, expected)
    for name, variables in functions.items():
        below = {id(variable) for variable in variables}
        own = [(parameter, grad) for parameter, grad in pairs if id(parameter) in below]
        own_norm = _norm([grad for _, grad in own])
        for directions in _directions(own, own_norm) if own else ():
            slopes = [probe.slope(own, directions, share) for share in (1.0, 0.25)]
            expected = _along(own, directions)
            largest = max(own_norm, *map(abs, slopes))
            allowed = max(_ALLOWED_OWN * largest, 10 * abs(slopes[0] - slopes[1]), 4 * probe.rounding(own))
            if abs(slopes[0] - expected) > allowed:
                return f"{_words(slopes[0], expected)}. Only parameters below {name} were moved"
    return ""


def _words(slope: float, expected: float) -> str:
    return f"along a direction in which the loss rises by {slope:.4g}, the gradient says {expected:.4g}"


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _along(pairs: Pairs, directions: list[Tensor]) -> float:
    """The derivative along a direction, according to the gradient."""
    return sum(float((grad * one).sum()) for (_, grad), one in zip(pairs, directions, strict=True))


def _directions(pairs: Pairs, norm: float) -> list[list[Tensor]]:
    """Directions of length 1: the gradient's, the same with random signs, and a random one."""
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(0, 2, grad.shape, generator=generator).to(grad) * 2 - 1 for _, grad in pairs]
    drawn = [torch.randn(grad.shape, generator=generator).to(grad) for _, grad in pairs]
    length = _norm(drawn)
    random = [one / length for one in drawn]
    if not norm:  # a backward pass that returns zeros
        return [random]
    along = [grad / norm for _, grad in pairs]
    return [along, [sign * one for sign, one in zip(signs, along, strict=True)], random]


class _Probe:
    """Moves parameters of a model, and measures how its loss changes."""

    def __init__(self, call: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, epsilon: float) -> None:
        self.call, self.model, self.batch, self.epsilon = call, model, batch, epsilon
        self.step = max(_STEP, math.cbrt(epsilon) / 10)  # a smaller step has more rounding, a larger one more curvature
        self.largest = 0.0

    def _size(self, pairs: Pairs) -> float:
        return self.step * max(1.0, _norm(parameter.detach() for parameter, _ in pairs))

    def rounding(self, pairs: Pairs) -> float:
        """How much rounding of the losses so far may change a slope."""
        return 10 * self.epsilon * self.largest / self._size(pairs)

    def slope(self, pairs: Pairs, directions: list[Tensor], share: float = 1.0) -> float:
        """The derivative of the loss along a direction, by a central difference.

        Args:
            share: of the usual step size.
        """
        size = share * self._size(pairs)
        values = [self._moved([parameter for parameter, _ in pairs], directions, by) for by in (size, -size)]
        self.largest = max(self.largest, *map(abs, values))
        return (values[0] - values[1]) / (2 * size)

    def _moved(self, parameters: list[nn.Parameter], directions: list[Tensor], by: float) -> float:
        """The loss at moved parameters."""
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=by)
            try:
                with unchanged_buffers(self.model):
                    return float(sum_of_heads(data.heads(self.call(self.model, self.batch))))
            finally:
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
