"""Number formats of the forward pass, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

PrecisionName = Literal["fp32", "bf16", "fp16"]


class Precision:
    """fp32, bf16 (autocast) or fp16 (autocast and a loss scale). Weights and optimizer state stay as the model has them.

    `scaler` is torch's own; where the precision is not fp16 it is disabled and passes everything through.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name, self.device = name, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def state(self) -> dict[str, float]:
        """The loss scale and how long it has held; empty where there is none."""
        return {key: float(value) for key, value in self.scaler.state_dict().items()}

    def load(self, state: dict[str, float]) -> None:
        """Take over what `state` returned. A run that had no loss scale begins with a new one."""
        if state and self.scaler.is_enabled():
            whole = ("growth_interval", "_growth_tracker")
            self.scaler.load_state_dict({key: int(value) if key in whole else value for key, value in state.items()})

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context of a forward pass."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)
