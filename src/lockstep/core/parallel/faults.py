"""Faults on purpose: make a rank fail at a named place, to test and to show what happens then.

`LOCKSTEP_FAIL_AT="rank:step:place:action[:marker]"`, or several of these separated by spaces. The step may be `*`. The
action is kill (SIGKILL), exit, raise, full (no space left on device), hang, or stop (SIGTERM to itself). The marker is
a file that the first failure creates; if the file exists, the rank does not fail again.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from lockstep.core import this_process

_WANTED = os.environ.get("LOCKSTEP_FAIL_AT", "").split()


def fail_at(place: str, step: int) -> None:
    """Fail here, if the environment asks for a failure at this place, step and rank."""
    for wanted in _WANTED:
        rank, at, where, action, *marker = wanted.split(":", 4)
        if (
            (rank, where) != (str(this_process.rank()), place)
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
