"""Loader workers that were killed: how torch's DataLoader tells, and by which signal."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

# What torch says where a worker has ended. The thread that pins memory fails on data of a process that is gone.
_TEXTS = ("DataLoader worker (pid", "Pin memory thread exited unexpectedly")


def start(loader: DataLoader[Any]) -> tuple[Iterator[Any], Sequence[BaseProcess]]:
    """Begin to iterate over `loader`, which starts its workers if they do not run yet.

    torch handles SIGCHLD: where a worker is killed, its handler raises in whatever code the main thread runs, such as
    in the middle of a step, which could not go on from there. So the handler is taken back. The DataLoader then raises
    from `next`, at most 5 seconds after it has nothing else to give.

    Returns:
        the iterator, and processes of which some are the workers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    batches = iter(loader)
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
    return batches, multiprocessing.active_children()


def caused(error: Exception, processes: Sequence[BaseProcess]) -> bool:
    """Whether a DataLoader raised `error` because a worker among `processes` has ended."""
    if isinstance(error, RuntimeError):
        return str(error).startswith(_TEXTS)
    # The worker ended while it handed over a batch. Its end may take a moment to be known.
    return bool(connection.wait([process.sentinel for process in processes], timeout=1.0))


def describe(processes: Sequence[BaseProcess], error: Exception) -> str:
    """Which of the workers among `processes` ended, and how: `loader worker 4711 was killed by SIGKILL`."""
    ended = [process for process in processes if process.exitcode and str(process.pid) in str(error)]
    ended = ended or [process for process in processes if process.exitcode]
    if not ended:
        return "a loader worker has ended"
    return " and ".join(f"loader worker {process.pid} {_how(process.exitcode or 0)}" for process in ended)


def _how(exit_code: int) -> str:
    if exit_code > 0:
        return f"has ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
