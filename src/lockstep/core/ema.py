"""The exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def decay_at(update: int, decay: float) -> float:
    """The decay of one update: min(decay, (1 + update) / (10 + update)).

    With a constant decay, the weights at the start of the training have the share decay^n in the average after n
    updates: 0.55 after 120 updates with 0.995. With this rule the share is 10! / ((n + 2) ... (n + 10)) while the rule
    is below `decay`: less than 10^-6 from 20 updates on. So long, the average is over about the last ninth of the
    updates, however many these are.

    Source: `num_updates` of TensorFlow's `tf.train.ExponentialMovingAverage`. The part below `decay` is the
    polynomial-decay averaging of Shamir and Zhang 2013, arXiv:1212.1824, with their eta = 8 and T = update + 2.

    Args:
        update: number of the update, from 1. It counts from the start of the training, so that a resumed run has
            the decays of a run that was never stopped.
        decay: the largest decay, in [0, 1].
    """
    return min(decay, (1 + update) / (10 + update))


class Ema:
    """average = d * average + (1 - d) * parameter, after every update n (Polyak and Juditsky 1992), with
    d = min(decay, (1 + n) / (10 + n)); see `decay_at`.

    Each update has the numbers of torch's `get_ema_multi_avg_fn(d)`, bit for bit, if parameters have 32 bits or
    more. Only what trains and has fractions is averaged. Of frozen parameters and of integers, the average is a copy of
    the parameter, so that nothing needs to change when they begin to train. Buffers have no averages, and neither do
    frozen parameters that the model's state, and so each checkpoint, leaves out.

    Args:
        model: already wrapped, if it will be wrapped: the averages keep its parameter objects.
        decay: the largest decay, in [0, 1].

    Raises:
        ValueError: `decay` is outside [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}; use a number from 0 to 1")
        self.decay = decay
        state = model.state_dict()
        named = model.named_parameters()
        self._parameters = {name: each for name, each in named if each.requires_grad or name in state}
        self.tensors: dict[str, Tensor] = {}
        """Averages by name of the parameter, on its device, without gradient; tied parameters once. They have the
        parameter's dtype, but float32 if that has fewer bits: it would lose most of a step of (1 - decay)."""
        self._inside = False
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, parameter in self._parameters.items():
            narrow = parameter.is_floating_point() and parameter.element_size() < 4
            dtype = torch.float32 if narrow else parameter.dtype
            average = self.tensors[name] = parameter.detach().to(dtype, copy=True)
            # A narrow parameter is alone in its group, so that only one float32 copy of a parameter exists at a time.
            groups.setdefault(
                (name,) if narrow else (getattr(average, "device_mesh", None), average.device, dtype), []
            ).append(name)
        self._groups = list(groups.values())

    def update(self, number: int) -> None:
        """Add the current parameters to the averages, or copy them. Call it after each applied update. Does not wait.

        Args:
            number: of the update, from 1, since the start of the training.
        """
        if self._inside:
            raise RuntimeError("Ema.update inside Ema.applied: the parameters hold the averages")
        add = get_ema_multi_avg_fn(decay_at(number, self.decay))  # type: ignore[no-untyped-call]
        for names in self._groups:
            averages, current = [], []
            for name in names:
                average, parameter = self.tensors[name], self._parameters[name]
                if parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                    averages.append(average)
                    current.append(parameter.detach().to(average.dtype))
                else:
                    average.copy_(parameter.detach())
            if averages:
                add(averages, current, 0)  # an exponential average ignores the count

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
            return partial(torch.no_grad()(parameter.copy_), raw)
        average.copy_(raw)
        return partial(_exchange, parameter, average)
