"""The interface of a device: everything that depends on its kind. The defaults are right for the CPU."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from lockstep.core.devices import host_memory

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

_SHORTAGES = (
    "out of memory",  # CUDA and HIP, and NCCL and Triton, which quote them
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuFFT's relatives, hipBLAS
    "_ALLOCATION_FAILED",  # cuDNN 9
    "CUFFT_ALLOC_FAILED",
    "rocblas_status_memory_error",
)


class Device:
    """A device on which this rank computes.

    The defaults are those of a device that shares the memory of the process, and has no queues that Lockstep uses:
    copies run in order with the computation.

    Args:
        device: with an index, if its kind has several devices.
    """

    has_float64: ClassVar[bool] = True
    """True if it computes in float64."""
    has_own_memory: ClassVar[bool] = False
    """True if its memory is apart from the host's, and torch's allocator counts it. Otherwise `allocated` and `peak`
    are the memory of the process."""
    has_own_generator: ClassVar[bool] = False
    """True if it has its own random number generator, besides the CPU's."""
    has_fused_adam: ClassVar[bool] = False
    """True if Adam and AdamW update by a single kernel, unless the config says otherwise."""
    has_sync_batch_norm: ClassVar[bool] = False
    """True if SyncBatchNorm runs on it."""
    group_backend: ClassVar[str] = "gloo"
    """The backend of process groups whose ranks compute on such devices, as `init_process_group` takes it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """The name of the model, such as NVIDIA H100. For a CPU, its architecture."""
        return platform.processor() or platform.machine()

    def identity(self) -> str | None:
        """A text that distinguishes it from all other devices, if a device takes one rank; None if ranks share it."""
        return None

    def select(self) -> None:
        """Make it the current device of this process, if a kind has several devices."""

    def near_cpus(self, binding: str) -> contextlib.AbstractContextManager[None]:
        """Inside, this process and those that it starts run only on the CPUs near the device, if it is near to some.

        Args:
            binding: which CPUs: `node`, `socket`, `exclusive` or `core-complex`, as in `torchrun --numa-binding`.

        Raises:
            UsageError: the system does not report which CPUs these are, or does not allow them.
        """
        return contextlib.nullcontext()

    def why_no_bf16(self) -> tuple[str, str] | None:
        """The reason why it cannot compute in bf16, and the remedy; None if it can."""
        return None

    def libraries(self) -> dict[str, Any]:
        """Versions of the libraries and of the driver that it needs, and the names of all such devices here."""
        return {}

    def profiled(self) -> list[ProfilerActivity]:
        """The activities that torch's profiler records of it."""
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def note(self) -> str | None:
        """The first line of the log of a training on it; None if there is nothing to say."""
        return None

    # ---- random numbers

    def seed(self, seed: int) -> None:
        """Seed its own generator, if it has one, with 64 bits."""

    def generator_state(self) -> Tensor | None:
        """The state of its generator, on the CPU; None if it has none."""
        return None

    def set_generator_state(self, state: Tensor) -> None:
        """Give its own generator a state that `generator_state` returned."""

    def restored_generators(self) -> contextlib.AbstractContextManager[None]:
        """At the end, torch's generators of the CPU and of this device are as before."""
        if not self.has_own_generator:
            return torch.random.fork_rng([], device_type="cpu")
        return torch.random.fork_rng([self.device], device_type=self.device.type)

    # ---- queues

    def synchronize(self) -> None:
        """Wait until it has done everything that was queued."""

    def watched_waits(self, note: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Inside, `note` is called where the host waits for it, if it reports that, with the caller on the stack."""
        return contextlib.nullcontext()

    def new_stream(self) -> Any | None:
        """A queue for copies during the computation. None: copies cannot run during it."""
        return None

    def current_stream(self) -> Any:
        """The queue of the computation, of a device that has queues.

        Raises:
            RuntimeError: it has none.
        """
        raise RuntimeError(f"{self.device.type} has no queues")

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, operations are queued on `stream`, which `new_stream` returned."""
        raise RuntimeError(f"{self.device.type} has no queues")

    def mark(self) -> Any:
        """A place in the work that the device was given: after all that was queued for the computation so far."""
        return time.perf_counter()

    def wait_for(self, mark: Any) -> None:
        """Wait until the device has come to a mark."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """The time between two marks that the device has reached."""
        return float(second - first)

    # ---- memory

    def memory(self) -> int | None:
        """Bytes that it has in all. None: unknown, or it has no separate memory."""
        return None

    def allocated(self) -> int:
        """Bytes held now. If the system does not report it, the most bytes held so far."""
        return host_memory.resident()

    def peak(self) -> int:
        """Most bytes held since `reset_peak`."""
        return host_memory.peak()

    def reset_peak(self) -> None:
        """Begin a new peak, if the system can. Otherwise `peak` only grows."""
        host_memory.reset_peak()

    def reserved_peak(self) -> int:
        """Most bytes that torch's allocator has reserved since `reset_peak`; 0 if it has no separate memory."""
        return 0

    def free_memory(self) -> tuple[int, int] | None:
        """Free bytes and all bytes of its separate memory; None if it has none, or the system does not report it."""
        return None

    def users(self) -> list[str]:
        """Other processes that hold memory of it, as far as the driver names them."""
        return []

    @staticmethod
    def is_shortage(error: BaseException) -> bool:
        """True if an error says that the memory of a device was not sufficient.

        torch raises its own class of error if its allocator gets no memory. Libraries that allocate by themselves
        (cuBLAS, cuDNN, NCCL, Triton) raise a RuntimeError or one of its subclasses, which only the text tells apart.
        An error that was raised `from` such an error counts, too, unless it is an error of Lockstep.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES):
            return True
        return isinstance(error, RuntimeError) and error.__cause__ is not None and Device.is_shortage(error.__cause__)

    def host_buffer(self, size: int) -> Tensor:
        """Memory of the host into which copies from the device do not hold up the host: `size` bytes, uint8."""
        return torch.empty(size, dtype=torch.uint8)

    def snapshot_at_shortage(self, file: Path) -> contextlib.AbstractContextManager[None]:
        """Inside, allocations are recorded, and written to `file` when the memory does not suffice for the first time.

        It does nothing if torch does not count the memory of the device.
        """
        return contextlib.nullcontext()

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is in the device's own memory, apart from the host's."""
        return False


@final
class Cpu(Device):
    """The CPU. Operations are done when they return, and random numbers are those of the host's generator."""

    has_fused_adam = True
