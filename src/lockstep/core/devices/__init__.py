"""The differences between the kinds of devices on which a rank computes. No other part asks which kind a device is.

`of(device)` gives the `Device` of a `torch.device`: its streams, memory, generators, errors and names. There is a class
for the CPU, for GPUs with torch's CUDA interface (NVIDIA, and AMD through ROCm, which also calls itself cuda), and for
the GPU of a Mac (mps). `register` adds a kind.
"""

from __future__ import annotations

import os

import torch

from lockstep.core.devices.accelerator import Accelerator
from lockstep.core.devices.cuda import Cuda
from lockstep.core.devices.device import Cpu, Device
from lockstep.core.devices.mps import Mps

__all__ = [
    "Accelerator",
    "Cpu",
    "Cuda",
    "Device",
    "Mps",
    "generators_of_gpus",
    "gpus",
    "has_mps",
    "of",
    "rather_than_mps",
    "register",
]

# torch then counts GPUs without starting the driver, which does not work in processes that are forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_KINDS: dict[str, type[Device]] = {"cpu": Cpu, "cuda": Cuda, "mps": Mps}
_devices: dict[torch.device, Device] = {}


def of(device: torch.device) -> Device:
    """The `Device` of a `torch.device`. It is made once in each process.

    Raises:
        KeyError: the kind of the device is not registered.
    """
    if device not in _devices:
        _devices[device] = _KINDS[device.type](device)
    return _devices[device]


def register(kind: str, device: type[Device]) -> None:
    """Add a kind of devices, such as a device in Python for tests.

    Args:
        kind: `type` of the `torch.device`.
    """
    _KINDS[kind] = device
    for known in [known for known in _devices if known.type == kind]:
        del _devices[known]


def gpus() -> int:
    """Number of GPUs with torch's CUDA interface that this process sees."""
    return torch.cuda.device_count()


def has_mps() -> bool:
    """True if this process can compute on the GPU of a Mac."""
    return torch.backends.mps.is_available()


def rather_than_mps(wanted: str) -> str:
    """The key `device` for what needs float64 or compares ranks: `cpu` if `auto` would take the GPU of a Mac.

    Args:
        wanted: auto, cpu, cuda or mps.
    """
    return "cpu" if wanted == "auto" and not gpus() and has_mps() else wanted


def generators_of_gpus() -> list[torch.Tensor]:
    """The state of the random number generator of each GPU, if this process uses GPUs."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
