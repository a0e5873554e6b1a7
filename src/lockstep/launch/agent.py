"""Torch's elastic agent for this machine: it starts ranks, waits for them, and reports how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.launched import write_report
from lockstep.launch import left_behind, warm_process
from lockstep.launch.rank_output import RankOutput, call_with_stderr
from lockstep.launch.start import Start

_LOOK_EVERY_S = 0.5  # the longest time between two iterations of the base class's loop
_REPORT_S = 0.1  # for ranks that another rank's error ends; they may know more about its cause
_LOOK_AGAIN_S = 0.01
_ENDS_S = 30.0  # from a kill, or from when a process closes its files, to its end
_UNKNOWN = 255  # the exit code in `multiprocessing` of a process whose fork server is gone
_END_S = 2.0  # after ranks of another node have failed
_SAVE_S = 30  # between SIGTERM and SIGKILL
_QUOTED_LINES = 12
_TOO_EARLY = "it ended with exit code 0 before the command ended, as after os._exit(0) in the task or a library"
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals with which a process ends itself. It may have given the reason on stderr."""


class Known(RendezvousHandler):
    """The rendezvous of an agent whose launcher runs alone, or has met the others."""

    def __init__(self, start: Start) -> None:
        self.start, self.closed = start, False

    def get_backend(self) -> str:
        return "known"

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.start.address, self.start.port)
        return RendezvousInfo(HashStore(), self.start.rank, len(self.start.sizes), place)

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.start.run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class RankAgent(SimpleElasticAgent):
    """Starts the ranks of this machine as processes of `lockstep.launch.warm_process`.

    The base class does the rendezvous, and numbers the ranks. Torch's `LocalElasticAgent` reports only the first
    failure of forked processes; this agent reports the failures of all ranks of this machine.

    Args:
        spec: `entrypoint` is a picklable function. A rank calls it with `spec.args`.
        folder: a directory for the reports of ranks that fail.
    """

    def __init__(self, spec: WorkerSpec, folder: Path, start: Start) -> None:
        super().__init__(spec)
        self.folder, self.start = folder, start
        self.processes: dict[int, BaseProcess] = {}
        """The processes of this machine by global rank."""
        self.output = RankOutput()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert callable(spec.entrypoint)
        self.processes = {}
        for worker in worker_group.workers:
            variables, rank = self._variables(worker_group, worker), worker.global_rank
            with self.output.writer(rank) as writer:
                self.processes[rank] = warm_process.start_process(
                    call_with_stderr, writer, spec.entrypoint, *spec.args, **variables
                )
        self.output.start()
        return {worker.local_rank: self.processes[worker.global_rank].pid for worker in worker_group.workers}

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = sum(self.start.sizes[:group_rank]), sum(self.start.sizes)
        return [
            Worker(local_rank=place, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for place, rank in enumerate(range(first, first + spec.local_world_size))
        ]

    def _exit_barrier(self) -> None:
        """The launchers of several nodes wait for each other themselves."""

    def _variables(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """The environment variables of a rank, with torch's names."""
        spec = group.spec
        values: dict[str, object] = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_NAME": spec.role,
            "ROLE_RANK": worker.role_rank,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCHELASTIC_ERROR_FILE": self._report(worker.global_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        return {name: str(value) for name, value in values.items()}

    def _report(self, rank: int) -> Path:
        return self.folder / f"error-{rank}.json"

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait(_LOOK_EVERY_S)
        if self._must_end():
            self._end_because_of_another_node()
        silent = self._ended_too_early()
        if not silent and not any(process.exitcode for process in self.processes.values()):
            done = all(process.exitcode == 0 for process in self.processes.values())
            values = dict.fromkeys(self.processes) if done else {}
            return RunResult(state=WorkerState.SUCCEEDED if done else WorkerState.HEALTHY, return_values=values)
        if self._warm_process_is_gone():
            self._kill_orphans()
        if all((process.exitcode or 0) >= 0 for process in self.processes.values()):  # no rank was killed
            self._wait_for_all(_REPORT_S)
        self._shutdown()
        self.output.close()
        for rank in silent:
            if not self._report(rank).exists():
                self._write_report(rank, _TOO_EARLY, from_outside=False)
        for rank, process in self.processes.items():
            if process.exitcode in [-number for number in _OWN_SIGNALS]:
                self._keep_last_lines(rank)
        failures = {
            rank: ProcessFailure(
                local_rank=worker_group.workers[place].local_rank,
                pid=process.pid or 0,
                exitcode=process.exitcode or 0,
                error_file=str(self._report(rank)),
            )
            for place, (rank, process) in enumerate(self.processes.items())
            if process.exitcode or rank in silent
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _ended_too_early(self) -> list[int]:
        """The ranks with exit code 0 that did not reach the end of their main function."""
        ended = [rank for rank, process in self.processes.items() if process.exitcode == 0]
        return [rank for rank in ended if not heartbeat.has_ended(self.folder, rank)]

    def _must_end(self) -> bool:
        """True if the ranks of another node have failed."""
        try:
            return self.start.look()
        except BaseException:
            self._kill()  # the ranks could neither agree nor save
            raise

    def _end_because_of_another_node(self) -> None:
        """Give the ranks a moment to find and report the cause themselves, and kill them."""
        self._wait_for_all(_END_S)
        for rank in self._kill():
            if not self._report(rank).exists():
                self._write_report(rank, stopped=True)

    def _kill(self) -> list[int]:
        """Kill the running ranks, and return them."""
        left = [rank for rank, process in self.processes.items() if process.exitcode is None]
        self._shutdown(signal.SIGKILL)
        return left

    def _keep_last_lines(self, rank: int) -> None:
        """Store the last lines of a rank's stderr as its report, if it left none."""
        lines, report = self.output.tails[rank].last(_QUOTED_LINES), self._report(rank)
        if lines and not report.exists():
            self._write_report(rank, last_lines=lines)

    def _write_report(self, rank: int, text: str = "", **more: Any) -> None:
        with contextlib.suppress(OSError):  # the disk is full; the exit code is left
            write_report(self._report(rank), text, **more)

    def _warm_process_is_gone(self) -> bool:
        """True if the warm process has ended. Ranks whose exit codes are unknown show it first."""
        deadline = time.monotonic() + _ENDS_S
        while warm_process.how_it_ended() is None:
            unknown = any(process.exitcode == _UNKNOWN for process in self.processes.values())
            if not unknown or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)
        return True

    def _kill_orphans(self) -> None:
        """End the ranks whose exit codes can no longer be known, because the warm process has ended.

        They would soon end by themselves, but the next ranks may need their devices immediately.
        """
        left = [process.pid for process in self.processes.values() if process.pid]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _SAVE_S
        while any(heartbeat.is_alive(pid) for pid in left) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)

    def _wait(self, timeout_s: float) -> None:
        """Wait until another process has ended."""
        connection.wait(self._running(), timeout_s)

    def _wait_for_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running() and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())

    def _running(self) -> Sequence[int]:
        return [process.sentinel for process in self.processes.values() if process.exitcode is None]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _SAVE_S) -> None:
        """Send `death_sig` to the running ranks, and SIGKILL to those that still run after `timeout` seconds.

        If a rank has failed, also end the processes that ranks have left behind.
        """
        for number in (death_sig, signal.SIGKILL):
            for process in self.processes.values():
                if process.exitcode is None and process.pid:
                    with contextlib.suppress(ProcessLookupError):  # it has ended by now
                        os.kill(process.pid, number)
            self._wait_for_all(timeout)
        if any(process.exitcode for process in self.processes.values()):  # others may replace them
            left_behind.end_sessions({process.pid for process in self.processes.values() if process.pid}, _ENDS_S)


def run_ranks(
    entrypoint: Any, arguments: tuple[Any, ...], *, nproc: int, folder: Path, start: Start
) -> dict[int, ProcessFailure]:
    """Start `nproc` ranks on this machine that call `entrypoint(*arguments)`, and wait for their end.

    Args:
        folder: a directory for the reports of ranks that fail, and for the heartbeats (`launched.FOLDER`).

    Returns:
        the failures by rank; empty if all ranks ended without error.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=entrypoint,
        args=arguments,
        rdzv_handler=Known(start),
        max_restarts=0,  # the launcher decides about restarts
        monitor_interval=0.001,  # `RankAgent` itself waits for a process to end
    )
    agent = RankAgent(spec, folder, start)
    try:
        result: RunResult = agent.run()
    finally:
        agent.output.close()
    return result.failures
