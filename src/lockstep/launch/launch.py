"""Start ranks on this machine through torch's elastic agent, restart them after a crash, and say why a rank failed."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.core import debugging
from lockstep.core.errors import LockstepError, Preempted, RankError
from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.signals import ASKING, LAUNCHED, STOP_FILE, STOPPED_AT_ONCE, is_another, not_ignored, tell
from lockstep.launch import launch_folder, warm_process
from lockstep.launch.decision import NOT_BEGUN, Action, Decision, Ending, History, RankFailure, decide

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # macOS lacks it
RESTARTS = "LOCKSTEP_RESTARTS"
"""Environment variable: how often the launcher has restarted its ranks."""
LOST_NODE = "LOCKSTEP_LOST_NODE_S"
"""Environment variable: after the loss of a node, seconds in which its ranks may still hold the run directory."""


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

    All ranks are started again after a rank was killed or crashed, as `decision.decide` says.

    Args:
        max_restarts: most restarts in all.
        main: the main function of a rank. It is called with `arguments`, and can be imported by its name.
        ends_process: whether a second request to stop ends this process, besides the ranks. Otherwise it raises
            KeyboardInterrupt.

    Raises:
        RankError: a rank failed. Names the rank, with its own message, and has its exit code.
        Preempted: a signal asked to stop, and the ranks have saved and stopped.
    """
    max_restarts = 0 if debugging.RANK in os.environ else max_restarts
    stop = Forwarding(ends_process)
    history = History()
    for start in itertools.count():
        if stop.asked:
            raise Preempted("stopped between two starts; the checkpoints stay")
        os.environ[RESTARTS] = str(start)
        with launch_folder.made(nproc) as stop.folder:
            failures = _run_once(arguments, nproc, stop.folder, main)
            step = furthest_step(stop.folder)
        gone = warm_process.how_it_ended() if failures else None
        ending = Ending(rank_failures(failures), step, asked=stop.asked, warm_process=gone or "")
        decision = decide(ending, history, max_restarts)
        if decision.action is Action.DONE:
            return
        history = follow(decision)


def follow(decision: Decision) -> History:
    """Print why all ranks start again, and return the history for the next decision; or raise why the run ends.

    Raises:
        Preempted: the decision is to stop.
        LockstepError: the decision is to fail.
    """
    if decision.action is Action.STOP:
        raise Preempted(decision.text)
    if decision.error is not None:
        raise decision.error
    print(decision.text, file=sys.stderr, flush=True)
    return decision.history


def furthest_step(folder: Path) -> int:
    """The largest step of a rank whose heartbeat is in `folder`; -1 if none has begun to train."""
    return max((rank.step for rank in heartbeat.all_in(folder)), default=-1)


def rank_failures(failures: Mapping[int, ProcessFailure], node: str = "") -> tuple[RankFailure, ...]:
    """What torch's agent says of ranks that failed, with what they reported."""
    return tuple(
        RankFailure(rank, failure.exitcode, int(failure.timestamp), _report_of(failure), node)
        for rank, failure in failures.items()
    )


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
    if debugging.RANK in os.environ:
        debugging.offer_terminal(nproc)
    if not cold:
        warm_process.start(modules)


def _run_once(
    arguments: Sequence[str], nproc: int, folder: Path, main: Callable[[Sequence[str]], None]
) -> dict[int, ProcessFailure]:
    """Start the ranks and wait for their end.

    Returns:
        the failures by rank; empty if all ranks ended without error.
    """
    from lockstep.launch import agent

    quiet_torch()
    os.environ[heartbeat.FOLDER] = str(folder)
    return agent.run_ranks(main, (list(arguments),), nproc=nproc, folder=folder)


def quiet_torch() -> None:
    """Let torch's agent write no messages: the launcher itself says which rank failed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class Forwarding:
    """Passes a request to stop on to the ranks, as SIGUSR1, and waits for them. A second request ends them at once.

    Args:
        ends_process: whether a second request also ends this process. Otherwise it raises KeyboardInterrupt.
    """

    def __init__(self, ends_process: bool = True) -> None:
        self.ends_process = ends_process
        self.asked = False
        self.asked_at = 0.0
        self.asked_by = ""
        """Name of the signal."""
        self.folder: Path | None = None
        self.defers = False
        """Whether a request waits for the ranks, which start soon. Otherwise it raises Preempted where no rank runs."""
        self._passed_on: Path | None = None
        is_main = threading.current_thread() is threading.main_thread()  # no other thread can handle signals
        for number in not_ignored(ASKING) if is_main else ():
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.asked and is_another(number, self.asked_at):
            self._end_at_once(number)
        if self.asked:
            return
        self.asked, self.asked_at, self.asked_by = True, time.monotonic(), signal.Signals(number).name
        if self.folder is not None:
            self._tell_ranks(self.asked_by)
        elif not self.defers:
            raise Preempted(NOT_BEGUN)

    def pass_on(self, name: str) -> None:
        """Ask the ranks to stop, for a reason with this name. Nothing, where they were asked before."""
        if self.folder is not None and self._passed_on != self.folder:
            self._passed_on = self.folder
            self._tell_ranks(name)

    def _tell_ranks(self, name: str) -> None:
        assert self.folder is not None
        with contextlib.suppress(OSError):  # between two starts, `launch` looks at `asked`; the ranks get a signal
            launch_folder.write(self.folder / STOP_FILE, name.encode())
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
            "from_outside": _is_from_outside(error),
            "stopped": stopped,
            "lost_another": isinstance(error, RankError) and error.lost_another,
        }
        # Renamed when it is complete: this process may be killed while it writes, and the agent cannot read half a
        # file.
        unfinished = Path(f"{path}.{os.getpid()}")
        try:
            launch_folder.write(unfinished, json.dumps({"message": {"message": text, "extraInfo": extra}}).encode())
            unfinished.rename(path)
        except OSError as fault:  # the exit code says the rest
            tell(f"[rank {os.environ.get('RANK', 0)}] {text}\n(the launcher cannot be told of it: {fault})")


def _is_from_outside(error: BaseException) -> bool:
    """See `LockstepError.from_outside`. torch's DistError is found by its name: a launcher does not import torch."""
    if isinstance(error, LockstepError):
        return error.from_outside
    by_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return by_torch or isinstance(error, (Preempted, ConnectionError, TimeoutError))


def _report_of(failure: ProcessFailure) -> dict[str, Any]:
    """The report that a rank wrote with `report_failure`; empty where it wrote none."""
    message = failure.error_file_data.get("message", {})
    return {"text": message.get("message"), **message.get("extraInfo", {})} if isinstance(message, dict) else {}
