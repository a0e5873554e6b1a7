"""Start ranks on this machine through torch's elastic agent, start them again after a crash, and say why one failed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.distributed import heartbeat
from lockstep.distributed.signals import ASKING, LAUNCHED, STOP_FILE, is_another
from lockstep.errors import LockstepError, Preempted, RankError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_NOT_BEGUN = "stopped before training began; nothing was lost"
RESTARTS = "LOCKSTEP_RESTARTS"  # how often the launcher has started its ranks before


def launch(arguments: Sequence[str], nproc: int, max_restarts: int = 0) -> None:
    """Run `python ARGUMENTS` as `nproc` ranks on this machine; returns when all ended well.

    Each start is one run of torch's agent without restarts of its own: it would also restart ranks that stopped on
    request, and those that fail at the same step for ever.

    Args:
        max_restarts: how often all ranks are started again after one was killed or crashed, in all. Not after an error
            that would come again (wrong usage, a loss that is not finite), nor after two crashes in a row at one step
            (five, where a rank was killed: who kills from outside may well hit the same step twice, or the start),
            unless the next start goes about it in another way (smaller micro-batches, where memory did not suffice).

    Raises:
        RankError: a rank failed; names it, with its own words, and carries its exit code.
        Preempted: a signal asked to stop; the ranks have saved and stopped.
    """
    stop = _Forwarding()
    # Workers that share the agent's store can read a dead rank's address after a restart (pytorch#135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHED] = "1"
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # ranks whose store went with a killed one warn with stacks of C++
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks that each take all cores slow each other down
    crashed_at, in_a_row = None, 0
    for restarts in range(max_restarts + 1):
        if stop.asked:
            raise Preempted("stopped between two starts; what was saved before stays")
        os.environ[RESTARTS] = str(restarts)
        with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as name:
            stop.folder = Path(name)
            failed = _run_once(arguments, nproc, stop.folder)
            if failed is None:
                return
            step = max((one.step for one in heartbeat.all_in(stop.folder)), default=-1)
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        for rank, code in codes.items():
            if code == Preempted.exit_code:
                raise Preempted(_words(failed.failures[rank]).get("text") or _NOT_BEGUN)
        if stop.asked and set(codes.values()) <= {-signal.SIGUSR1, -signal.SIGTERM}:  # before they listened
            raise Preempted(_NOT_BEGUN)
        cause, retryable, retries_differently = _first_cause(failed)
        if not retryable or stop.asked or restarts == max_restarts:
            raise cause
        in_a_row = in_a_row + 1 if step == crashed_at and not retries_differently else 1
        crashed_at = step
        when = f"at step {step}" if step >= 0 else "before training began"
        if in_a_row == (5 if -signal.SIGKILL in codes.values() else 2):
            cause.remedy = f"it failed {when} {in_a_row} times in a row, so it was not started again. {cause.remedy or ''}".rstrip()
            raise cause
        print(f"{cause.what}\nfailed {when}: restart {restarts + 1} of {max_restarts}", file=sys.stderr, flush=True)


def _run_once(arguments: Sequence[str], nproc: int, folder: Path) -> ChildFailedError | None:
    """Start the ranks and wait for their end; what failed, if anything."""
    import torch.distributed.elastic.multiprocessing as elastic
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it would say of a failed rank, we say
    os.environ[heartbeat.FOLDER] = str(folder)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"lockstep-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # those that ask to stop are ours
        logs_specs=elastic.DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return error
    return None


class _Forwarding:
    """Passes requests to stop on to the ranks, as SIGUSR1, and waits for them; a second request ends them at once."""

    def __init__(self) -> None:
        self.asked = False
        self.asked_at = 0.0
        self.folder: Path | None = None
        for number in ASKING:
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
        for one in heartbeat.all_in(self.folder) if self.folder else ():
            if one.pid and heartbeat.is_alive(one.pid):
                os.kill(one.pid, number)

    def _end_at_once(self, number: int) -> NoReturn:
        self._send(signal.SIGKILL)
        os.write(2, b"\nstopped at once, without saving; the same command goes on from the newest checkpoint\n")
        os._exit(128 + number)


def report_failure(error: BaseException, text: str) -> None:
    """Leave `text` for the agent that started this rank (ours or the user's torchrun), where one did."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        origin = error.origin if isinstance(error, RankError) else None
        retryable = error.retryable if isinstance(error, LockstepError) else not isinstance(error, Preempted)
        retries_differently = isinstance(error, LockstepError) and error.retries_differently
        extra = {
            "py_callstack": text,
            "timestamp": str(int(time.time())),
            "origin": origin,
            "may_pass": retryable,
            "adapts": retries_differently,
        }
        extra["stopped"] = isinstance(error, Preempted)  # by the agent, where another rank failed
        half = Path(f"{path}.{os.getpid()}")
        half.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        half.rename(path)  # at once: this process may be ended while it writes, and the agent stumbles over half a file


def _words(failure: ProcessFailure) -> dict[str, Any]:
    """What a rank left with `report_failure`; empty where it left nothing."""
    message = failure.error_file_data.get("message", {})
    return {"text": message.get("message"), **message.get("extraInfo", {})} if isinstance(message, dict) else {}


def _first_cause(error: ChildFailedError) -> tuple[LockstepError, bool, bool]:
    """Of all ranks that failed, the one that others failed because of; whether it may go well the next time, and in another way."""
    causes = []
    for rank, failure in error.failures.items():
        words = _words(failure)
        ended_by_agent = (
            failure.exitcode == -signal.SIGTERM or words.get("stopped") or (failure.exitcode == 1 and not words)
        )
        distance = (
            2 if ended_by_agent else 1 if words.get("origin") else 0
        )  # from the cause, in what this rank knows of it
        causes.append((distance, failure.timestamp, rank, failure, words))
    _, _, rank, failure, words = min(causes, key=lambda cause: cause[:3])
    if failure.exitcode < 0:
        hint = (
            "often the system ran out of memory: lower batch.micro or the number of ranks"
            if failure.exitcode == -9
            else None
        )
        return (
            RankError(f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()})", remedy=hint),
            True,
            False,
        )
    text = words.get("text") or "it left no word; see its output above"
    rank, text = words.get("origin") or (rank, text)
    cause = RankError(f"rank {rank} failed: {text}")
    cause.exit_code = failure.exitcode
    return cause, bool(words.get("may_pass", True)), bool(words.get("adapts", False))
