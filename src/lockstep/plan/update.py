"""What an optimizer keeps and what it needs for a moment, found by running it on small tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.plan.trace import LiveBytes

_SIDES = (2, 3, 5, 7, 11)  # of the small tensors: different, so that a state's dimensions can be told apart


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[float, int]:
    """The bytes of state that `optimizer` keeps for `parameter`, as found on a small tensor of its own.

    Returns:
        bytes for each element, of tensors that have the shape of the parameter; and bytes of other tensors.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    sides = _SIDES[: parameter.ndim] + (2,) * max(0, parameter.ndim - len(_SIDES))
    small = nn.Parameter(torch.ones(sides, dtype=parameter.dtype))
    trial = _trial(optimizer, [small], group)
    per_element, other = 0.0, 0
    for value in trial.state[small].values():
        if not isinstance(value, Tensor):
            continue
        if value.shape == small.shape and small.ndim:
            per_element += value.element_size()
        elif value.ndim == small.ndim:  # a factor, such as Adafactor's sums over rows
            shape = [
                real if side == kept else kept
                for real, side, kept in zip(parameter.shape, sides, value.shape, strict=True)
            ]
            other += math.prod(shape) * value.element_size()
        else:
            other += value.nbytes
    return per_element, other


def temporaries_of(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[float, float]:
    """Temporary bytes of an update: for each element of all parameters, and of the largest parameter."""
    side = 64
    peaks = {}
    for count in (1, 2, 6):
        small = [nn.Parameter(torch.ones(side, side, dtype=dtype)) for _ in range(count)]
        trial = _trial(optimizer, small, optimizer.param_groups[0])
        fixed = [*small, *(p.grad for p in small if p.grad is not None)]
        fixed += [v for state in trial.state.values() for v in state.values() if isinstance(v, Tensor)]
        with LiveBytes(fixed) as live:
            trial.step()
        peaks[count] = max(segment.most for segment in live.segments) / side**2
    of_all = (peaks[6] - peaks[2]) / 4  # with two, a loop over parameters still holds a tensor of the one before
    of_all = max(0.0, round(of_all, 2))  # counters of a few bytes
    return of_all, max(0.0, round(peaks[1] - of_all, 2))


def _trial(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], group: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer like `optimizer` over `parameters`, after its first update."""
    options = {key: value for key, value in group.items() if key not in ("params", "name", "base_lr", "initial_lr")}
    trial = type(optimizer)([{"params": parameters, **options}], **_first_arguments(optimizer))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trial.step()
    return trial


def _first_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"lr": optimizer.defaults["lr"]}
