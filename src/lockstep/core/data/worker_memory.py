"""The memory that loader workers do not share. Workers copy a page of the rank when they touch an object in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_FIRST = 8  # micro-batches of each worker until the first look
_GROWTH_MB, _GROWTH = 64.0, 0.5


def private_mb(pid: int) -> float | None:
    """The megabytes that only process `pid` has, and has written. None: they are not known."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    found = re.search(r"Private_Dirty:\s*(\d+) kB", text)
    return int(found[1]) / 1024 if found else None


class Growth:
    """Looks at a worker after 8, 16, 32, ... micro-batches: the system takes some time to count.

    Args:
        pids: the workers of a loader.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids, self.read, self.next = pids, 0, _FIRST * len(pids)
        self.first: float | None = None

    def count(self) -> str:
        """Count a micro-batch. Returns a note if the memory has grown."""
        self.read += 1
        if self.read != self.next:
            return ""
        self.next *= 2
        now = private_mb(self.pids[0])
        if now is None:
            return ""
        if self.first is None:
            self.first = now
            return ""
        grown = now - self.first
        if grown < max(_GROWTH_MB, _GROWTH * self.first):
            return ""
        self.next = 0  # it is said once
        return (
            f"note: the memory that a loader worker does not share has grown from {self.first:,.0f} to {now:,.0f} MB "
            f"in {self.read:,} micro-batches, and this rank has {len(self.pids)} workers. A worker copies the memory "
            "of each Python object that it touches, and what the data set keeps of its samples adds to it\n"
            "  remedy: hold many small objects (a list of dicts, texts or paths) in arrays of NumPy, torch or Arrow, "
            "or read them from a file by index; lockstep --explain task_data"
        )
