"""Batches on their way to the device, ahead of the passes that use them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.core import devices
from lockstep.core.data.tensors import is_plain, map_tensors, moved, moves_itself

_COPIES_AHEAD = 2


@dataclass
class Copy:
    """A batch on its way to the device."""

    batch: Any
    device: devices.Device
    copied: Any | None = None
    """The place in the queue of copies after which the batch is complete. None: no operation need wait for it."""

    def wait(self) -> Any:
        """The batch. Operations that are queued from now on wait until it is complete; the host does not."""
        if self.copied is not None:
            self.device.current_stream().wait_event(self.copied)
            self.copied = None
        return self.batch


class DeviceCopies:
    """Copies batches to a device, on a separate stream if the device has streams.

    Args:
        channels_last: give tensors of four dimensions (images) that memory format.
    """

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self.device, self.channels_last = devices.of(device), channels_last
        self.stream = self.device.new_stream()
        self.queued: deque[Any] = deque()  # marks of what the device was given when each of the last copies began

        self.changes_nothing = self.stream is None and self.device.has_float64 and not channels_last
        """True if every batch is on the device as it is."""

    def begin(self, batch: Any) -> Copy:
        """Begin to copy a batch to the device."""
        format_of = _as_channels_last if self.channels_last else _unchanged
        device = self.device
        if self.stream is None:
            return Copy(_to_unqueued(batch, device, format_of), device)
        self._bound_run_ahead()
        # The host is ahead of the device, so a copy on its own stream overlaps the passes before.
        compute = device.current_stream()
        copied: list[torch.Tensor] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor):  # it has several blocks of memory
                return tensor.to(device.device, non_blocking=True)
            with device.on_stream(self.stream):
                copied.append(format_of(tensor.to(device.device, non_blocking=True)))
            return copied[-1]

        def move(item: Any) -> Any:  # nobody knows its tensors, so it is copied in order with the computation
            return moved(item, device.device, non_blocking=True) if moves_itself(item) else NotImplemented

        batch = map_tensors(batch, copy, move)
        for tensor in copied:
            tensor.record_stream(compute)
        return Copy(batch, device, self.stream.record_event() if copied else None)

    def _bound_run_ahead(self) -> None:
        """Wait until the device has done what was queued when the copy before the last copy began.

        The host is ahead of the device, and the memory of a batch is free only when the device has used it. Without
        this, the copies of many batches would be on the device.
        """
        self.queued.append(self.device.mark())
        if len(self.queued) > _COPIES_AHEAD:
            self.device.wait_for(self.queued.popleft())


def _to_unqueued(batch: Any, device: devices.Device, format_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`batch` on a device that takes copies in order with its other operations."""
    place = device.device
    if not device.has_float64:
        return map_tensors(
            batch,
            # mps has no float64. Labels that are Python's floats are float64.
            lambda t: format_of(t.float() if t.dtype == torch.float64 else t).to(place),
            lambda item: moved(item, place) if moves_itself(item) else NotImplemented,
        )
    return batch if format_of is _unchanged else map_tensors(batch, format_of)


def _as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim != 4 or not is_plain(tensor):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
