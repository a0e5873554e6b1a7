"""Check before training that a model can take images of these sizes, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep.core.foreign_errors import first_line

_FARTHEST = 64  # distance in pixels within which to search for the nearest size

_Forward = Callable[[nn.Module, Tensor], object]
_State = dict[str, Any]


def check_image_sizes(model: nn.Module, sizes: Sequence[int], *, channels: int, forward: _Forward, where: str) -> None:
    """Run copies of `model` on one black image of each size. The copies and the images are on the meta device, where
    nothing is computed. Models that depend on values cannot run there, so they run on the CPU. Nothing is checked if
    the model itself is on the meta device.

    Args:
        sizes: heights and widths in pixels.
        forward: called with a model and images (1, channels, size, size).
        where: the config key of the sizes, for the error message.

    Raises:
        UsageError: the model cannot take a size (the error names the nearest size that it can take), or its results
            depend on the sizes of earlier images, so that a resumed run would differ.
    """
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return
    trial = _Trial(model, channels=channels, forward=forward)
    states: dict[int, _State] = {}
    for size in sizes:
        error, states[size] = trial.run([size])
        if error is not None:
            near = (other for step in range(1, _FARTHEST + 1) for other in (size + step, size - step) if other > 0)
            nearest = next((other for other in near if trial.run([other])[0] is None), None)
            what = f"the model cannot take images of {size}x{size} pixels: {first_line(error)}"
            remedy = f"the nearest possible size is {nearest}" if nearest else "use a size that suits the model"
            raise UsageError(what, where=where, remedy=remedy) from error
    for order in (list(sizes), list(reversed(sizes))) if len(states) > 1 else ():
        _, after = trial.run(order)
        alone = states[order[-1]]
        changed = next((name for name in alone if after.get(name) != alone[name]), None)
        if changed is not None:
            what = f"{changed} is {alone[changed]!r} after an image of {order[-1]} pixels, but {after.get(changed)!r}"
            what = (
                f"the model's state depends on the sizes of earlier images: {what} if an image of {order[0]} "
                "pixels came before"
            )
            raise UsageError(what, where=where, remedy="use one size for training and evaluation, or a different model")


class _Trial:
    """Runs copies of a model, because some models change when they run."""

    def __init__(self, model: nn.Module, *, channels: int, forward: _Forward) -> None:
        self.model, self.channels, self.forward = model, channels, forward
        self.devices = ["meta", "cpu"]

    def run(self, sizes: Sequence[int]) -> tuple[Exception | None, _State]:
        """Run a new copy on images of these sizes, one after another.

        Returns:
            the error, or None; and the numbers and texts that the modules of the copy contain afterwards, by name.
        """
        fault: Exception | None = None
        for device in self.devices:
            trained = _copy(self.model, device).eval()
            try:
                with torch.no_grad():
                    for size in sizes:
                        dtype = next(trained.parameters()).dtype
                        self.forward(trained, torch.zeros(1, self.channels, size, size, dtype=dtype, device=device))
                self.devices = [device]
                return None, _state(trained)
            except Exception as error:
                fault = error
        return fault, {}


def _copy(model: nn.Module, device: str) -> nn.Module:
    """A copy of the modules. On the CPU it shares the tensors of `model`; on the meta device they have no values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = parameter if device == "cpu" else on_meta
    for buffer in model.buffers():
        memo[id(buffer)] = buffer if device == "cpu" else buffer.to("meta")
    return copy.deepcopy(model, memo)


def _state(model: nn.Module) -> _State:
    kinds = (int, float, str, tuple)
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, kinds) and key != "training"
    }
