"""Start ranks on this machine through torch's elastic agent, restart them after a crash, and say why a rank failed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.distributed import heartbeat, warm_process
from lockstep.distributed.signals import ASKING, LAUNCHED, STOP_FILE, STOPPED_AT_ONCE, is_another, not_ignored, tell
from lockstep.errors import LockstepError, Preempted, RankError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_NOT_BEGUN = "stopped before training began; nothing was lost"
_NO_MEMORY = "often the system ran out of memory: lower batch.micro or the number of ranks"
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # macOS lacks it
RESTARTS = "LOCKSTEP_RESTARTS"
"""Environment variable: how often the launcher has restarted its ranks."""


def run_command(arguments: Sequence[str]) -> None:
    """The main function of a rank: `lockstep ARGUMENTS`."""
    from lockstep.__main__ import main

    sys.argv = ["lockstep", *arguments]
    main()


def launch(
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int = 0,
    *,
    main: Callable[[Sequence[str]], None] = run_command,
    ends_process: bool = True,
) -> None:
    """Run `lockstep ARGUMENTS` as `nproc` ranks on this machine, and return when all ranks have ended without error.

    Each start is one run of torch's agent without restarts of its own. The agent would also restart ranks that stopped
    on request, and ranks that fail at the same step for ever.

    All ranks are started again after a rank was killed or crashed. They are not started again after an error that would
    come again (wrong usage, a loss that is not finite). Nor are they after two crashes in a row at the same step, or
    five where a rank was killed, because kills from outside may well hit the same step twice. Crashes do not count as
    in a row where the next start does something else (smaller micro-batches, after memory did not suffice).

    Args:
        max_restarts: most restarts in all.
        main: the main function of a rank. It is called with `arguments`, and can be imported by its name.
        ends_process: whether a second request to stop ends this process, besides the ranks. Otherwise it raises
            KeyboardInterrupt.

    Raises:
        RankError: a rank failed. Names the rank, with its own message, and has its exit code.
        Preempted: a signal asked to stop, and the ranks have saved and stopped.
    """
    stop = _Forwarding(ends_process)
    crashed_at, in_a_row = None, 0
    for restarts in range(max_restarts + 1):
        if stop.asked:
            raise Preempted("stopped between two starts; the checkpoints stay")
        os.environ[RESTARTS] = str(restarts)
        with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as name:
            stop.folder = Path(name)
            failures = _run_once(arguments, nproc, stop.folder, main)
            if not failures:
                return
            step = max((rank.step for rank in heartbeat.all_in(stop.folder)), default=-1)
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        preempted = [rank for rank, code in codes.items() if code == Preempted.exit_code]
        # The agent stops the other ranks when a rank failed. A rank that has not begun then ends as if preempted.
        if preempted and (stop.asked or not any(_failed_by_itself(failure) for failure in failures.values())):
            raise Preempted(_report_of(failures[preempted[0]]).get("text") or _NOT_BEGUN)
        if stop.asked and set(codes.values()) <= {-signal.SIGUSR1, -signal.SIGTERM}:  # the ranks did not listen yet
            raise Preempted(_NOT_BEGUN)
        cause, retryable, retries_differently = _first_cause(failures)
        if not retryable or stop.asked or restarts == max_restarts:
            raise cause
        in_a_row = in_a_row + 1 if step == crashed_at and not retries_differently else 1
        crashed_at = step
        when = f"at step {step}" if step >= 0 else "before training began"
        if in_a_row == (5 if -signal.SIGKILL in codes.values() else 2):
            reason = f"it failed {in_a_row} times in a row {when}, so it was not started again"
            cause.remedy = f"{reason}. {cause.remedy or ''}".rstrip()
            raise cause
        print(f"{cause.what}\nfailed {when}: restart {restarts + 1} of {max_restarts}", file=sys.stderr, flush=True)


def prepare(nproc: int, *, cold: bool = False, modules: Sequence[str] = (), host_computes: bool = False) -> None:
    """Set the environment variables of ranks, and start the process from which they are forked, if there is none.

    Call this as early as possible: the process imports torch while this one reads the config and imports the agent.

    Args:
        nproc: number of ranks on this machine.
        cold: start each rank as a new interpreter instead.
        modules: modules that ranks import besides torch and Lockstep.
        host_computes: whether ranks with a GPU compute much on the host, too, as with offloaded optimizer state.
    """
    # Workers that share the agent's store can read a dead rank's address after a restart (pytorch#135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHED] = "1"
    # When the rank that holds the store is killed, the other ranks would show warnings with stacks of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if nproc > 1:
        # Ranks slow each other down if each of them uses all cores.
        threads = max(1, len(os.sched_getaffinity(0)) // nproc) if host_computes and _HAS_AFFINITY else 1
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if not cold:
        warm_process.start(modules)


def _run_once(
    arguments: Sequence[str], nproc: int, folder: Path, main: Callable[[Sequence[str]], None]
) -> dict[int, ProcessFailure]:
    """Start the ranks and wait for their end.

    Returns:
        the failures by rank; empty if all ranks ended without error.
    """
    from lockstep.distributed import agent

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the launcher itself says which rank failed
    os.environ[heartbeat.FOLDER] = str(folder)
    return agent.run_ranks(main, (list(arguments),), nproc=nproc, folder=folder)


class _Forwarding:
    """Passes a request to stop on to the ranks, as SIGUSR1, and waits for them. A second request ends them at once.

    Args:
        ends_process: whether a second request also ends this process. Otherwise it raises KeyboardInterrupt.
    """

    def __init__(self, ends_process: bool = True) -> None:
        self.ends_process = ends_process
        self.asked = False
        self.asked_at = 0.0
        self.folder: Path | None = None
        is_main = threading.current_thread() is threading.main_thread()  # no other thread can handle signals
        for number in not_ignored(ASKING) if is_main else ():
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.asked and is_another(number, self.asked_at):
            self._end_at_once(number)
        if self.asked:
            return
        self.asked, self.asked_at = True, time.monotonic()
        if self.folder is None:
            raise Preempted(_NOT_BEGUN)
        with contextlib.suppress(FileNotFoundError):  # between two starts, `launch` looks at `asked`
            (self.folder / STOP_FILE).write_text(signal.Signals(number).name)
        self._send(signal.SIGUSR1)

    def _send(self, number: signal.Signals) -> None:
        for rank in heartbeat.all_in(self.folder) if self.folder else ():
            if rank.pid and heartbeat.is_alive(rank.pid):
                os.kill(rank.pid, number)

    def _end_at_once(self, number: int) -> NoReturn:
        self._send(signal.SIGKILL)
        if not self.ends_process:
            raise KeyboardInterrupt
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        warm_process.remove_files()
        tell(STOPPED_AT_ONCE)
        os._exit(128 + number)


def report_failure(error: BaseException, text: str) -> None:
    """Write `text` for the agent that started this rank (ours or the user's torchrun), if an agent did."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        origin = error.origin if isinstance(error, RankError) else None
        stopped = isinstance(error, Preempted)  # by the agent, where another rank failed
        extra = {
            "py_callstack": text,
            "timestamp": str(int(time.time())),
            "origin": origin,
            "retryable": error.retryable if isinstance(error, LockstepError) else not stopped,
            "retries_differently": isinstance(error, LockstepError) and error.retries_differently,
            "stopped": stopped,
            "lost_another": isinstance(error, RankError) and error.lost_another,
        }
        # Renamed when it is complete: this process may be killed while it writes, and the agent cannot read half a
        # file.
        unfinished = Path(f"{path}.{os.getpid()}")
        unfinished.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        unfinished.rename(path)


def _report_of(failure: ProcessFailure) -> dict[str, Any]:
    """The report that a rank wrote with `report_failure`; empty where it wrote none."""
    message = failure.error_file_data.get("message", {})
    return {"text": message.get("message"), **message.get("extraInfo", {})} if isinstance(message, dict) else {}


def _failed_by_itself(failure: ProcessFailure) -> bool:
    """Whether a rank failed neither because another rank failed nor because the agent or a signal stopped it."""
    report = _report_of(failure)
    if failure.exitcode in (-signal.SIGTERM, -signal.SIGUSR1, Preempted.exit_code) or report.get("stopped"):
        return False
    if _ended_by_nccl(report):
        return False
    if failure.exitcode == 1 and not report:  # `signals` ends a rank so, after the agent's SIGTERM
        return False
    return not report.get("origin") and not report.get("lost_another")


def _ended_by_nccl(report: Mapping[str, Any]) -> bool:
    """Whether the last lines of a rank that a signal ended say that NCCL did so because of another rank."""
    output = "\n".join(report.get("last_lines") or [])
    if "NCCL" not in output:
        return False
    from lockstep.distributed import device_errors

    return device_errors.is_of_another_rank(output)


def _first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[LockstepError, bool, bool]:
    """Of all ranks that failed, the rank because of which the others failed.

    Returns:
        its error, whether a restart may go well, and whether a restart does something else than before.
    """
    gone = warm_process.how_it_ended()
    if gone:
        return RankError(gone, remedy=_NO_MEMORY), True, False
    causes = []
    for rank, failure in failures.items():
        knows_the_cause = bool(_report_of(failure).get("origin"))
        distance = 0 if _failed_by_itself(failure) else 1 if knows_the_cause else 2
        causes.append((distance, failure.timestamp, rank, failure))
    _, _, rank, failure = min(causes, key=lambda cause: cause[:3])
    report = _report_of(failure)
    if failure.exitcode < 0 and (report.get("stopped") or not report.get("text")):
        return _killed(rank, failure, report.get("last_lines") or [])
    text = report.get("text") or "it gave no reason; see its output above"
    rank, text = report.get("origin") or (rank, text)
    cause = RankError(f"rank {rank} failed: {text}")
    cause.exit_code = max(1, failure.exitcode)  # a rank that has reported its error may be killed while it ends
    return cause, bool(report.get("retryable", True)), bool(report.get("retries_differently", False))


def _killed(rank: int, failure: ProcessFailure, last_lines: Sequence[str]) -> tuple[LockstepError, bool, bool]:
    """The same as `_first_cause`, for a rank that a signal ended before it could report an error.

    Args:
        last_lines: of its stderr.
    """
    output = "\n".join(last_lines)
    what = f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()})"
    if output:
        what += "; the last lines of its stderr:\n" + textwrap.indent(output, "    ")
    remedy = _NO_MEMORY if failure.exitcode == -signal.SIGKILL else None
    if output:
        from lockstep.distributed import device_errors

        remedy = device_errors.advice(output)
        return RankError(what, remedy=remedy), not device_errors.is_deterministic(output), False
    return RankError(what, remedy=remedy), True, False
