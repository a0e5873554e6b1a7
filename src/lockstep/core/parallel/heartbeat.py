"""The progress of a rank: its process, phase and step, in memory that the launcher can read even after a kill."""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os
from pathlib import Path

from lockstep.core import this_process
from lockstep.core.parallel.launched import FOLDER, write

_parent = os.getppid()


def _after_fork() -> None:
    """A rank may be forked after this module was imported, and has a different parent then."""
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_after_fork)


class Phase(enum.IntEnum):
    """The work that a rank is doing."""

    STARTING = 0
    FIRST_STEP = 1
    TRAINING = 2
    EVALUATING = 3
    SAVING = 4
    ENDED = 5
    """The main function of the rank has returned."""


class Heartbeat(ctypes.Structure):
    """The progress of one rank. A C structure: setting a field is atomic, takes 0.1 us and survives the process."""

    _fields_ = (("pid", ctypes.c_int64), ("step", ctypes.c_int64), ("phase", ctypes.c_int64), ("beats", ctypes.c_int64))
    pid: int
    """Process id."""
    step: int
    """Global batches consumed; -1 before training begins."""
    phase: int
    """A `Phase`."""
    beats: int
    """Counts up whenever the rank makes progress."""

    def enter(self, phase: Phase) -> None:
        """Another phase begins."""
        self.phase = phase
        self.beats += 1


@functools.cache
def own() -> Heartbeat:
    """The heartbeat of this process; in a file, if a launcher asked for it."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        heartbeat = Heartbeat()
    else:
        path = Path(folder, f"rank-{this_process.rank()}")
        write(path, bytes(ctypes.sizeof(Heartbeat)))
        with path.open("r+b") as file:
            heartbeat = Heartbeat.from_buffer(mmap.mmap(file.fileno(), 0))
    heartbeat.step = -1
    heartbeat.pid = os.getpid()
    return heartbeat


def all_in(folder: Path) -> list[Heartbeat]:
    """The heartbeats of all ranks that have started, whether they are alive or dead."""
    files = [path.read_bytes() for path in sorted(folder.glob("rank-*"))]
    return [Heartbeat.from_buffer_copy(content) for content in files if len(content) == ctypes.sizeof(Heartbeat)]


def has_ended(folder: Path, rank: int) -> bool:
    """True if a rank whose heartbeat is in `folder` has come to the end of its main function without an error."""
    path = folder / f"rank-{rank}"
    content = path.read_bytes() if path.is_file() else b""
    is_whole = len(content) == ctypes.sizeof(Heartbeat)
    return is_whole and Heartbeat.from_buffer_copy(content).phase == Phase.ENDED


def is_orphan() -> bool:
    """True if the launcher of this rank (ours or torchrun) is gone.

    Nobody would restart or stop the rank then, but another run may begin in the same place.
    """
    return os.getppid() != _parent and any(name in os.environ for name in (FOLDER, "TORCHELASTIC_RUN_ID"))


def is_alive(pid: int) -> bool:
    """True if a process of this machine and user exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
