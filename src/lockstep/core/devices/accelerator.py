"""Devices with their own memory and queues, which torch drives by a module like torch.cuda."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lockstep.core.devices.device import Device


class Accelerator(Device):
    """A device with its own memory and queues.

    It uses torch's module of this kind of devices (`torch.get_device_module`), which has the functions of torch.cuda.
    """

    has_own_memory = True
    has_own_generator = True
    has_fused_adam = True
    has_sync_batch_norm = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)

    def name(self) -> str:
        return str(self.module.get_device_name(self.device))

    def select(self) -> None:
        self.module.set_device(self.device)

    def seed(self, seed: int) -> None:
        self.module.default_generators[self.device.index].manual_seed(seed)

    def generator_state(self) -> Tensor:
        state: Tensor = self.module.get_rng_state(self.device)
        return state

    def set_generator_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state, self.device)

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def new_stream(self) -> Any:
        return self.module.Stream(self.device)

    def current_stream(self) -> Any:
        return self.module.current_stream(self.device)

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        inside: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return inside

    def mark(self) -> Any:
        # `blocking`: a host that waits for it sleeps.
        event = self.module.Event(enable_timing=True, blocking=True)
        event.record(self.current_stream())
        return event

    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000

    def allocated(self) -> int:
        return int(self.module.memory_allocated(self.device))

    def peak(self) -> int:
        return int(self.module.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        self.module.reset_peak_memory_stats(self.device)

    def reserved_peak(self) -> int:
        return int(self.module.max_memory_reserved(self.device))

    def free_memory(self) -> tuple[int, int] | None:
        ask = getattr(self.module, "mem_get_info", None)
        if ask is None:
            return None
        free, size = ask(self.device)
        return int(free), int(size)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type
