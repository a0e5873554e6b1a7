"""Loader workers that were killed: how torch's DataLoader reports it, and by which signal."""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from lockstep.core import shortages
from lockstep.core.data import reachable, worker_stacks, workers
from lockstep.core.errors import DataError, UsageError

_TORCH = "torch.utils.data._utils.signal_handling"  # where torch's handler of SIGCHLD is
MOST_DEATHS = 3
"""Number of workers that may be killed without a micro-batch in between."""
_SHOWN = 4  # workers in a report
_REMEDY = (
    "lower data.workers if the memory of the machine is short (the system log has a line of the out-of-memory killer); "
    "else a sample crashes the code that reads it: data.workers=0 shows where"
)
# What torch says if a worker has ended. The thread that pins memory fails on data of a process that is gone.
_TEXTS = ("DataLoader worker (pid", "Pin memory thread exited unexpectedly")
_TIMED_OUT = "DataLoader timed out"
REPORT_S = 45.0
"""After this time without a batch, a rank reports where its workers are; again after 4 times, 16 times as long."""
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
        UsageError: workers are not forked, and the data set cannot be pickled for them.
    """
    others = multiprocessing.active_children()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # an error says more
            warnings.filterwarnings("ignore", "This DataLoader will create")  # it was said when the loader was made
            batches = iter(loader)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if not loader.num_workers or workers.are_forked(loader):
            raise
        raise _not_sendable(loader, error) from error
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


def newest(count: int) -> Sequence[BaseProcess]:
    """The workers that were started last, `count` or fewer."""
    return sorted(_workers, key=lambda process: process.pid or 0)[-count:]


def given(
    batches: Iterator[Any], processes: Sequence[BaseProcess], what: Callable[[], str], tell: Callable[[str], None]
) -> Any:
    """The next that a DataLoader gives. If it takes long, `tell` is called with the stacks of the workers.

    Args:
        what: returns what is read, for the report.
    """
    began, report_s = time.monotonic(), REPORT_S
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not str(error).startswith(_TIMED_OUT):
                raise
        thread = getattr(batches, "_pin_memory_thread", None)
        if thread is not None and not thread.is_alive():
            raise RuntimeError("Pin memory thread exited unexpectedly")
        waited_s = time.monotonic() - began
        if waited_s >= report_s:
            report_s *= 4
            tell(_report(processes, what(), waited_s))


def _report(processes: Sequence[BaseProcess], what: str, waited_s: float) -> str:
    pids = [process.pid or 0 for process in processes if process in _workers and process.is_alive()]
    threads = worker_stacks.other_threads()
    lines = [f"warning: the loader workers have given nothing for {waited_s:.0f} s, {what}"]
    lines += [line for pid in pids[:_SHOWN] for line in (f"  worker {pid}:", worker_stacks.of(pid))]
    lines += [f"  and {len(pids) - _SHOWN} more workers"] if len(pids) > _SHOWN else []
    lines.append(f"  other threads of this process: {', '.join(threads) or 'none'}")
    lines.append(
        "  remedy: a sample may take long, and the rank waits. If a stack ends at a lock, or in a library that uses "
        "threads, the lock belonged to a thread of this process when the worker was forked: data.start_method=spawn "
        "starts workers without such locks, and data.workers=0 reads in this process"
    )
    return "\n".join(lines)


def _not_sendable(loader: DataLoader[Any], error: Exception) -> UsageError:
    reads: Any = loader.dataset
    owner = getattr(reads, "micro_batches", reads)
    data, task = getattr(owner, "data", owner), getattr(owner, "task", None)
    named = {type(data).__name__: data} if not reachable.can_be_sent(data) else {"Task": task}
    ((name, value),) = named.items()
    path, part = reachable.not_sendable(value, name)
    return UsageError(
        f"{path}, a {type(part).__name__}, cannot be sent to loader workers that are not forked: {error}",
        where=f"data.start_method={loader.multiprocessing_context.get_start_method()}"
        if loader.multiprocessing_context
        else "data.workers",
        remedy="make it with the first sample that a process reads, or data.start_method=fork, or data.workers=0",
    )


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
            return list(_all(batches, processes, f"while {what} were read"))
        except (RuntimeError, OSError, EOFError) as error:
            if not caused(error, processes):
                raise
            deaths += 1
            if deaths == MOST_DEATHS:
                raise killed_again(describe(processes, error), f"while {what} were read") from error


def _all(batches: Iterator[Any], processes: Sequence[BaseProcess], what: str) -> Iterator[Any]:
    while True:
        try:
            yield given(batches, processes, lambda: what, workers.print_warning)
        except StopIteration:
            return


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


def left_over(error: RuntimeError) -> bool:
    """True if `start` failed because a worker of an earlier iteration has ended, or does not answer yet."""
    return str(error).startswith((*_TEXTS, _TIMED_OUT))


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
