"""The exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """average = decay * average + (1 - decay) * parameter, after every update (Polyak and Juditsky 1992).

    The numbers are those of torch's `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`, bit for bit,
    where parameters have 32 bits or more. Buffers are not averaged. Frozen parameters have averages too, so that
    nothing needs to change when they begin to train.

    Args:
        model: already wrapped, if it will be wrapped: the averages keep its parameter objects.
        decay: in [0, 1].

    Raises:
        ValueError: `decay` is outside [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {}
        """Averages by name of the parameter, on its device, without gradient; tied parameters once. They have the
        parameter's dtype, but float32 where that has fewer bits: it would lose most of a step of (1 - decay)."""
        self._inside = False
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, parameter in self._parameters.items():
            narrow = parameter.is_floating_point() and parameter.element_size() < 4
            dtype = torch.float32 if narrow else parameter.dtype
            average = self.tensors[name] = parameter.detach().to(dtype, copy=True)
            # A narrow parameter is alone in its group, so that only one float32 copy of a parameter exists at a time.
            groups.setdefault((name,) if narrow else (type(average), average.device, dtype), []).append(name)
        self._groups = list(groups.values())

    def update(self) -> None:
        """Add the current parameters to the averages. Call it after each applied update. Does not wait."""
        if self._inside:
            raise RuntimeError("Ema.update inside Ema.applied: the parameters hold the averages")
        for names in self._groups:
            averages = [self.tensors[name] for name in names]
            current = [
                self._parameters[name].detach().to(average.dtype) for name, average in zip(names, averages, strict=True)
            ]
            self._average(averages, current, 0)  # an exponential average ignores the count

    @contextlib.contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Inside, the parameters hold the averages. Afterwards both are bit for bit as before, also after an exception.

        Values are exchanged in place. Parameters keep their storages, and at most one temporary tensor exists at a
        time, besides a copy of the parameters that have fewer than 32 bits. Inside, do not use `tensors`: they may hold
        the raw weights. A nested call changes nothing. With a sharded model, call it inside `Strategy.inference`:
        otherwise the model uses the values that it gathered before.
        """
        if self._inside:
            yield
            return
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, self, "_inside", False)
            self._inside = True
            for name, parameter in self._parameters.items():
                # ExitStack undoes the last exchange first. Parameters that are views of one storage need this order.
                undo.callback(_exchange(parameter, self.tensors[name]))
            yield


def _exchange(parameter: nn.Parameter, average: Tensor) -> Callable[[], object]:
    """Exchange the values of `parameter` and `average`. Returns a function that gives both their own values back."""
    with torch.no_grad():
        raw = parameter.clone()  # first, because only this line can fail
        parameter.copy_(average)
        if average.dtype != parameter.dtype:  # the average would lose bits on its way back, so it stays where it is
            return partial(_put_back, parameter, raw)
        average.copy_(raw)
        return partial(_exchange, parameter, average)


def _put_back(parameter: nn.Parameter, raw: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(raw)
