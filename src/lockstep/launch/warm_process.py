"""A warm process has imported torch and all that ranks need. Ranks are forked from it instead of importing again.

It is Python's fork server (`multiprocessing`, start method `forkserver`). It has no threads and touches no GPU, and it
ends with the process that started it. Without it, ranks start cold: each is a new interpreter (start method `spawn`).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from lockstep.core import debugging, shortages
from lockstep.launch import preload

MODULES = (
    "torch",
    "torch._dynamo",  # imported by the first step of an optimizer
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "torch.utils.flop_counter",
)
"""Modules of torch that every rank imports by its first step."""

_SAFE_PATH = "PYTHONSAFEPATH"
_ENDS_S = 5.0  # from the last output of a process to its end, on a busy machine
_warm_pid: int | None = None


def is_possible() -> bool:
    """True if this system can fork ranks safely. On macOS, system libraries may start threads at any time."""
    return sys.platform == "linux" and "forkserver" in multiprocessing.get_all_start_methods()


def start(modules: Sequence[str] = ()) -> None:
    """Start the warm process and return immediately, while it imports. Do nothing if it runs, or if it is not possible.

    Environment variables that libraries read on import (OMP_NUM_THREADS) must be set before.

    Args:
        modules: modules to import in addition to torch's.
    """
    global _warm_pid
    if _warm_pid is not None or not is_possible():
        return
    multiprocessing.set_forkserver_preload([preload.__name__])
    os.environ[preload.PRELOAD] = ",".join((*MODULES, *modules))
    if threading.current_thread() is threading.main_thread():
        os.environ[preload.ENDS_WITH_PARENT] = "1"
    has_safe_path = _SAFE_PATH in os.environ
    os.environ.setdefault(_SAFE_PATH, "1")  # else files in the current directory would replace modules of libraries
    try:
        shortages.allow_short_sockets()
        with _blocked_signals():
            forkserver.ensure_running()
        _warm_pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    except OSError as error:
        _tell_cold(f"the process to fork ranks from did not start ({error})")
    finally:  # no other process may mistake itself for the warm process
        for name in (preload.PRELOAD, preload.ENDS_WITH_PARENT, *([] if has_safe_path else [_SAFE_PATH])):
            os.environ.pop(name, None)


def start_process(function: Callable[..., None], *arguments: Any, **variables: str) -> BaseProcess:
    """A new process that calls `function(*arguments)`: forked from the warm process if `start` was called, else cold.

    It has its own session, the signal handlers of a new interpreter, its own random generators, and the environment
    variables of this process plus `variables`.
    """
    global _warm_pid
    environment = dict(os.environ) | variables
    # A rank ignores the signals that this process ignored when it started, such as SIGHUP under nohup.
    ignored = [number for number in preload.IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    if _warm_pid is not None:
        reason = how_it_ended()
        if reason is None:
            try:
                return _start("forkserver", environment, ignored, function, arguments)
            except (OSError, EOFError) as error:  # it ended just now, or this system has no memory or processes left
                reason = _wait_for_its_end()
                if reason is None:
                    reason = f"a rank could not be forked ({type(error).__name__}: {error})"
        _warm_pid = None
        if reason:
            _tell_cold(reason)
    return _start("spawn", environment, ignored, function, arguments)


def _wait_for_its_end() -> str | None:
    """Like `how_it_ended`, for a process that may be about to end."""
    deadline = time.monotonic() + _ENDS_S
    while (reason := how_it_ended()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reason


def _tell_cold(reason: str) -> None:
    print(f"note: {reason}, so ranks start cold: each of them imports torch", file=sys.stderr, flush=True)


def how_it_ended() -> str | None:
    """The end of the warm process. None: it is running, or was not started. Empty: it ended by itself with a message.

    Python would start a new fork server instead, without the imports.
    """
    if _warm_pid is None:
        return None
    try:
        ended = os.waitid(os.P_PID, _warm_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "the process from which ranks are forked is gone"
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return ""
    return f"the process from which ranks are forked was killed by signal {ended.si_status}"


def remove_files() -> None:
    """Remove the folder of the warm process's socket, for a process that ends without `atexit` functions."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    method: str,
    environment: Mapping[str, str],
    ignored: Sequence[int],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> BaseProcess:
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=_run, args=(environment, ignored, function, arguments))
    needs_main = function.__module__ == "__main__"
    with _blocked_signals(), contextlib.nullcontext() if needs_main else _without_main_module():
        process.start()
    return process


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """A process that starts inside does not run the script of this process, as it would under `multiprocessing`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """A process that starts inside blocks signals until it has set its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, preload.IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    environment: Mapping[str, str], ignored: Sequence[int], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """The main function of a process: make it like a new interpreter, call `function`, and end like an interpreter."""
    os.setsid()
    for number in preload.IGNORED:
        signal.signal(number, signal.SIG_IGN)  # drop pending signals: they were sent to the terminal's processes
        if number not in ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, preload.IGNORED)
    os.environ.clear()  # a forked process has the environment variables of the warm process
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # else loader workers would start like this process
    multiprocessing.current_process().name = "MainProcess"  # libraries treat other names as helpers of a main process
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if debugging.RANK in environment:
        debugging.attach()
    try:
        function(*arguments)
    finally:
        # A process of `multiprocessing` ends without `atexit` functions. An interpreter first waits for threads.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
