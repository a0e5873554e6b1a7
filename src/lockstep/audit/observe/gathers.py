"""Observes features that a script gathers from all ranks without their gradient, and multiplies in a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.audit.observe import digests, places
from lockstep.audit.observe.data import After
from lockstep.audit.observe.recorder import recorder

_MOST, _NODES, _CLOSE = 8, 2000, 1e-4
_PRODUCTS = {
    "MmBackward0": {0: "self", 1: "mat2"},
    "BmmBackward0": {0: "self", 1: "mat2"},
    "AddmmBackward0": {1: "mat1", 2: "mat2"},
    "CdistBackward0": {0: "x1", 1: "x2"},
}
"""The factors of functions of autograd that compare each row with each other: place and name."""
_gathered: list[tuple[int, Any, list[str | int] | None, str | None]] = []
"""Since the last backward pass: the size of a row, what holds the rows of all ranks, where, and what would help."""


def note(values: Sequence[Any], at: list[str | int] | None, remedy: str | None = None) -> None:
    """An all_gather of what needs a gradient. A function of autograd gathers where no gradients are recorded."""
    given = next(digests.tensors_in(values[1:], 2), None)
    is_looked_at = len(_gathered) < _MOST and recorder.is_sampled(recorder.counts.optimizer_steps)
    if is_looked_at and torch.is_grad_enabled() and given is not None and given.requires_grad and given.ndim:
        _gathered.append((given.shape[-1], values[0], at, remedy))


def by_lightning(owner: Any, data: Any, group: Any = None, sync_grads: bool = False) -> After:
    """LightningModule.all_gather, Fabric.all_gather."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and not sync_grads:
            for given, found in zip(digests.tensors_in(data), digests.tensors_in(result), strict=False):
                note((found, given), at, "all_gather(..., sync_grads=True)")

    return after


def at_backward(root: torch.Tensor | None) -> None:
    """Note a gathered tensor that is a factor of a product of matrices below a loss, and has no gradient."""
    waiting, seen, found = [root.grad_fn if root is not None else None], set[Any](), set[str]()
    while _gathered and waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        for size, held, at, remedy in _gathered if type(node).__name__ in _PRODUCTS else ():
            if str(at) not in found and _is_factor(node, size, list(digests.tensors_in(held, 2))):
                found.add(str(at))
                recorder.emit("gathered", limit=4, at=at, remedy=remedy)
    _gathered.clear()


def _is_factor(node: Any, size: int, outputs: list[torch.Tensor]) -> bool:
    """True if a factor without a gradient has the rows of the outputs, or multiples. Only one of that size is read."""
    count = sum(each.numel() for each in outputs)
    for number, name in _PRODUCTS[type(node).__name__].items():
        sizes = getattr(node, f"_saved_{name}_sym_sizes", None)
        if not _is_constant(node.next_functions[number][0], outputs) or (sizes and math.prod(sizes) != count):
            continue
        factor = getattr(node, f"_saved_{name}").detach()
        dimensions = [each for each in (-1, -2) if factor.numel() == count and factor.shape[each] == size > 1]
        rows = _units(torch.cat([each.detach().flatten() for each in outputs]).view(-1, size), -1)
        close = _CLOSE * float(rows.abs().sum())
        if any(abs(float(_units(factor, each).sum() - rows.sum())) < close for each in dimensions):
            return True
    return False


def _units(rows: torch.Tensor, dimension: int) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=dimension)


def _is_constant(node: Any, outputs: list[torch.Tensor]) -> bool:
    """True if nothing that the script computed is below a factor. What came as an object says it needs gradients."""
    own, waiting = {id(each) for each in outputs}, [node]
    for _ in range(_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is not None and not node.next_functions and id(getattr(node, "variable", None)) not in own:
            return False
        waiting += [inner for inner, _ in node.next_functions] if node is not None else []
    return False
