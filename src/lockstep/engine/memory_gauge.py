"""How much memory a process holds, now and at most."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch

MB = 2**20
_PROC = Path("/proc/self")

_most: dict[str, int] = {}  # by kind and device: setting the system's marks back loses what they showed


class MemoryGauge:
    """How much memory this process holds, in bytes: allocated on a CUDA device, resident (RSS) on the CPU. Waits for no device.

    The marks of "most so far" are the allocator's and the kernel's own, and `restart` sets them back so that a part of the
    run has its own. On the CPU that takes Linux's /proc/self/clear_refs: where there is none, the mark is getrusage's, it only
    grows, and a part of the run shows no more than what it added to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def held(self) -> int:
        """What is held now; the most so far where the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _status("VmRSS") or _max_rss()

    def peak(self) -> int:
        """Most held since `restart`."""
        now = (
            torch.cuda.max_memory_allocated(self.device)
            if self.device.type == "cuda"
            else _status("VmHWM") or _max_rss()
        )
        self._keep("peak", now)
        return now

    def restart(self) -> int:
        """Begin a new peak. Returns where it begins."""
        self.peak(), self.reserved()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                (_PROC / "clear_refs").write_text("5")
        return self.peak()

    def most(self) -> int:
        """Most held since the process began."""
        return self._keep("peak", self.peak())

    def reserved(self) -> int:
        """Most that torch's allocator has taken from a CUDA device since the process began, in use or not; 0 on the CPU."""
        return self._keep("reserved", torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0)

    def _keep(self, kind: str, value: int) -> int:
        key = f"{self.device} {kind}"
        _most[key] = max(_most.get(key, 0), value)
        return _most[key]


def mib(size: float) -> float:
    """Bytes in MiB, to the byte."""
    return round(size / MB, 7)


def _status(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 2**10 if found else None


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
