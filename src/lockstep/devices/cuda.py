"""GPUs with torch's CUDA interface: NVIDIA, and AMD through ROCm."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from lockstep.devices.accelerator import Accelerator

_WAITED = "called a synchronizing CUDA operation"


@final
class Cuda(Accelerator):
    """A GPU of NVIDIA, or of AMD through ROCm, which torch calls cuda, too."""

    group_backend = "cpu:gloo,cuda:nccl"

    def why_no_bf16(self) -> tuple[str, str] | None:
        if torch.version.hip is not None:
            return None
        capability = torch.cuda.get_device_capability(self.device)
        if capability >= (8, 0):
            return None
        has = ".".join(map(str, capability))
        what = f"{self.name()} has no bf16: its compute capability is {has}, and bf16 needs 8.0"
        return what, "use precision=fp16, as --preset p3 does"

    @contextlib.contextmanager
    def watched_waits(self, note: Callable[[], None]) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_WAITED)
            show = warnings.showwarning

            def note_or_show(message: Warning | str, *arguments: Any, **more: Any) -> None:
                if str(message).startswith(_WAITED):
                    note()
                else:
                    show(message, *arguments, **more)

            warnings.showwarning = note_or_show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
