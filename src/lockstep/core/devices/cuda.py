"""GPUs with torch's CUDA interface: NVIDIA, and AMD through ROCm."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch.numa import binding as numa

from lockstep.core.devices import memory_history
from lockstep.core.devices.accelerator import Accelerator
from lockstep.core.errors import UsageError

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

_ANSWER_S = 10.0  # nvidia-smi hangs if a driver does
_WAITED = "called a synchronizing CUDA operation"


@final
class Cuda(Accelerator):
    """A GPU of NVIDIA, or of AMD through ROCm, which torch calls cuda, too."""

    group_backend = "cpu:gloo,cuda:nccl"

    def identity(self) -> str:
        return str(self.module.get_device_properties(self.device).uuid)

    @contextlib.contextmanager
    def near_cpus(self, binding: str) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        try:
            # Private: torch's public options are those of torchrun, which binds the processes that it starts.
            bind: Any = numa._maybe_apply_numa_binding_to_current_process
            device = next(iter(inspect.signature(bind).parameters))  # gpu_index; since torch 2.15, device_index
            bind(**{device: self.device.index, "numa_options": numa.NumaOptions(numa.AffinityMode(binding))})
        except Exception as error:
            what = f"this process could not be bound to the CPUs near {self.device}: {type(error).__name__}: {error}"
            remedy = "install numactl, which shows the CPUs of each node (numactl --hardware), or leave the key out"
            raise UsageError(what, where=f"compute.numa_binding={binding}", remedy=remedy) from error
        try:
            yield
        finally:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended by now
                    os.sched_setaffinity(int(thread), before)

    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def users(self) -> list[str]:
        uuid = self.module.get_device_properties(self.device).uuid
        command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
        return [
            f"process {pid} ({name}) holds {memory}"
            for found, pid, name, memory in (row for row in rows if len(row) == 4)
            if found.removeprefix("GPU-") == str(uuid) and pid != str(os.getpid())
        ]

    def why_no_bf16(self) -> tuple[str, str] | None:
        if torch.version.hip is not None:
            return None
        capability = torch.cuda.get_device_capability(self.device)
        if capability >= (8, 0):
            return None
        has = ".".join(map(str, capability))
        what = f"{self.name()} has no bf16: its compute capability is {has}, and bf16 needs 8.0"
        return what, "use precision=fp16, as --preset p3 does"

    def snapshot_at_shortage(self, file: Path) -> contextlib.AbstractContextManager[None]:
        return memory_history.recorded(file)

    def libraries(self) -> dict[str, Any]:
        is_amd = torch.version.hip is not None
        with contextlib.suppress(OSError):
            driver = Path(f"/sys/module/{'amdgpu' if is_amd else 'nvidia'}/version").read_text().strip()
            return self._libraries() | {"driver": driver}
        return self._libraries()

    def _libraries(self) -> dict[str, Any]:
        from torch.cuda import nccl

        found: Any = None
        with contextlib.suppress(AttributeError, RuntimeError):  # a torch without NCCL
            found = nccl.version()  # type: ignore[no-untyped-call]
        return {
            "rocm" if torch.version.hip else "cuda": torch.version.hip or torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "nccl": ".".join(map(str, found)) if isinstance(found, tuple) else found,
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        }

    def profiled(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

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
