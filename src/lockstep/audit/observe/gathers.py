"""Observes features that a script gathers from all ranks without their gradient, and multiplies in a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.audit.observe import digests
from lockstep.audit.observe.recorder import recorder

_MOST, _NODES, _CLOSE = 8, 2000, 1e-4
_gathered: list[tuple[int, list[torch.Tensor], list[str | int] | None]] = []
"""Since the last backward pass: the elements that came together, the tensors, and where."""


def note(values: Sequence[Any], at: list[str | int] | None) -> None:
    """An all_gather of what needs a gradient. A function of autograd gathers where no gradients are recorded."""
    given = next(digests.tensors_in(values[1:], 1), None)
    is_looked_at = len(_gathered) < _MOST and recorder.is_sampled(recorder.counts.optimizer_steps)
    if is_looked_at and torch.is_grad_enabled() and given is not None and given.requires_grad:
        outputs = list(digests.tensors_in(values[0], 2))
        _gathered.append((sum(each.numel() for each in outputs), outputs, at))


def at_backward(root: torch.Tensor | None) -> None:
    """Note a gathered tensor that is a factor of a product of matrices below a loss, and has no gradient."""
    waiting, seen, found = [root.grad_fn if root is not None else None], set[Any](), set[str]()
    while _gathered and waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        for count, outputs, at in _gathered:
            if str(at) not in found and _is_factor(node, count, outputs):
                found.add(str(at))
                recorder.emit("gathered", limit=4, at=at, elements=count)
    _gathered.clear()


def _is_factor(node: Any, count: int, outputs: list[torch.Tensor]) -> bool:
    """True if a factor without a gradient has the elements of the outputs. Only a product of that size is read."""
    if type(node).__name__ != "MmBackward0":
        return False
    for (inner, _), name in zip(node.next_functions, ("self", "mat2"), strict=True):
        rows, columns = getattr(node, f"_saved_{name}_sym_sizes")
        if inner is None and rows * columns == count:
            total = sum(float(each.detach().double().sum()) for each in outputs)
            size = sum(float(each.detach().double().abs().sum()) for each in outputs)
            return abs(float(getattr(node, f"_saved_{name}").double().sum()) - total) < _CLOSE * size
    return False
