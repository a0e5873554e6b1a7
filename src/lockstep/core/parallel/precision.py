"""Number formats of the forward pass, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch.amp.grad_scaler import OptState

from lockstep.core import devices
from lockstep.core.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16"]


def check_supported(name: PrecisionName, device: torch.device) -> None:
    """Check, before anything is computed, that the device can compute in this precision.

    On a GPU without bf16, torch would compute bf16 slowly in float32. On an old macOS it would not autocast at all.

    Raises:
        UsageError: the GPU has no bf16.
    """
    if name != "bf16":
        return
    missing = devices.of(device).why_no_bf16()
    if missing is not None:
        what, remedy = missing
        raise UsageError(what, where="precision=bf16", remedy=remedy)


class Precision:
    """fp32, bf16 (autocast) or fp16 (autocast and a loss scale). Weights and optimizer state keep their dtype.

    `scaler` is torch's own. If the precision is not fp16, it is disabled and passes everything through. A step
    multiplies the loss by the number of ranks, because gradients are averaged over them. So the scaler's own scale is
    smaller by this factor: a pass then meets the same numbers, and overflows at the same numbers, on any number of
    ranks.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, name: PrecisionName, device: torch.device, ranks: int = 1) -> None:
        self.name, self.device, self.ranks = name, device, ranks
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16 / ranks, enabled=name == "fp16")

    @property
    def loss_scale(self) -> float:
        """The factor of the loss of a global batch; 1 if it is not scaled. Waits for the device."""
        return self.scaler.get_scale() * (self.ranks if self.scaler.is_enabled() else 1)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make the update of `optimizer`, and adapt the loss scale. With fp16, call `scaler.unscale_` before.

        These are `scaler.step(optimizer)` and `scaler.update()`, with one read of the device: whether the gradients
        overflowed. `GradScaler` keeps that to itself, so that two more reads, of the scale, would be needed. It also
        calls `step` of fused optimizers if the gradients overflowed.

        Returns:
            whether the update was made. It is not made if a gradient overflowed in fp16.
        """
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        state = self.scaler._per_optimizer_states[id(optimizer)]  # private; compared with `GradScaler.step` in tests
        found: list[torch.Tensor] = list(state["found_inf_per_device"].values())
        overflowed = any(bool(one) for one in found)  # one for each device that holds gradients
        if not overflowed:
            optimizer.step()
        state["stage"] = OptState.STEPPED
        self.scaler.update()
        return not overflowed

    def state(self) -> dict[str, float]:
        """The loss scale and the steps since it changed, equal on any number of ranks; empty without a scale."""
        state = {key: float(value) for key, value in self.scaler.state_dict().items()}
        return state | {"scale": self.loss_scale} if state else {}

    def load(self, state: dict[str, float]) -> None:
        """Load what `state` returned. After a run without a loss scale, the scale starts from its initial value."""
        if state and self.scaler.is_enabled():
            integers = ("growth_interval", "_growth_tracker")
            state = state | {"scale": state["scale"] / self.ranks}
            self.scaler.load_state_dict({key: int(value) if key in integers else value for key, value in state.items()})

    def load_foreign(self, state: object) -> bool:
        """Load what `GradScaler.state_dict` returned in a different program. Returns whether it could be loaded."""
        if not isinstance(state, Mapping) or self.scaler.state_dict().keys() != state.keys() or not state:
            return False
        self.load({key: float(value) for key, value in state.items()})
        return True

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context of a forward pass."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)
