"""If no rank makes progress for too long: report where each rank is, and end.

On every rank, a thread counts heartbeats in a store that all ranks reach. A rank that sees no heartbeat, neither its
own nor another rank's, for `timeout_s` seconds declares a hang. Every rank then writes its stack into the store and
ends. The report also contains the last collectives of each rank, and shows where they differ. If not even this thread
can run (the interpreter's lock is held, the host of the store is frozen), the C thread of faulthandler writes the
stacks to stderr and ends the process.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.core.code_files import LOCKSTEP, library_of, lockstep_folders
from lockstep.core.debugging import is_in_debugger
from lockstep.core.errors import RankError
from lockstep.core.parallel import local_sums
from lockstep.core.parallel.heartbeat import Phase, is_orphan
from lockstep.core.parallel.launched import LAUNCHED, report_failure
from lockstep.core.parallel.torch_internals import MainThread
from lockstep.core.parallel.world import World
from lockstep.launch import flight_recorder, left_behind

_PROGRESS, _HANG, _STACK, _REPORT, _READ = "progress", "hang", "stack/", "hang-report", "hang-read"
_COLLECTIVES = "collectives/"
_COMMANDS = tuple(os.path.join(folder, name, "") for folder in lockstep_folders() for name in ("cli", "commands"))
_STDERR = 2
_ANSWER_S = 10.0  # how long a report waits for the stacks of all ranks
_RECORDER_S = 5.0  # how long a rank waits for its flight recorder
_BUSY = 0.03  # fraction of a core at which the main thread counts as working; it may get little
_LENIENCE = 6  # timeouts that a rank may compute without a heartbeat, while it starts or evaluates


def watch(world: World, store: Store | None, *, timeout_s: float, folder: Path) -> Watchdog:
    """Wait until the memory of earlier processes is free, and start watching. For the arguments, see `Watchdog`."""
    left_behind.wait_for_memory(world)
    return Watchdog(world, store, timeout_s=timeout_s, folder=folder)


class Watchdog:
    """Watches the heartbeat of this rank. Create it before the process group: it makes torch record collectives.

    In phases with work that may take long (building and compiling, evaluating, saving), a main thread that computes
    counts as alive for up to 6 timeouts: it uses the CPU, and it executes Python code. A thread that waits for a GPU
    also uses the CPU, but stays inside one C function. In training, only batches count. A main thread in a debugger is
    alive in all phases.

    Args:
        store: a store that all ranks reach; None if there is only one rank.
        timeout_s: seconds without progress on any rank after which the run ends.
        folder: where the report is written.
    """

    def __init__(self, world: World, store: Store | None, *, timeout_s: float, folder: Path) -> None:
        if store is not None:
            flight_recorder.switch_on()
        self.heartbeat, self.store, self.rank, self.size = world.heartbeat, store, world.rank, world.size
        self.heartbeat.enter(Phase.STARTING)  # this process may have trained before
        self.timeout_s, self.folder = timeout_s, folder
        self.tick_s = min(1.0, timeout_s / 10)
        self.main = threading.main_thread().ident or 0
        self.beats, self.own_since = self.heartbeat.beats, time.monotonic()
        self.worked_since = self.own_since
        self.others, self.others_since = -1, self.own_since
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="lockstep-watchdog", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self.closed.set()
        self.thread.join(5)

    def _watch(self) -> None:
        main_thread = MainThread()
        with contextlib.ExitStack() as stack:
            stack.callback(faulthandler.cancel_dump_traceback_later)
            cpu = time.pthread_getcpuclockid(self.main)
            worked = time.clock_gettime(cpu)
            while not self.closed.wait(self.tick_s):
                if is_orphan():
                    os._exit(1)
                # Not into a file: a killed process could not remove it, and a restarted one would empty it.
                faulthandler.dump_traceback_later(self.timeout_s + 3 * _ANSWER_S, exit=True, file=_STDERR)
                now, before, worked = time.monotonic(), worked, time.clock_gettime(cpu)
                working = self.heartbeat.phase != Phase.TRAINING and worked - before > _BUSY * self.tick_s
                working = working and main_thread.has_moved()
                if self.heartbeat.beats != self.beats:
                    self.beats, self.own_since = self.heartbeat.beats, now
                    self.worked_since = now
                elif (working and now - self.own_since < _LENIENCE * self.timeout_s) or is_in_debugger(self.main):
                    self.worked_since = now
                try:
                    if self._is_hanging(now):
                        self._report()
                except dist.DistError:
                    return  # the store ended with rank 0's process, whose failure also ends this rank

    def _is_hanging(self, now: float) -> bool:
        """Publish that this rank is alive; or find that no rank is."""
        idle = now - self.worked_since
        if self.store is None:
            return idle >= self.timeout_s
        if self.store.check([_HANG]):
            return True
        if idle < self.tick_s * 2:
            self.store.add(_PROGRESS, 1)
        elif idle > self.timeout_s / 2:
            total = self.store.add(_PROGRESS, 0)
            if total != self.others:
                self.others, self.others_since = total, now
            return idle >= self.timeout_s and now - self.others_since >= self.timeout_s / 2
        return False

    def _report(self) -> None:
        """Collect the stacks of all ranks, write and show them, and end this process."""
        text = self._stack()
        if self.store is not None:
            self.store.set_timeout(datetime.timedelta(seconds=3 * _ANSWER_S))
            author = int(self.store.compare_set(_HANG, "", str(self.rank)))
            self.store.set(f"{_STACK}{self.rank}", text)
            self.store.set(f"{_COLLECTIVES}{self.rank}", _last_collectives())
            if author != self.rank:
                self.store.wait([_REPORT])
                self._end(f"stopped because the run hung; see the report of rank {author}", author)
            text = self._collect()
        report = f"no rank made progress for {self.timeout_s:g} s\n{text}"
        path = self.folder / f"hang-{datetime.datetime.now():%Y%m%d-%H%M%S}.txt"
        with contextlib.suppress(OSError):  # the report is shown below in any case
            path.write_text(report)
            report += f"\nwritten to {path}"
        if self.store is not None:
            self.store.set(_REPORT, "1")
        self._end(report, self.rank)

    def _collect(self) -> str:
        """The stacks of all ranks, and their last collectives."""
        stacks = self._answers(_STACK, _ANSWER_S)
        silent = "rank {}: no answer: its process is gone or frozen"
        text = "\n".join(stacks[rank] or silent.format(rank) for rank in range(self.size))
        with contextlib.suppress(Exception):  # torch versions may differ here, but the stacks must be shown
            text = f"{text}\n{flight_recorder.describe(self._answers(_COLLECTIVES, _RECORDER_S + 1))}"
        return text

    def _answers(self, prefix: str, wait_s: float) -> dict[int, str]:
        """The text of each rank under `prefix`; empty for ranks that write nothing within `wait_s` seconds."""
        assert self.store is not None
        keys = [f"{prefix}{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + wait_s
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {rank: self.store.get(key).decode() if self.store.check([key]) else "" for rank, key in enumerate(keys)}

    def _stack(self) -> str:
        """The phase and step of this rank, and the stack of its main thread."""
        frames = list(traceback.extract_stack(sys._current_frames()[self.main]))
        places = [number for number, frame in enumerate(frames) if frame.filename.startswith(_COMMANDS)]
        command = max(places, default=-1)
        frames = frames[command + 1 :][-15:]
        inner = next(
            (frame for frame in reversed(frames) if library_of(frame.filename) in (None, LOCKSTEP)), frames[-1]
        )
        phase = Phase(self.heartbeat.phase).name.lower().replace("_", " ")
        idle = time.monotonic() - self.worked_since
        process = f"rank {self.rank} ({socket.gethostname()}, process {os.getpid()})"
        head = f"{process}: {phase}, step {max(0, self.heartbeat.step)}, silent for {idle:.0f} s, "
        head += "" if local_sums.waits_for is None else f"waits for the units of rank {local_sums.waits_for}, "
        where = f"at {inner.filename}:{inner.lineno} in {inner.name}\n"
        return head + where + "".join(traceback.format_list(frames))

    def _end(self, text: str, author: int) -> None:
        error = RankError(text)
        error.origin = (author, text) if author != self.rank else None
        report_failure(error, text)
        if author == self.rank and LAUNCHED not in os.environ:
            print(f"[rank {self.rank}] error: {text}", file=sys.stderr, flush=True)
        if self.store is not None:
            self._linger()
        os._exit(1)

    def _linger(self) -> None:
        """Rank 0 often holds the store, so it waits until the other ranks have read the report."""
        assert self.store is not None
        read = self.store.add(_READ, 1)
        deadline = time.monotonic() + 5
        while self.rank == 0 and read < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
            read = self.store.add(_READ, 0)


def _last_collectives() -> str:
    """Of this rank. Empty if the recorder does not answer: it asks the driver of the GPU, which may also hang."""
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answers.append(flight_recorder.of_this_rank())

    thread = threading.Thread(target=ask, name="lockstep-flight-recorder", daemon=True)
    thread.start()
    thread.join(_RECORDER_S)
    return answers[0] if answers else ""
