"""Observes features that a script gathers from all ranks without their gradient and multiplies in a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lockstep_audit.observe import digests, places
from lockstep_audit.observe.recorder import After, recorder

_MOST, _NODES, _READ, _CLOSE, _ALIKE = 8, 2000, 1 << 24, 1e-4, 1e-5
_PRODUCTS = {
    "MmBackward0": {0: "self", 1: "mat2"},
    "BmmBackward0": {0: "self", 1: "mat2"},
    "AddmmBackward0": {1: "mat1", 2: "mat2"},
    "CdistBackward0": {0: "x1", 1: "x2"},
}
"""The factors of autograd functions that compare every row with every other: place and name."""
_gathered: list[tuple[tuple[int, ...], Any, list[str | int] | None, str | None]] = []
"""Since the last backward pass: the shape of the rank's rows, the gathered rows, where, and the remedy."""


def note(values: Sequence[Any], at: list[str | int] | None, remedy: str | None = None) -> None:
    """An all_gather of a tensor that needs a gradient. An autograd function gathers without recording gradients."""
    given = next(digests.tensors_in(values[1:], 2), None)
    is_looked_at = len(_gathered) < _MOST and recorder.is_sampled(recorder.counts.optimizer_steps)
    if is_looked_at and torch.is_grad_enabled() and given is not None and given.requires_grad and given.ndim:
        _gathered.append((tuple(given.shape), values[0], at, remedy))


def by_lightning(owner: Any, data: Any, group: Any = None, sync_grads: bool = False) -> After:
    """LightningModule.all_gather, Fabric.all_gather."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and not sync_grads:
            for given, found in zip(digests.tensors_in(data), digests.tensors_in(result), strict=False):
                note((found, given), at, "all_gather(..., sync_grads=True)")

    return after


def at_backward(root: torch.Tensor | None) -> None:
    """Record a gathered tensor without a gradient that is a factor of a matrix product below a loss."""
    waiting, seen, found = [root.grad_fn if root is not None else None], set[Any](), set[str]()
    while _gathered and waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        for shape, held, at, remedy in _gathered if type(node).__name__ in _PRODUCTS else ():
            if str(at) not in found and _is_factor(node, shape, list(digests.tensors_in(held, 2))):
                found.add(str(at))
                recorder.emit("gathered", limit=4, at=at, remedy=remedy)
    _gathered.clear()


def _is_factor(node: Any, shape: tuple[int, ...], outputs: list[torch.Tensor]) -> bool:
    """True if a factor without a gradient contains the rows of the outputs, or multiples. Reads one of that size."""
    count, size = sum(each.numel() for each in outputs), shape[-1]
    for number, name in _PRODUCTS[type(node).__name__].items():
        sizes = getattr(node, f"_saved_{name}_sym_sizes", None)
        is_sized = not sizes or math.prod(sizes) == count or any(each in sizes[-2:] for each in (size, count // size))
        if not is_sized or not _is_constant(node.next_functions[number][0], outputs):
            continue
        factor = getattr(node, f"_saved_{name}").detach()
        dimensions = [each for each in (-1, -2) if factor.numel() == count and factor.shape[each] == size > 1]
        held = torch.cat([each.detach().flatten() for each in outputs]).view(-1, size)
        if any(_is_of_pieces(factor.movedim(each, -1), held, count // math.prod(shape)) for each in (-1, -2)):
            return True
        rows = _units(held, -1)
        close = _CLOSE * float(rows.abs().sum())
        if any(abs(float(_units(factor, each).sum() - rows.sum())) < close for each in dimensions):
            return True
    return False


def _is_of_pieces(factor: torch.Tensor, held: torch.Tensor, ranks: int) -> bool:
    """True if rows of a factor are pieces of gathered rows, or multiples, and come from all ranks."""
    (count, size), columns = held.shape, factor.shape[-1]
    rows, each = factor.reshape(-1, columns), math.gcd(size, columns)
    pieces = (size - columns) // each + 1
    if not 2 < columns <= size or not 1 < ranks <= len(rows) or count % ranks or count * pieces * columns > _READ:
        return False
    some = torch.linspace(0, len(rows) - 1, min(len(rows), 2 * ranks)).long().to(rows.device)
    found = _units(held.unfold(1, columns, each).reshape(ranks, -1, columns), -1) @ _units(rows[some], -1).T
    best, source = found.amax(1).max(0)
    return bool((best > 1 - _ALIKE).all()) and len(set(source.tolist())) == ranks


def _units(rows: torch.Tensor, dimension: int) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=dimension)


def _is_constant(node: Any, outputs: list[torch.Tensor]) -> bool:
    """True if nothing that the script computed is below a factor. Objects from a collective claim to need gradients."""
    own, waiting = {id(each) for each in outputs}, [node]
    for _ in range(_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is not None and not node.next_functions and id(getattr(node, "variable", None)) not in own:
            return False
        waiting += [inner for inner, _ in node.next_functions] if node is not None else []
    return False
