"""GPUs with torch's CUDA interface: NVIDIA, and AMD through ROCm."""

from __future__ import annotations

from typing import final

import torch

from lockstep.devices.accelerator import Accelerator


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
