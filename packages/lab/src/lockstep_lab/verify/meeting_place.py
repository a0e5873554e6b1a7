"""The line of a loss in which the samples of a batch influence each other, such as the division of a Dice loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep_lab.verify.reference import data
from lockstep_lab.verify.step_operations import place_of_caller

_MOST = 2000  # results that are kept: a loss may have loops
_SHIFTS = ("add", "sub", "radd", "rsub", "iadd", "isub")


class _Result(NamedTuple):
    name: str
    place: str
    tensors: list[Tensor]
    shifts: bool
    """True if a number was added to a tensor: up to that number, a sum is still a sum."""
    learns: bool
    """True if a gradient flows through it."""

    @property
    def words(self) -> str:
        """The operation with its place."""
        return f"`{self.name}` at {self.place}" if self.place else self.name


class ResultRecorder(TorchFunctionMode):
    """Inside, the results of a loss are recorded; those of a model count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.found: list[_Result] = []

    def add(self, name: str, tensors: Sequence[Tensor], place: str, *, shifts: bool = False) -> None:
        real = [one for one in tensors if one.is_floating_point() or not (one.ndim or one.is_complex())]
        if real and len(self.found) < _MOST:
            kept = [tensor.detach().clone() for tensor in real]
            self.found.append(_Result(name, place, kept, shifts, any(tensor.requires_grad for tensor in real)))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **dict(kwargs or {}))
        if not self.is_paused:
            name = str(getattr(func, "__name__", "")).strip("_")
            shifts = name in _SHIFTS and sum(isinstance(value, Tensor) for value in args) == 1
            self.add(name, data.tensors(result), place_of_caller()[0], shifts=shifts)
        return result


def meeting_place(whole: ResultRecorder, halves: Sequence[ResultRecorder], sizes: Sequence[int]) -> str:
    """The first result that is neither the concatenation of the halves, nor their sum or mean.

    Args:
        whole, halves: of the same operations with a batch and with its two halves.
        sizes: samples of the halves.

    Returns:
        the name of the operation, and its file and line; empty if the halves need different operations, or there is
        none.
    """
    if any([one.name for one in half.found] != [one.name for one in whole.found] for half in halves):
        return ""
    meeting = [
        one
        for one, *of_halves in zip(whole.found, *(half.found for half in halves), strict=True)
        if not one.shifts
        and any(
            not adds_up(*tensors, sizes=sizes)
            for tensors in zip(one.tensors, *(half.tensors for half in of_halves), strict=False)
        )
    ]
    first = next((one for one in meeting if one.learns), next(iter(meeting), None))
    return "" if first is None else first.words


def divisor(
    whole: ResultRecorder, halves: Sequence[ResultRecorder], losses: Sequence[float], sizes: Sequence[int]
) -> str:
    """The sum over the samples of a batch that a loss was divided by: its operation and place. Empty if there is none.

    Such a loss is a mean. Times this sum, it adds up, perhaps after a division by the number of samples. A gradient
    does not flow through the sum: it counts what is known before the training.

    Args:
        losses: of the batch and of its two halves.
        sizes: their samples.
    """
    if any([one.name for one in half.found] != [one.name for one in whole.found] for half in halves):
        return ""
    for one, *of_halves in zip(whole.found, *(half.found for half in halves), strict=True):
        sums = [float(each.tensors[0]) for each in (one, *of_halves) if not each.tensors[0].ndim]
        if one.learns or len(sums) < 3 or min(sums) <= 0 or not _is_sum(sums) or _near_share(sums, sizes):
            continue
        for factors in ([1.0] * 3, sizes):
            if _is_sum([loss * of / factor for loss, of, factor in zip(losses, sums, factors, strict=True)]):
                return str(one.words)
    return ""


def _is_sum(values: Sequence[float]) -> bool:
    """True if the first value is the sum of the others."""
    return math.isclose(values[0], sum(values[1:]), rel_tol=1e-6)


def _near_share(sums: Sequence[float], sizes: Sequence[int]) -> bool:
    """True if a sum is proportional to the number of samples, so that both are possible divisors."""
    return all(math.isclose(of / sums[0], size / sizes[0], rel_tol=1e-6) for of, size in zip(sums, sizes, strict=True))


def adds_up(whole: Tensor, first: Tensor, second: Tensor, *, sizes: Sequence[int]) -> bool:
    if not whole.ndim == first.ndim == second.ndim:
        return False
    if whole.shape == first.shape == second.shape:
        mean = (sizes[0] * first + sizes[1] * second) / sum(sizes)
        alike = _near(whole, first) and _near(whole, second)
        return alike or _near(whole, first + second) or _near(whole, mean)
    for dim, size in enumerate(whole.shape):
        others = [[*one.shape[:dim], *one.shape[dim + 1 :]] for one in (whole, first, second)]
        if size == first.shape[dim] + second.shape[dim] and others[0] == others[1] == others[2]:
            return _near(whole, torch.cat([first, second], dim))
    return False


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
