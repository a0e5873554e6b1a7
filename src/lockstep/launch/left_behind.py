"""What ranks leave behind when they end: processes that hold device memory, and memory that is not free yet.

A rank leads a session. Its loader workers, and other processes that it forks, inherit the open files of its device. The
driver frees the memory when the last of them has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from lockstep.core import devices
from lockstep.core.parallel.launched import FOLDER
from lockstep.core.parallel.world import World

FREE = "LOCKSTEP_FREE_MEMORY"
"""Environment variable: the free bytes of each device of this machine at the first start, by local rank, as JSON."""
_FILE = "free-memory-"
_LOOK_AGAIN_S = 0.02
_FREED_S = 20.0  # an ended process's memory is free within milliseconds, unless the machine is busy
_SLACK = 0.01  # fraction of a device's memory by which drivers and libraries may vary


def end_sessions(leaders: Collection[int], wait_s: float) -> None:
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


def wait_for_memory(world: World) -> None:
    """Before a rank takes memory: wait until as much memory of its device is free as at the first start.

    At the first start, leave a note for the launcher. Do nothing if no launcher started this rank, or if the
    device shares the host's memory.
    """
    device, folder = devices.of(world.device), os.environ.get(FOLDER)
    found = device.free_memory() if folder is not None else None
    if folder is None or found is None:
        return
    expected = json.loads(os.environ.get(FREE, "{}")).get(str(world.local_rank))
    if expected is None:
        Path(folder, f"{_FILE}{world.local_rank}").write_text(str(found[0]))
        return
    deadline = time.monotonic() + _FREED_S
    while found is not None and found[0] < expected - _SLACK * found[1]:
        if time.monotonic() > deadline:
            users = "; ".join(device.users()) or "the driver reports no process that holds it"
            text = f"{found[0] >> 20} MiB of {world.device} are free, but {expected >> 20} MiB were at the first start"
            print(f"[rank {world.rank}] warning: {text}: {users}", file=sys.stderr, flush=True)
            return
        world.heartbeat.beats += 1
        time.sleep(_LOOK_AGAIN_S)
        found = device.free_memory()


def keep_notes(folder: Path) -> None:
    """Pass the notes of this start's ranks in its folder to later starts, unless an earlier start did."""
    notes = {path.name.removeprefix(_FILE): path.read_text() for path in folder.glob(f"{_FILE}*")}
    known = {place: int(text) for place, text in notes.items() if text.isdecimal()}
    os.environ[FREE] = json.dumps(known | json.loads(os.environ.get(FREE, "{}")))
