"""`lockstep-audit`: starts the ranks of a script, ends them if they hang, and judges their events."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep_audit import events, sessions
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.events import EventHistory
from lockstep_audit.judge import FAILED, AuditVerdict, judge
from lockstep_audit.rules.waiting import stuck
from lockstep_audit.settings import JUDGED_OUTSIDE, NOTEBOOK, Settings

_LOOK_S = 0.5
_END_S = 10.0
"""How long killed ranks may take to end."""
_SLOW = 10
"""Ranks that still run Python code may take this many times the patience: one may prepare data for the others."""


def run(
    target: Sequence[str],
    settings: Settings,
    *,
    nproc: int,
    folder: Path | None = None,
    every: int = 50,
    patience: float = 60.0,
    probe: bool = True,
) -> int:
    """Run a script on this many ranks, observed, and write the report.

    Args:
        target: the script and its arguments, or `-m`, a module and its arguments.
        folder: the folder for events. None: a temporary folder, which is deleted.
        every: after the first few steps, every `every`-th is examined.
        patience: seconds without progress of any rank after which the run is ended.
        probe: whether samples of data sets are read on all ranks at the end and compared.

    Returns:
        the exit code: see `judge.AuditVerdict`.

    Raises:
        AuditUsageError: the script or the folder is not usable.
    """
    if not target or (target[0] == "-m" and len(target) < 2):
        raise AuditUsageError(
            "no script was given", remedy="lockstep-audit --nproc 2 train.py, or -m module instead of train.py"
        )
    if target[0].endswith(".ipynb"):
        raise AuditUsageError("is a notebook", where=target[0], remedy=NOTEBOOK)
    if target[0].startswith("-") and target[0] != "-m":
        remedy = "lockstep-audit --help lists its options; put the script's options after the script"
        raise AuditUsageError("lockstep-audit has no such option", where=target[0], remedy=remedy)
    if target[0] != "-m" and not Path(target[0]).is_file():
        raise AuditUsageError(
            "is not a file", where=target[0], remedy="give the script, or -m MODULE, then its own options"
        )
    with _folder(folder) as place:
        options = ["--folder", str(place), "--every", str(every), "--patience", str(patience)]
        options += ["--no-probe"] * (not probe)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        # Without the first `--`, torchrun would complete abbreviations of its options in the arguments of the script.
        command += ["--max-restarts", "0", "-m", "--", "lockstep_audit", *options, "--", *target]
        process = subprocess.Popen(command, env=os.environ | {JUDGED_OUTSIDE: "1"}, start_new_session=True)
        failed = True
        try:
            with _ended_by_sigterm():
                failed = _wait(process, place, nproc, patience) != 0
        except KeyboardInterrupt:
            print("lockstep-audit: stopped; the report covers what was observed so far", file=sys.stderr, flush=True)
        finally:
            _end(process)
        if not any(place.glob("rank-*.jsonl")):
            print("lockstep-audit: no rank started, or none imported torch", file=sys.stderr, flush=True)
            return FAILED
        verdict = judge(place, settings, failed=failed)
        _tell_stacks(place, verdict)
        return verdict.exit_code


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM acts like Ctrl-C: the ranks are ended, and the report is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as made:
            yield Path(made)
        return
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise AuditUsageError("is not an empty folder", where=str(given), remedy="give --folder a new or empty folder")
    given.mkdir(parents=True, exist_ok=True)
    yield given.resolve()


def _wait(process: subprocess.Popen[bytes], folder: Path, nproc: int, patience: float) -> int:
    """Wait until the ranks have ended or hang."""
    files = _Tails(folder, patience)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        if files.hang(nproc):
            return 1


class _Tails:
    """The last events of each rank, read as files grow."""

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self._read: dict[str, int] = {}
        self._events: dict[str, list[Any]] = {}

    def hang(self, nproc: int) -> bool:
        """True if every rank is stuck, or has ended while others are stuck."""
        for path in self._folder.glob("rank-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                lines = file.read()
            whole = lines.rpartition(b"\n")[0]
            self._read[path.name] = self._read.get(path.name, 0) + len(whole) + bool(whole)
            for line in whole.splitlines()[-50:]:
                with contextlib.suppress(ValueError):
                    self._events.setdefault(path.name, []).append(json.loads(line))
            del self._events.setdefault(path.name, [])[:-50]
        history = EventHistory(event for each in self._events.values() for event in each)
        waiting = stuck(history)
        gone = {event["rank"] for event in history.of("exit")}
        if len(set(waiting) | gone) < max(nproc, len(history.ranks)):
            return False
        return bool(waiting) and all(_is_over(event, self._patience) for event in waiting.values())


def _is_over(event: events.Event, patience: float) -> bool:
    """True if a stuck rank is inside one call of C++ or of torch.distributed, or has been anywhere for very long."""
    if str(event.get("blocked_in")).startswith("torch.distributed."):  # new_group waits in a loop of Python
        return True
    return event.get("moves") is False or (event.get("since_s") or 0) > _SLOW * patience


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and its ranks, which lead sessions. SIGTERM would fill the screen with tracebacks."""
    if process.poll() is None:
        ranks = _children(process.pid)
        process.kill()
        process.wait()
        sessions.end({process.pid, *ranks}, _END_S)


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended by now
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _tell_stacks(folder: Path, verdict: AuditVerdict) -> None:
    """After a hang, where each rank was."""
    if verdict is AuditVerdict.HANG:
        for rank, event in sorted(stuck(EventHistory(events.read(folder))).items()):
            frames: list[Any] = next(iter((event.get("stacks") or {}).values()), [])
            words = " < ".join(f"{os.path.basename(file)}:{row} {function}" for file, row, function in frames[:4])
            print(f"  rank {rank} was in {event.get('blocked_in') or 'Python'}: {words}", file=sys.stderr, flush=True)
