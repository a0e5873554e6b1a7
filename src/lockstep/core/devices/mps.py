"""The GPU of a Mac."""

from __future__ import annotations

import os
import platform
from typing import final

import torch
from torch import Tensor

from lockstep.core.devices.device import Device


@final
class Mps(Device):
    """The GPU of a Mac, which shares the memory of the host. It takes one rank."""

    has_float64 = False
    has_own_generator = True

    def name(self) -> str:
        return f"mps ({platform.processor() or platform.machine()})"

    def why_no_bf16(self) -> tuple[str, str] | None:
        if torch.backends.mps.is_macos_or_newer(14, 0):
            return None
        return "mps has bf16 from macOS 14 on", "use precision=fp16 or precision=fp32"

    def note(self) -> str:
        lacking = "end the training; PYTORCH_ENABLE_MPS_FALLBACK=1 lets them run on the CPU"
        if os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1":
            lacking = "run on the CPU (PYTORCH_ENABLE_MPS_FALLBACK=1)"
        return (
            "note: computes on the Mac's GPU (mps): on one rank only; metrics are computed on the CPU; operations that "
            f"mps lacks {lacking}; losses differ from the CPU's in their last digits; device=cpu computes on the CPU"
        )

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def generator_state(self) -> Tensor:
        return torch.mps.get_rng_state()

    def set_generator_state(self, state: Tensor) -> None:
        torch.mps.set_rng_state(state)

    def synchronize(self) -> None:
        torch.mps.synchronize()
