"""Words between a rank and its launcher: environment variables, and files in the folder of the launch.

This file imports no torch: a rank may have to report a failure before, and a launcher of one machine needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from lockstep.core import shortages, this_process
from lockstep.core.errors import LockstepError, Preempted, RankError, WatchError

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""Environment variable of ranks that our launcher started: it shows their errors, and decides about second signals."""
RESTARTS = "LOCKSTEP_RESTARTS"
"""Environment variable: how often the launcher has restarted its ranks."""
INTERRUPTED = "LOCKSTEP_INTERRUPTED"
"""Environment variable: 1 if the start before this was interrupted, such as by a kill; 0 after too little memory."""
LOST_NODE = "LOCKSTEP_LOST_NODE_S"
"""Environment variable: after the loss of a node, seconds in which its ranks may still hold the run directory."""
FOLDER = "LOCKSTEP_HEARTBEATS"
"""Environment variable: the folder of the launch, where ranks write their heartbeats."""
STOP_FILE = "stop"
"""In this folder: names the signal that asked the launcher to stop. Ranks that start later see it."""
KEPT_ROOM = "kept-room-"
"""Files in this folder begin so whose room on the disk is kept for what is written when the disk is full."""
_REPORT = "TORCHELASTIC_ERROR_FILE"  # of torch's agent, in which torchrun looks too


def tell(text: str) -> None:
    """Write a line to stderr, from a signal handler too. Nobody reads it if the terminal is gone."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def write(path: Path, content: bytes) -> None:
    """Write a file into the folder of the launch, if need be in the room that was kept.

    Raises:
        OSError: there is no room in spite of that.
    """
    while True:
        try:
            path.write_bytes(content)
        except OSError as error:
            kept = next(path.parent.glob(f"{KEPT_ROOM}*"), None) if shortages.is_full(error) else None
            if kept is None:
                raise
            kept.unlink(missing_ok=True)  # another rank may have taken it
        else:
            return


def write_report(path: Path, text: str, **more: Any) -> None:
    """Write the report of a rank that failed, in the format of torch's agent.

    Raises:
        OSError: there is no room for it.
    """
    extra = {"timestamp": str(int(time.time())), **more}
    write(path, json.dumps({"message": {"message": text, "extraInfo": extra}}).encode())


def report_failure(error: BaseException, text: str) -> None:
    """Write `text` for the launcher that started this rank (ours or the user's torchrun), if there is one."""
    path = os.environ.get(_REPORT)
    if not path:
        return
    stopped = isinstance(error, Preempted)  # by the launcher, if another rank failed
    # Renamed when it is complete: this process may be killed while it writes, and nobody can read half a file.
    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        write_report(
            unfinished,
            text,
            py_callstack=text,
            origin=error.origin if isinstance(error, RankError) else None,
            retryable=error.retryable if isinstance(error, LockstepError) else not stopped,
            retries_differently=isinstance(error, LockstepError) and error.retries_differently,
            from_outside=_is_from_outside(error),
            stopped=stopped,
            guilty=error.guilty if isinstance(error, WatchError) else (),
            lost_another=isinstance(error, RankError) and error.lost_another,
        )
        unfinished.rename(path)
    except OSError as fault:  # the exit code says the rest
        tell(f"[rank {this_process.rank()}] {text}\n(this could not be reported to the launcher: {fault})")


def _is_from_outside(error: BaseException) -> bool:
    """See `LockstepError.from_outside`. torch's DistError is found by its name: a launcher does not import torch."""
    if isinstance(error, LockstepError):
        return error.from_outside
    by_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return by_torch or isinstance(error, (Preempted, ConnectionError, TimeoutError))
