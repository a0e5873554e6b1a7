"""Imported only by the warm process: it loads the modules that ranks need, and makes the process safe to fork.

`warm_process.start` passes this module to Python's fork server, which imports it before it forks the first rank. The
import does the work, because a fork server can only import. Without the environment variable `PRELOAD`, it does
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

PRELOAD = "LOCKSTEP_PRELOAD"
"""Environment variable: the modules to import, separated by commas."""
ENDS_WITH_PARENT = "LOCKSTEP_PRELOAD_ENDS_WITH_PARENT"
"""Environment variable: set if the system may kill the warm process when the thread that started it ends."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a scheduler or a terminal sends to all processes of a job. The launcher decides what they mean."""
_PR_SET_PDEATHSIG = 1
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")  # files that drivers of accelerators open


def why_not_safe(threads_before: int) -> str | None:
    """The reason why forking this process is not safe; None if it is safe.

    A forked child only has the thread that forked, so a lock that another thread held stays locked forever. An
    accelerator's driver does not work in a forked child.

    Args:
        threads_before: number of threads that are allowed.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > threads_before:
        return f"importing the modules started {threads - threads_before} thread{'s' * (threads > threads_before + 1)}"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.readlink(descriptor).startswith(_DEVICES):
                return f"importing the modules opened {os.readlink(descriptor)}"
    return None


def _prepare() -> None:
    os.setsid()  # terminal keys reach only the launcher
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked by `warm_process.start`
    if ENDS_WITH_PARENT in os.environ:  # immediately; the fork server itself notices the end only after the imports
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_become_child)
    gc.disable()  # imports make no garbage; scanning for it takes a fifth of the time
    with contextlib.suppress(Exception):
        import numpy  # noqa: F401
    # Threads of numpy's OpenBLAS are allowed: OpenBLAS ends them before a fork and starts them again.
    threads = len(os.listdir("/proc/self/task"))
    for name in os.environ[PRELOAD].split(","):
        with contextlib.suppress(Exception):  # the rank that needs the module shows the error
            importlib.import_module(name)
    gc.freeze()  # a collection in a rank would write to every page, and memory would no longer be shared
    gc.enable()
    reason = why_not_safe(threads)
    if reason:
        print(f"note: {reason}, so ranks start cold: each of them imports torch", file=sys.stderr, flush=True)
        os._exit(1)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _become_child() -> None:
    """A signal to a new rank ends it, from the start."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    _unblock()


if PRELOAD in os.environ:
    _prepare()
