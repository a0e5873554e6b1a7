"""Worker processes that have imported torch, and run one function after the other in worlds of any size.

A verification runs dozens of trainings. So these processes stay, and get the environment variables of a rank from here
instead of from torch's elastic agent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lockstep.core import shortages
from lockstep.launch import warm_process

_TIMEOUT_S = 1800.0  # of one function on all ranks
# For the other ranks after one rank failed. A rank that waits in a collective usually notices the failure sooner.
_TIMEOUT_AFTER_FAILURE_S = 30.0
_ENDS_S = 10.0  # for a process that ends by itself, with its GPU


class Workers:
    """As many processes as the largest world so far. `close` ends them.

    Args:
        log: the file for everything that the processes print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: Path | None = None
        self._runs = itertools.count()

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = _TIMEOUT_S
    ) -> list[Any]:
        """Call `function(*arguments)` on ranks 0 to `world` - 1 of a world of that size.

        A process whose GPU has reported an error ends after its answer, because it can no longer use the GPU. A new
        process replaces it in the next call.

        The call ends within `timeout_s`. After a rank has failed, the other ranks get 30 s more.

        Returns:
            In rank order, what the function returned. A returned object whose attribute `error` is set counts as a
            failure of its rank. A `WorkerEnded` represents a process that ended or was killed.
        """
        self._start(world)
        self._send(world, function, arguments)
        answers: dict[int, Any] = {}
        deadline, reason = time.monotonic() + timeout_s, f"gave no answer within {timeout_s:g} s"
        while len(answers) < world:
            waiting = {self._workers[rank][1]: rank for rank in range(world) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= {rank: self._kill(rank, reason) for rank in waiting.values()}
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                failed = isinstance(answers[rank], WorkerEnded) or getattr(answers[rank], "error", None)
                sooner = time.monotonic() + _TIMEOUT_AFTER_FAILURE_S
                if failed and sooner < deadline:
                    deadline = sooner
                    reason = f"still ran {_TIMEOUT_AFTER_FAILURE_S:g} s after rank {rank} had failed"
        return [answers[rank] for rank in range(world)]

    def _send(self, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Give each rank the function and its environment variables."""
        assert self._folder is not None
        # A new store file for each world: no port that another program may take, no entries of an earlier world.
        store = self._folder / f"world-{next(self._runs)}"
        # cuBLAS reads its variable when it starts, perhaps long before a training that must be deterministic.
        exact = {} if "CUBLAS_WORKSPACE_CONFIG" in os.environ else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        shared = exact | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "LOCKSTEP_STORE": str(store)}
        for rank in range(world):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with contextlib.suppress(OSError):  # the process is gone, which `_receive` detects
                self._workers[rank][1].send((environment, function, arguments))

    def _receive(self, rank: int) -> Any:
        """The answer of a rank, or a `WorkerEnded` if its connection is closed."""
        process, connection = self._workers[rank]
        try:
            ends, answer = pickle.loads(connection.recv_bytes())
            if ends:
                process.join(_ENDS_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            return answer
        except (EOFError, OSError):
            process.join(_ENDS_S)
            if process.is_alive():
                return self._kill(rank, "closed its connection")
            return WorkerEnded(rank, process.exitcode)

    def _kill(self, rank: int, reason: str) -> WorkerEnded:
        process = self._workers[rank][0]
        process.kill()
        process.join()
        return WorkerEnded(rank, process.exitcode, reason)

    def _start(self, count: int) -> None:
        """Start processes until `count` are alive. Processes that ended are replaced."""
        if self._folder is None:
            self._folder = shortages.new_temporary_folder("lockstep-ranks-")
        for place in range(count):
            if place < len(self._workers) and self._workers[place][0].is_alive():
                continue
            ours, theirs = multiprocessing.Pipe()
            process = warm_process.start_process(_serve, theirs, str(self.log), multiprocessing.get_start_method())
            theirs.close()
            self._workers[place : place + 1] = [(process, ours)]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class WorkerEnded:
    """Replaces the answer of a process that gave none.

    Args:
        exit_code: negative for a signal.
        reason: why the process was killed; empty if it ended by itself.
    """

    def __init__(self, rank: int, exit_code: int | None, reason: str = "") -> None:
        self.rank, self.exit_code, self.reason = rank, exit_code, reason

    def __str__(self) -> str:
        if self.reason:
            return f"rank {self.rank} {self.reason}"
        return f"the process of rank {self.rank} ended with exit code {self.exit_code}"


def _serve(connection: Connection, log: str, start_method: str) -> None:
    """The main function of a worker process. Loader workers start here as in the user's own processes."""
    multiprocessing.set_start_method(start_method, force=True)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, even with PYTHONUNBUFFERED: the lines of two ranks would mix.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    import torch

    from lockstep.core import devices
    from lockstep.core.parallel import device_errors, rendezvous

    if not devices.gpus():
        torch.set_num_threads(1)  # ranks that each use all cores slow each other down
    frozen_modules = 0
    while True:
        if len(sys.modules) != frozen_modules:
            # Every world collects garbage, which takes long if all of torch is scanned.
            gc.collect()
            gc.freeze()
            frozen_modules = len(sys.modules)
        try:
            environment, function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        os.environ.update(environment)
        rendezvous.forget_stores()
        try:
            answer = function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        # Plain pickle: multiprocessing's pickler would share tensors through file handles.
        ends = device_errors.has_lost_device()
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps((ends, answer)))
        if ends:
            connection.close()
            os._exit(1)  # an ordinary exit may wait for the GPU
