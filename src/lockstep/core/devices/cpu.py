"""The CPU."""

from __future__ import annotations

import platform
from typing import final

from torch import Tensor

from lockstep.core.devices.unqueued import Unqueued


@final
class Cpu(Unqueued):
    """The CPU. Operations are done when they return."""

    has_float64 = True
    has_own_generator = False

    def name(self) -> str:
        return platform.processor() or platform.machine()

    def why_no_bf16(self) -> None:
        return None

    def seed(self, seed: int) -> None:
        pass  # it draws from the host's generator

    def generator_state(self) -> None:
        return None

    def set_generator_state(self, state: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass
