"""Devices without a memory and without queues that Lockstep uses: the CPU, and the GPU of a Mac."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.devices import host_memory
from lockstep.core.devices.device import Device

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity


class Unqueued(Device):
    """A device that shares the memory of the process, and takes copies in order with its other operations."""

    has_own_memory = False
    has_fused_adam = False
    has_sync_batch_norm = False
    group_backend = "gloo"

    def identity(self) -> None:
        return None

    def select(self) -> None:
        pass

    def near_cpus(self, binding: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def watched_waits(self, note: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def new_stream(self) -> None:
        return None

    def current_stream(self) -> Any:
        raise RuntimeError(f"{self.device.type} has no queues")

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        raise RuntimeError(f"{self.device.type} has no queues")

    def mark(self) -> float:
        return time.perf_counter()

    def wait_for(self, mark: Any) -> None:
        pass  # copies run in order with the computation, so none is ahead of it

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(second - first)

    def allocated(self) -> int:
        return host_memory.resident()

    def peak(self) -> int:
        return host_memory.peak()

    def reset_peak(self) -> None:
        host_memory.reset_peak()

    def reserved_peak(self) -> int:
        return 0

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def snapshot_at_shortage(self, file: Path) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def libraries(self) -> dict[str, Any]:
        return {}

    def profiled(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def holds(self, tensor: Tensor) -> bool:
        return False
