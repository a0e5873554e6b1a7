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

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context of a forward pass."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)
