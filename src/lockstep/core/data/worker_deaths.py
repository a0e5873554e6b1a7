"""Loader workers that were killed: how torch's DataLoader reports it, and by which signal."""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from lockstep.core import shortages
from lockstep.core.errors import DataError

_TORCH = "torch.utils.data._utils.signal_handling"  # where torch's handler of SIGCHLD is
MOST_DEATHS = 3
"""Number of workers that may be killed without a micro-batch in between."""
_REMEDY = (
    "lower data.workers if the memory of the machine is short (the system log has a line of the out-of-memory killer); "
    "else a sample crashes the code that reads it: data.workers=0 shows where"
)
# What torch says if a worker has ended. The thread that pins memory fails on data of a process that is gone.
_TEXTS = ("DataLoader worker (pid", "Pin memory thread exited unexpectedly")
_workers: list[BaseProcess] = []


@atexit.register
def _end_workers() -> None:
    """At its exit, Python sends SIGTERM to workers that an error has left, and waits. A worker stays for a while."""
    for process in _workers:
        process.kill()


def start(loader: DataLoader[Any]) -> tuple[Iterator[Any], Sequence[BaseProcess]]:
    """Begin to iterate over `loader`, which starts its workers if they do not run yet.

    torch handles SIGCHLD: if a worker is killed, its handler raises in whatever code the main thread runs, such as
    in the middle of a step, which could not continue from there. So the handler is removed, whichever DataLoader of
    this process has installed it. torch installs it once. The DataLoader then raises from `next`, at most 5 seconds
    after it has nothing else to give.

    Returns:
        the iterator, and processes that include the workers.

    Raises:
        ShortageError: shared memory has no room for the queues of workers.
    """
    others = multiprocessing.active_children()
    try:
        batches = iter(loader)
    except OSError as error:
        if shortages.is_full(error):  # the locks of queues are files in shared memory, without a name in the error
            raise shortages.of_shared_memory() from error
        raise
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) == _TORCH:
            assert callable(handler)
            before = inspect.getclosurevars(handler).nonlocals.get("previous_handler")
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    processes = multiprocessing.active_children()
    _workers[:] = [one for one in processes if one in _workers or one not in others]
    return batches, processes


def read_all(make: Callable[[], DataLoader[Any]], what: str) -> list[Any]:
    """All that a short DataLoader gives. If a worker was killed, a new DataLoader begins from the start.

    Args:
        make: makes the DataLoader.
        what: is read, for the error.

    Raises:
        DataError: a worker was killed again and again.
    """
    deaths = 0
    while True:
        batches, processes = start(make())
        try:
            return list(batches)
        except (RuntimeError, OSError, EOFError) as error:
            if not caused(error, processes):
                raise
            deaths += 1
            if deaths == MOST_DEATHS:
                raise killed_again(describe(processes, error), f"while {what} were read") from error


def killed_again(how: str, where: str) -> DataError:
    """The error if workers were killed `MOST_DEATHS` times in a row.

    Args:
        how: see `describe`.
        where: what was read.
    """
    full = signal.SIGBUS.name in how
    known = DataError(
        f"{how}, {MOST_DEATHS} times in a row" + (f"; {shortages.of_shared_memory().what}" if full else ""),
        where=where,
        remedy=f"if /dev/shm is too small, {shortages.ROOM_FOR_BATCHES}" if full else _REMEDY,
    )
    known.retryable = not full
    known.from_outside = True
    return known


def caused(error: Exception, processes: Sequence[BaseProcess]) -> bool:
    """True if a DataLoader raised `error` because a worker among `processes` has ended."""
    if isinstance(error, RuntimeError):
        return str(error).startswith(_TEXTS)
    # The worker ended while it handed over a batch. Its end may take a moment to be known.
    return bool(connection.wait([process.sentinel for process in processes], timeout=1.0))


def describe(processes: Sequence[BaseProcess], error: Exception) -> str:
    """The workers among `processes` that ended, and how: `loader worker 4711 was killed by SIGKILL`."""
    for process in processes:
        if connection.wait([process.sentinel], timeout=0):  # it closes its files a moment before its exit code is known
            process.join(timeout=1)
    ended = [process for process in processes if process.exitcode and str(process.pid) in str(error)]
    ended = ended or [process for process in processes if process.exitcode]
    if not ended:
        return "a loader worker has ended"
    return " and ".join(f"loader worker {process.pid} {_how(process.exitcode or 0)}" for process in ended)


def _how(exit_code: int) -> str:
    if exit_code > 0:
        return f"has ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
