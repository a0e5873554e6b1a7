"""Observes numbers that a script reads from tensors, and recognizes quotients that it computes from them by hand."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import torch

from lockstep_audit.observe import places
from lockstep_audit.observe.recorder import After

READS = ("item", "tolist", "__int__", "__float__")
"""Methods of tensors that read numbers."""
_MOST, _LINES, _LARGEST = 8, 4, 1e9
_FINE, _CLOSE = 1e-6, 1e-9
_numbers: deque[int] = deque(maxlen=_MOST)
"""Since the last backward pass, outside training: the last counts that the script read."""
_totals: dict[str, int] = {}
"""By line, the sum of the counts that it read."""


def read(tensor: Any, *_: Any, **__: Any) -> After:
    """Tensor.item and the like, outside training."""
    if torch.is_grad_enabled() or type(tensor) is not torch.Tensor or tensor.numel() > _MOST:
        return None

    def after(result: Any, error: BaseException | None) -> None:
        found = torch.as_tensor(result).flatten().tolist() if error is None else []
        counts = [int(number) for number in found if 0 <= number < _LARGEST and number == int(number)]
        _numbers.extend(counts)
        if counts:
            at = str(places.here())
            _totals[at] = _totals.pop(at, 0) + counts[-1]

    return after


def forget() -> None:
    """Training continues."""
    _numbers.clear()
    _totals.clear()


def divisors(value: float, dtype: torch.dtype) -> dict[str, int] | None:
    """The ways in which a number between 0 and 1 is a quotient of the counts, and the divisor of each.

    These are precision, recall, the index of Jaccard, and F1. None: nothing is known about it.
    """
    precision = torch.finfo(dtype).eps
    if not _numbers or not 0 < value < 1 or precision > _FINE:
        return None
    held = {str(place - len(_numbers)): number for place, number in enumerate(_numbers)}
    held |= dict(list(_totals.items())[-_LINES:])
    within, found = max(precision, _CLOSE) * value, dict[str, int]()
    for hits, a in held.items():
        others = [(name, number) for name, number in held.items() if name != hits]
        pairs = [(f"{name} + {other}", b + c) for (name, b), (other, c) in itertools.combinations(others, 2)]
        ways = [(f"{hits} / {name}", a, b) for name, b in others]
        ways += [(f"{hits} / ({hits} + {rest})", a, a + b) for rest, b in others + pairs]
        ways += [(f"2 {hits} / (2 {hits} + {rest})", 2 * a, 2 * a + b) for rest, b in pairs]
        ways += [(f"2 {hits} / ({rest})", 2 * a, b) for rest, b in pairs]
        found |= {way: by for way, number, by in ways if by and abs(number / by - value) <= within}
    return found
