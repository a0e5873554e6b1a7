"""Where loader workers are, read from outside: they may wait for a lock that nobody gives back."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

_ANSWER_S = 2.0
_FILE = "lockstep-stacks"
_FRAMES = 12  # shown of a thread
_IDLE = ("multiprocessing/queues.py", "multiprocessing/resource_sharer.py")  # threads of every worker


def _signal() -> int:
    return signal.SIGRTMIN + 5  # real-time signals have no other use here


def answer() -> None:
    """In a worker: write the stacks of all threads into a file in memory when the rank asks. It needs no lock."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            faulthandler.register(_signal(), file=os.memfd_create(_FILE), all_threads=True)


def of(pid: int) -> str:
    """The stacks of a worker, or why they are not known."""
    try:
        return _of(Path("/proc", str(pid)))
    except OSError as error:
        return f"    its stack cannot be read ({error.strerror})"


def _of(process: Path) -> str:
    if sys.platform != "linux":
        return "    its stack cannot be read on this system"
    status = (process / "status").read_text()
    state = re.search(r"State:\s*(.*)", status)
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    where = f"    state: {state[1] if state else 'unknown'}, in the system call {_text(process / 'wchan') or 'unknown'}"
    if not caught or not int(caught[1], 16) >> (_signal() - 1) & 1:
        return f"{where}; it has not begun to read"
    stacks = next((file for file in (process / "fd").iterdir() if _FILE in os.readlink(file)), None)
    if stacks is None:
        return where
    with stacks.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        os.kill(int(process.name), _signal())
        deadline, size = time.monotonic() + _ANSWER_S, start
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, size = size, file.seek(0, os.SEEK_END)
            if size == before > start:
                break
        file.seek(start)
        return _short(file.read().decode(errors="replace")) or f"{where}; it does not answer"


def _short(text: str) -> str:
    """The stacks of the threads that read, without the frames that all workers have."""
    shown: list[str] = []
    for thread in re.split(r"\n\s*\n", text.strip()):
        head, *frames = thread.splitlines()
        if any(place in frame for frame in frames for place in _IDLE):
            continue
        own = next((at for at, frame in enumerate(frames) if "utils/data/_utils/" in frame), len(frames))
        shown += [f"    {head}", *(f"    {frame}" for frame in frames[:own][:_FRAMES])]
    return "\n".join(shown)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip("0\n")
    except OSError:
        return ""


def other_threads() -> list[str]:
    """The names of the threads of this process other than the main one."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    with contextlib.suppress(OSError):
        tasks = [_text(task / "comm") for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
        # Python's own threads have the name of the interpreter there.
        names += [name for name in tasks if not name.startswith(("python", Path(sys.executable).name[:15]))]
    return sorted(set(names))
