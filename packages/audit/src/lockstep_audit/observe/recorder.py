"""The events of this process: its rank, events that wait until the rank is known, and observers that fail."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_audit import this_process
from lockstep_audit.events import EventWriter, forget_signals, path_of
from lockstep_audit.observe import places

LAUNCHER = "LOCKSTEP_AUDIT_LAUNCHER"
"""Environment variable of an observed process and its children: the run id and the port of the launcher's store."""
After = Callable[[Any, BaseException | None], None] | None
"""What an observer returns: called with the result, or the error, of the observed function."""
_FIRST = 4
_WAITING = 5000
_STACK = 60


@dataclass
class Counts:
    """What this process has done so far."""

    backwards: int = 0
    optimizer_steps: int = 0
    forwards_training: int = 0
    forwards_eval: int = 0
    collectives_python: int = 0
    gathered: int = 0
    joined: int = 0
    loops: int = 0
    """Over loaders."""


class _Thread(threading.local):
    is_observing = False


class EventRecorder:
    """Writes the events of this process.

    The rank comes from `RANK`, or from the process group when it is made. Until then, events wait in memory. A process
    without a rank, such as a DataLoader worker, writes nothing.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.every, self.patience, self.probe = 50, 60.0, True
        self.rank: int | None = None
        self.is_main = False
        self.process = 0
        self.is_compiled = False
        self.has_loader = False
        self.is_stepping = False
        """Whether an optimizer is stepping, and no code of the script runs inside the step."""
        self.thread = _Thread()
        """`is_observing`: an observer runs in this thread, so what torch does there is not the script's."""
        self.counts = Counts()
        self.cut: Counter[str] = Counter()
        self.moved = time.monotonic()
        self.on_open: list[Callable[[], None]] = []
        self.at_exit: list[Callable[[], dict[str, Any]]] = []
        self.exit_code: int | str | None = None
        self.error: BaseException | None = None
        self._writer: EventWriter | None = None
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_WAITING)
        self._lines: Counter[tuple[object, ...]] = Counter()
        self._off: set[str] = set()
        self._lock = threading.RLock()
        self.has_ended = False

    def configure(self, folder: Path, every: int, patience: float, probe: bool) -> None:
        """Begin to observe this process."""
        self.folder, self.every, self.patience, self.probe = folder, every, patience, probe
        self.process = os.getpid()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forget_rank)

    def find_rank(self) -> None:
        """Take the rank from the environment, unless this is a child of a rank."""
        if this_process.is_rank() and not is_child():
            self.adopt(this_process.rank())

    def adopt(self, rank: int) -> None:
        """Write events as this rank from now on. Another process of the same rank may have been first."""
        if self.folder is None or self.rank is not None:
            return
        path = path_of(self.folder, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            self.folder = None
            return
        with self._lock:
            self.rank, self._writer = rank, EventWriter(self.folder, rank)
            for kind, keys in self._waiting:
                self._writer.write(kind, **keys)
            self._waiting.clear()
            self._writer.watch_signals()
        for function in self.on_open:
            self.guard("open", function)

    def _forget_rank(self) -> None:
        """A forked child has no rank until it makes a process group."""
        self._lock = threading.RLock()
        if self.rank is not None:
            forget_signals()
            self.folder = self.folder if multiprocessing.parent_process() is not None else None
        self.rank, self._writer, self.has_ended = None, None, False

    def emit(self, kind: str, limit: int | None = None, **keys: Any) -> None:
        """Write an event.

        Args:
            limit: the most events of this kind and script line that are written. More are only counted.
        """
        self.moved = time.monotonic()
        self.emit_still(kind, limit, **keys)

    def emit_still(self, kind: str, limit: int | None = None, **keys: Any) -> None:
        """Write an event that does not count as progress of the script."""
        if self.folder is None:
            return
        if limit is not None:
            line = (kind, *(keys.get("at") or ()))
            self._lines[line] += 1
            if self._lines[line] > limit:
                self.cut[kind] += 1
                return
        keys["step"] = self.counts.optimizer_steps
        with self._lock:
            if self._writer is None:
                self._waiting.append((kind, {**keys, "time": time.time()}))
            else:
                self._writer.write(kind, **keys)

    def progress(self) -> None:
        """Record that the script makes progress."""
        self.moved = time.monotonic()

    def is_sampled(self, number: int) -> bool:
        """True for the steps and batches that are examined: the first 4, and every `every`th."""
        return number < _FIRST or number % self.every == 0

    def guard(self, name: str, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Call an observer. If it fails, that is recorded and it is switched off; the script continues."""
        if name in self._off or self.folder is None:
            return None
        outer, self.thread.is_observing = self.thread.is_observing, True
        try:
            return function(*arguments, **named)
        except Exception as error:
            self.switch_off(name, error)
            return None
        finally:
            self.thread.is_observing = outer

    def switch_off(self, name: str, error: BaseException) -> None:
        """Record that an observer failed, and do not call it again."""
        self._off.add(name)
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
        self.emit("note", what=name, reason=f"{type(error).__name__}: {error}{line}")

    def note_exit(self, status: Any, error: BaseException | None) -> None:
        """Remember how the process ends: the argument of `sys.exit`."""
        self.exit_code = status if isinstance(status, int) else int(status is not None)
        self.error = error or self.error

    def end(self) -> None:
        """Write the last events. Called once, by whatever ends the process."""
        if self.has_ended or self.folder is None:
            return
        self.has_ended = True
        if self.rank is None and self.is_main:
            self.adopt(0)
        error = self.error or getattr(sys, "last_value", None)
        told: dict[str, Any] = {}
        for function in self.at_exit:
            told |= self.guard(f"exit: {function.__module__}", function) or {}
        code = self.exit_code if self.exit_code is not None else int(error is not None)
        joined = self.counts.joined > 0 or None
        self.emit("exit", code=code, error=_told(error), joined=joined, cut=dict(self.cut) or None, **told)


def is_child() -> bool:
    """True for a process of `multiprocessing`. While such a process starts, only its command line shows it."""
    return multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv


def _told(error: BaseException | None) -> dict[str, Any] | None:
    if error is None or isinstance(error, SystemExit):
        return None
    place, trace, stack = None, error.__traceback__, list[list[str | int]]()
    while trace is not None:
        kind, path = places.kind_of(trace.tb_frame.f_code)
        if places.is_shown(path):
            stack.insert(0, [path, trace.tb_lineno, trace.tb_frame.f_code.co_name])
        place = stack[0] if kind is places.USER else place
        trace = trace.tb_next
    return {"type": type(error).__name__, "message": str(error)[:2000], "at": place, "stack": stack[:_STACK]}


recorder = EventRecorder()
