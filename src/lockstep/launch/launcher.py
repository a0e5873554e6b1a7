"""Start ranks on this machine through torch's elastic agent, restart them after a crash, and report failures."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from lockstep.core import debugging
from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.launched import FOLDER, INTERRUPTED, LAUNCHED, RESTARTS, STOP_FILE, tell, write
from lockstep.core.parallel.signals import ASKING, STOPPED_AT_ONCE, is_another, not_ignored
from lockstep.launch import warm_process
from lockstep.launch.decision import Action, Decision, Ending, RankFailure, StartHistory, decide
from lockstep.launch.start import Start, folder_of, on_one_node

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # macOS lacks it


def prepare(nproc: int, *, cold: bool = False, modules: Sequence[str] = (), host_computes: bool = False) -> None:
    """Set the environment variables of ranks, and start the process from which they are forked, if there is none.

    Call this as early as possible: the process imports torch while this one reads the config and imports the agent.

    Args:
        nproc: number of ranks on this machine.
        cold: start each rank as a new interpreter instead.
        modules: modules that ranks import in addition to torch.
        host_computes: whether ranks with a GPU also compute much on the host, such as with offloaded optimizer state.
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


class Launchers(Protocol):
    """Those who decide together when ranks start: the launcher of this node only, or those of several nodes."""

    @property
    def first(self) -> int:
        """The number of the next start: 0, or more if this node joins later."""

    def meet(self, number: int) -> Start | None:
        """Wait for the nodes of start `number`. None: this start is over, and this node was not in it.

        Raises:
            Preempted: a signal asked to stop.
        """

    def agree(self, number: int, ending: Ending | None) -> Decision:
        """Decide what follows after start `number`, on all nodes.

        Args:
            ending: how the ranks of this node ended; None if it was not in this start.
        """


def launch(
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int = 0,
    *,
    main: Callable[[Sequence[str]], None],
    ends_process: bool = True,
) -> None:
    """Call `main(arguments)` on `nproc` ranks on this machine, and return when all ranks have ended without error.

    All ranks are restarted after a rank was killed or crashed, as in `decision.decide`.

    Args:
        max_restarts: the most restarts in total.
        main: the main function of a rank. It must be importable by name.
        ends_process: whether a second request to stop also ends this process, and not only the ranks. Otherwise it
        raises KeyboardInterrupt.

    Raises:
        RankError: a rank failed. Names the rank, with its message, and has its exit code.
        Preempted: a signal asked to stop, and the ranks have saved and stopped.
    """
    stop = Forwarding(ends_process)
    start_until_done(_Alone(nproc, max_restarts, stop), arguments, nproc, main, stop)


class _Alone:
    """The launcher of one node, which does not meet others."""

    first = 0

    def __init__(self, nproc: int, max_restarts: int, stop: Forwarding) -> None:
        self.nproc, self.max_restarts, self.stop = nproc, max_restarts, stop
        if debugging.RANK in os.environ:
            self.max_restarts = 0
        self.history = StartHistory()

    def meet(self, number: int) -> Start:
        self.stop.check()
        return on_one_node(self.nproc)

    def agree(self, number: int, ending: Ending | None) -> Decision:
        assert ending is not None
        decision = decide(ending, self.history, self.max_restarts)
        self.history = decision.history
        return decision


def start_until_done(
    launchers: Launchers,
    arguments: Sequence[str],
    nproc: int,
    main: Callable[[Sequence[str]], None],
    stop: Forwarding,
) -> None:
    """Start the ranks of this node repeatedly, until the training is done, fails or stops.

    Each start is one run of torch's agent without its restarts. The agent would also restart ranks that stopped on
    request, and would restart ranks that fail at the same step forever.

    Raises:
        RankError: a rank failed.
        Preempted: a node was asked to stop.
    """
    for number in itertools.count(launchers.first):
        start = launchers.meet(number)
        os.environ[RESTARTS] = str(number)
        decision = launchers.agree(number, None if start is None else _run_once(start, arguments, nproc, main, stop))
        if decision.action is Action.DONE:
            return
        if decision.action is Action.STOP:
            raise Preempted(decision.text)
        if decision.error is not None:
            raise decision.error
        os.environ[INTERRUPTED] = str(int(not decision.differs))
        print(decision.text, file=sys.stderr, flush=True)


def _run_once(
    start: Start, arguments: Sequence[str], nproc: int, main: Callable[[Sequence[str]], None], stop: Forwarding
) -> Ending:
    """Start the ranks of this node, and wait for their end."""
    with folder_of(nproc) as stop.folder:
        from lockstep.launch import agent, left_behind  # import torch; a signal finds the folder

        _quiet_torch()
        os.environ[FOLDER] = str(stop.folder)
        failures = agent.run_ranks(main, (list(arguments),), nproc=nproc, folder=stop.folder, start=start)
        step = max((rank.step for rank in heartbeat.all_in(stop.folder)), default=-1)
        left_behind.keep_notes(stop.folder)
    gone = warm_process.how_it_ended() if failures else None
    return Ending(rank_failures(failures), step, asked=stop.asked, warm_process=gone or "")


def rank_failures(failures: Mapping[int, ProcessFailure]) -> tuple[RankFailure, ...]:
    """The failures that torch's agent names, with what the ranks reported."""
    return tuple(
        RankFailure(rank, failure.exitcode, int(failure.timestamp), _report_of(failure))
        for rank, failure in failures.items()
    )


def _report_of(failure: ProcessFailure) -> dict[str, Any]:
    """The report that a rank wrote with `launched.report_failure`; empty if it wrote none."""
    message = failure.error_file_data.get("message", {})
    return {"text": message.get("message"), **message.get("extraInfo", {})} if isinstance(message, dict) else {}


def _quiet_torch() -> None:
    """Silence torch's agent: the launcher itself reports which rank failed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class Forwarding:
    """Passes a request to stop on to the ranks, as SIGUSR1, and waits for them. A second request ends them immediately.

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
        """True if a request waits for the ranks, which start soon. Otherwise it raises Preempted if no rank runs."""
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
            raise Preempted.before_training(self.asked_by)

    def check(self) -> None:
        """Raises Preempted if this process was asked to stop. Call it between two starts."""
        if self.asked:
            raise Preempted("stopped between two starts; the checkpoints are kept")

    def pass_on(self, name: str) -> None:
        """Ask the ranks to stop, for a reason with this name. Does nothing if they were asked before."""
        if self.folder is not None and self._passed_on != self.folder:
            self._passed_on = self.folder
            self._tell_ranks(name)

    def _tell_ranks(self, name: str) -> None:
        assert self.folder is not None
        with contextlib.suppress(OSError):  # between two starts, `check` reads `asked`; the ranks get a signal
            write(self.folder / STOP_FILE, name.encode())
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
