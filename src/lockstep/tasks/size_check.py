"""Before training: can a model take pictures of these sizes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

_FARTHEST = 64  # pixels to both sides in which the nearest size is looked for


def check_image_sizes(
    model: nn.Module,
    sizes: Iterable[int],
    *,
    channels: int,
    forward: Callable[[nn.Module, Tensor], object],
    where: str,
) -> None:
    """Run `model` on one black picture of each size. Its weights and its mode stay as they are.

    The pictures are on the meta device, where nothing is computed. If that fails, a size is tried on the CPU, because
    some models read values while they run. Nothing is checked if the model itself is on the meta device.

    Args:
        sizes: height and width in pixels.
        forward: called with the model and pictures (1, channels, size, size).
        where: the key of the sizes, for the error.

    Raises:
        UsageError: the model cannot take a size. The error names the nearest size that it can take.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.device.type == "meta" for tensor in tensors.values()):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for size in sizes:
            error = _fault(model, tensors, forward, channels=channels, size=size)
            if error is not None:
                near = (size + sign * step for step in range(1, _FARTHEST + 1) for sign in (1, -1) if size > step)
                nearest = next(
                    (other for other in near if _fault(model, tensors, forward, channels=channels, size=other) is None),
                    None,
                )
                remedy = (
                    "use a size that suits the model" if nearest is None else f"the nearest that it can is {nearest}"
                )
                text = (str(error).strip().splitlines() or [""])[0]
                raise UsageError(
                    f"the model cannot take pictures of {size}x{size} pixels: {type(error).__name__}: {text}",
                    where=where,
                    remedy=remedy,
                ) from error
    finally:
        for module, training in modes.items():
            module.training = training


def _fault(
    model: nn.Module,
    tensors: dict[str, Tensor],
    forward: Callable[[nn.Module, Tensor], object],
    *,
    channels: int,
    size: int,
) -> Exception | None:
    """What goes wrong with a picture of this size. None: nothing."""
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    on_meta = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with torch.no_grad():
        try:
            picture = torch.zeros(1, channels, size, size, dtype=dtype, device="meta")
            torch.func.functional_call(
                _Call(model, forward), {f"model.{name}": on_meta[name] for name in on_meta}, picture
            )
        except Exception:  # a model that reads values cannot run on meta
            try:
                forward(model, torch.zeros(1, channels, size, size, dtype=dtype))
            except Exception as error:
                return error
    return None


class _Call(nn.Module):
    """`forward(model, images)` as a module, because `functional_call` takes a module."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, images: Tensor) -> object:
        return self.call(self.model, images)
