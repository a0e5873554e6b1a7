"""Faults on purpose: end a rank at a named place, to test and to show what happens then.

`LOCKSTEP_FAIL_AT="rank:step:place:action[:marker]"`, several separated by spaces; step may be `*`. action: kill (SIGKILL), exit, raise,
full (no space left on device), hang, stop (SIGTERM to itself). marker: a file that the first time creates, so that there is no second.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

_WANTED = os.environ.get("LOCKSTEP_FAIL_AT", "").split()


def fail_at(place: str, step: int) -> None:
    """Fail here, where the environment asks for it."""
    for wanted in _WANTED:
        rank, at, where, action, *marker = wanted.split(":", 4)
        if (
            (rank, where) != (os.environ.get("RANK", "0"), place)
            or at not in ("*", str(step))
            or (marker and Path(marker[0]).exists())
        ):
            continue
        if marker:
            Path(marker[0]).touch()
        _fail(action, f"{place} at step {step}")


def _fail(action: str, where: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(1)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
    elif action == "hang":
        time.sleep(1e6)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        raise RuntimeError(f"failed on purpose: {where}")
