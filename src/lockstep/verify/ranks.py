"""Warm ranks: processes that have torch imported, and train one trial after the other in worlds of any size.

Starting a rank takes seconds, verifying takes dozens of trainings; so it does not go through torch's agent, but gives
each rank the variables that the agent would give it.
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
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("spawn")
_LONGEST_S = 1800.0  # of one run, whatever it does
_ALONE_S = (
    30.0  # how long ranks may go on without one that failed: those that wait for it in a collective hear of it sooner
)


class Ranks:
    """Up to as many processes as the largest world asked for. Close it at the end.

    Args:
        log: file that takes what ranks print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: Path | None = None
        self._runs = itertools.count()

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = _LONGEST_S
    ) -> list[Any]:
        """`function(*arguments)` on ranks 0 to `world` - 1 of a world of that size. Ends within `timeout_s`, and soon after a rank has failed.

        Returns:
            in rank order what it returned, where an answer with an `error` is that of a rank that failed; an `Ended` for a rank
            whose process ended, or was ended because it gave no answer in time.
        """
        self._start(world)
        assert self._folder is not None
        # A new file for each world: no port that another program may take, and nothing that ranks wrote before.
        meeting = self._folder / f"world-{next(self._runs)}"
        for rank in range(world):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "LOCKSTEP_STORE": meeting,
            }
            with contextlib.suppress(OSError):  # its process is gone: no answer will say so
                self._workers[rank][1].send(
                    ({name: str(value) for name, value in variables.items()}, function, arguments)
                )
        answers: dict[int, Any] = {}
        deadline, why = time.monotonic() + timeout_s, f"gave no answer within {timeout_s:g} s"
        while len(answers) < world:
            waiting = {self._workers[rank][1]: rank for rank in range(world) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= {rank: self._end(rank, why) for rank in waiting.values()}
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = answer = self._answer(rank)
                if (
                    isinstance(answer, Ended) or getattr(answer, "error", None)
                ) and time.monotonic() + _ALONE_S < deadline:
                    deadline, why = (
                        time.monotonic() + _ALONE_S,
                        f"still ran {_ALONE_S:g} s after rank {rank} had failed",
                    )
        return [answers[rank] for rank in range(world)]

    def _answer(self, rank: int) -> Any:
        """What a rank has sent; an `Ended` where it has sent nothing, and will not."""
        process, connection = self._workers[rank]
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process.join(2)
            return self._end(rank, "closed its connection") if process.is_alive() else Ended(rank, process.exitcode)

    def _end(self, rank: int, why: str = "") -> Ended:
        process = self._workers[rank][0]
        process.kill()
        process.join()
        return Ended(rank, process.exitcode, why)

    def _start(self, count: int) -> None:
        """As many living processes as `count`; those that ended are replaced."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))
        for place in range(count):
            if place < len(self._workers) and self._workers[place][0].is_alive():
                continue
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, str(self.log), multiprocessing.get_start_method()))
            process.start()
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


class Ended:
    """A rank that gave no answer. exit_code: negative for a signal. why: it was ended; empty where its process ended by itself."""

    def __init__(self, rank: int, exit_code: int | None, why: str = "") -> None:
        self.rank, self.exit_code, self.why = rank, exit_code, why

    def __str__(self) -> str:
        return (
            f"rank {self.rank} {self.why}"
            if self.why
            else f"the process of rank {self.rank} ended with exit code {self.exit_code}"
        )


def _serve(connection: Connection, log: str, start_method: str) -> None:
    """The process of a rank. Its loader workers start as they would in a process of the user's."""
    multiprocessing.set_start_method(start_method, force=True)
    os.setsid()  # Ctrl-C is for the command, which ends its ranks
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # under PYTHONUNBUFFERED lines of two ranks would mix
    import torch

    from lockstep.distributed import rendezvous

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # ranks that each take all cores slow each other down
    frozen_modules = 0
    while True:
        if len(sys.modules) != frozen_modules:
            # Every stay in a world collects garbage, which takes long where all of torch is looked through.
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
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(
                pickle.dumps(answer)
            )  # plain pickle: multiprocessing's own would share tensors by file handle
