"""Runs a writer in a separate process, which the training feeds through a pipe.

Libraries of trackers take seconds to import, wait for networks, and draw from Python's random generator (for the pauses
between two attempts). In a separate process, none of this affects the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep import locks
from lockstep.core.writer import FOLDER, RunInfo, Writer
from lockstep.parts.write_guard import reason_of
from lockstep.parts.writer_kinds import find_writer

_WAITING = 1000  # calls that may wait for the process
_END_S = 60  # how long the end of a training waits for the process
_END_WITH_FILES_S = 3600  # the same, if files are sent
_END_EARLY_S = 5  # the same, if the training was stopped or failed: it may have to end at once
_RETRY_S = 30  # between two attempts to make a writer


class OwnProcess(Writer):
    """Passes calls on to a writer in another process. The process starts with the first entry, after the first steps.

    Errors of the other writer are raised here by a later call. The process ends by itself when the training ends, for
    whatever reason. The output of its libraries is in `trackers/<name>.log` in the run directory.

    Args:
        kind: the class of the writer.
        entry: the entry of `log.writers` that names the writer.
    """

    def __init__(self, kind: type[Writer], entry: str, run: RunInfo) -> None:
        super().__init__(run)
        self.kind, self.entry = kind, entry
        self.label = kind.__name__ if ".py:" in entry else entry
        self.process: subprocess.Popen[bytes] | None = None
        self.calls: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self.reports: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.end_s = _END_S

    def record(self, entry: Mapping[str, float]) -> None:
        self._call("record", dict(entry))
        if self.process is None:
            self._start()

    def progress(self, step: int) -> None:
        self._read_reports()

    def message(self, text: str) -> None:
        self._call("message", text)

    def text(self, name: str, text: str, step: int) -> None:
        self._call("text", name, text, step)

    def picture(self, name: str, picture: Any, step: int) -> None:
        self._call("picture", name, picture, step)

    def artifacts(self, paths: Sequence[Path]) -> None:
        self.end_s = _END_WITH_FILES_S
        self._call("artifacts", list(paths))

    def close(self) -> None:
        """Wait until the process has written everything. After a failure of the training, wait for a few seconds.

        Raises:
            TimeoutError: the process took too long, and was ended.
        """
        if self.process is None:
            return
        has_failed = sys.exc_info()[0] is not None
        end_s = _END_EARLY_S if has_failed else self.end_s
        try:
            with contextlib.suppress(queue.Full):
                self.calls.put(None, timeout=end_s)
            self.process.wait(end_s)
        except subprocess.TimeoutExpired:
            if has_failed:  # it ends by itself
                return
            self.process.kill()
            self.process.wait()
            what = f"its process did not end within {end_s} s after the training, and was stopped; see {self._log_file}"
            raise TimeoutError(what) from None
        finally:
            for thread in self.threads:
                thread.join(1)
        self._read_reports()
        if self.process.returncode:
            raise RuntimeError(f"its process ended with code {self.process.returncode}; see {self._log_file}")

    @property
    def _log_file(self) -> Path:
        return self.run.folder / FOLDER / f"{self.label}.log"

    def _call(self, method: str, *arguments: Any) -> None:
        """Pass a call to the thread that feeds the process. Methods that the writer lacks are left out."""
        self._read_reports()
        if getattr(self.kind, method) is getattr(Writer, method):
            return
        try:
            self.calls.put_nowait(pickle.dumps((method, arguments)))
        except queue.Full:
            raise RuntimeError(f"it is {_WAITING} calls behind the training; some calls are dropped") from None

    def _start(self) -> None:
        self._log_file.parent.mkdir(exist_ok=True)
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        for work in (self._feed, self._listen):
            thread = threading.Thread(target=work, args=(self.process,), name=f"lockstep {self.label}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as pipe:  # `close` notices its end
            pipe.write(pickle.dumps((self.entry, self.label)))
            pipe.write(pickle.dumps(self.run))
            while (call := self.calls.get()) is not None:
                pipe.write(call)
                if self.calls.empty():
                    pipe.flush()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                self.reports.put(json.loads(line))

    def _read_reports(self) -> None:
        """Read what the process reported: show its notes, and raise its first error.

        Raises:
            OSError: the writer in the process raised an error.
        """
        while True:
            try:
                report = self.reports.get_nowait()
            except queue.Empty:
                return
            if "error" in report:
                raise OSError(0, report["error"])
            self.note = report["note"]


def main(calls: IO[bytes], reports: IO[str]) -> None:
    """Create the writer, and make the calls of the training until it closes the pipe or is gone."""

    entry, label = pickle.load(calls)
    run: RunInfo = pickle.load(calls)
    writer: Writer | None = None
    next_try, end_s = 0.0, _END_S

    def report(**what: str) -> None:
        with contextlib.suppress(OSError):  # the training may be gone
            print(json.dumps(what), file=reports, flush=True)

    # The process of an earlier start may still be ending. It must not write into the same run of the tracker.
    with locks.locked(run.folder / FOLDER / f"{label}.lock", wait_s=_END_S):
        while True:
            try:
                method, arguments = pickle.load(calls)
            except (EOFError, pickle.UnpicklingError):
                break
            end_s = _END_WITH_FILES_S if method == "artifacts" else end_s
            if writer is None and time.monotonic() < next_try:
                continue
            try:
                next_try = time.monotonic() + _RETRY_S
                if writer is None:
                    writer = find_writer(entry)(run)
                    report(note=writer.note) if writer.note else None
                getattr(writer, method)(*arguments)
            except Exception as error:
                report(error=reason_of(error))
        signal.alarm(end_s)  # the training has ended: this process does not outlive it for long
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                report(error=reason_of(error))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the pipe ends this process
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # libraries that prompt get no answer
    os.dup2(2, 1)  # what libraries print goes into the log
    main(incoming, outgoing)
