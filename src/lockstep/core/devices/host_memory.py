"""The memory of this process (RSS), and its peak.

A new peak needs Linux's /proc/self/clear_refs. Without that file the peak comes from getrusage and only grows.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

_PROC = Path("/proc/self")


def resident() -> int:
    """Bytes that are resident now. If the system does not report it, the most bytes so far."""
    return _status("VmRSS") or _max_rss()


def peak() -> int:
    """Most bytes that were resident since `reset_peak`."""
    return _status("VmHWM") or _max_rss()


def reset_peak() -> None:
    """Begin a new peak, if the system can."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def _status(name: str) -> int | None:
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 2**10 if match else None


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
