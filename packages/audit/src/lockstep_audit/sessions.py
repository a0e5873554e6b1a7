"""Ends what ranks leave behind. Each rank leads a session, to which its loader workers belong."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_LOOK_AGAIN_S = 0.02


def end(leaders: Collection[int], wait_s: float) -> None:
    """Kill all processes in the sessions of these processes, and wait up to `wait_s` seconds until they are gone.

    Args:
        leaders: process ids of ranks that have ended.
    """
    deadline = time.monotonic() + wait_s
    while members := _members(leaders):
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_AGAIN_S)


def _members(leaders: Collection[int]) -> list[int]:
    """The processes in the sessions of `leaders` that have not ended. Empty if the system does not list them."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended by now
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) in leaders and state not in "ZX":
                    found.append(int(entry.name))
    return found
