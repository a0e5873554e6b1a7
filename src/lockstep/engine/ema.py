"""The exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """avg = decay * avg + (1 - decay) * parameter, after every update (Polyak & Juditsky 1992).

    Bit for bit torch's `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`, where parameters have 32 or more
    bits. Buffers are not averaged. Frozen parameters have averages too, so that thawing them later needs no care.

    Args:
        model: wrapped already, if it will be: its parameter objects are held, and changed in place.
        decay: in [0, 1].

    Raises:
        ValueError: a decay outside [0, 1].

    tensors: average by parameter name, tied parameters once, on the parameter's device, without gradient. float32 for
    parameters of fewer bits, because a step of (1 - decay) is mostly lost in them; else in the parameter's dtype.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {}
        self._inside = False
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, parameter in self._parameters.items():
            narrow = parameter.is_floating_point() and parameter.element_size() < 4
            dtype = torch.float32 if narrow else parameter.dtype
            average = self.tensors[name] = parameter.detach().to(dtype, copy=True)
            # A narrow one is alone in its group, so that only one float32 copy of a parameter exists at a time.
            groups.setdefault((name,) if narrow else (type(average), average.device, dtype), []).append(name)
        self._groups = list(groups.values())

    def update(self) -> None:
        """Take in the current parameters: once after each applied update. No host synchronisation."""
        if self._inside:
            raise RuntimeError("Ema.update inside Ema.applied: the parameters hold the averages")
        for names in self._groups:
            averages = [self.tensors[name] for name in names]
            current = [
                self._parameters[name].detach().to(average.dtype) for name, average in zip(names, averages, strict=True)
            ]
            self._average(averages, current, 0)  # the count is for other averages than this one

    @contextlib.contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Inside, the parameters hold the averages; afterwards both are as they were, bit for bit, also after an exception.

        Values are exchanged in place: parameters and their storages stay, and at most one temporary tensor exists besides
        a copy of the parameters with fewer than 32 bits. Inside, `tensors` is not to be used: it may hold the raw weights.
        Inside itself it changes nothing. Sharded models use it inside `Strategy.inference`, or they go on with the
        values that they gathered before.
        """
        if self._inside:
            yield
            return
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_inside", False)
            self._inside = True
            for name, parameter in self._parameters.items():
                # Undone last to first: parameters that are views of one storage come back right in that order alone.
                undo.callback(_exchange(parameter, self.tensors[name]))
            yield


def _exchange(parameter: nn.Parameter, average: Tensor) -> Callable[[], object]:
    """Give `parameter` the values of `average`. Returns what gives both of them their own values back."""
    with torch.no_grad():
        raw = parameter.clone()  # first, since only this can fail
        parameter.copy_(average)
        if average.dtype != parameter.dtype:  # back from fewer bits the average would not be itself
            return partial(_put_back, parameter, raw)
        average.copy_(raw)
        return partial(_exchange, parameter, average)


def _put_back(parameter: nn.Parameter, raw: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(raw)
