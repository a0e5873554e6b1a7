"""Warm ranks: processes that have torch imported, and train one trial after the other in worlds of any size.

Starting a rank takes seconds, verifying takes dozens of trainings; so it does not go through torch's agent, but gives
each rank the variables that the agent would give it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("spawn")


class Ranks:
    """Up to as many processes as the largest world asked for. Close it at the end.

    Args:
        log: file that takes what ranks print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._workers: list[tuple[Any, Connection]] = []
        self._ports: set[int] = set()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 1800.0) -> list[Any]:
        """`function(*arguments)` on ranks 0 to `world` - 1 of a world of that size.

        Returns:
            in rank order what it returned; an `Ended` for a rank whose process ended or that did not answer in time.
        """
        self._start(world)
        port = self._new_port()
        for rank in range(world):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self._workers[rank][1].send(({name: str(value) for name, value in variables.items()}, function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < world:
            waiting = {self._workers[rank][1]: rank for rank in range(world) if rank not in answers}
            ready = wait(list(waiting), timeout=timeout_s)
            if not ready:
                for rank in waiting.values():
                    self._workers[rank][0].kill()
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(self._workers[rank][1].recv_bytes())
                except (EOFError, OSError):
                    self._workers[rank][0].join()
                    answers[rank] = Ended(rank, self._workers[rank][0].exitcode)
        return [answers[rank] for rank in range(world)]

    def _new_port(self) -> int:
        """A free one that no world had before: a rank might still know what it meant then."""
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports:
                self._ports.add(port)
                return port

    def _start(self, count: int) -> None:
        """As many living processes as `count`; those that ended are replaced."""
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


class Ended:
    """A rank that gave no answer. exit_code: negative for a signal."""

    def __init__(self, rank: int, exit_code: int | None) -> None:
        self.rank, self.exit_code = rank, exit_code


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

    from lockstep.dist import world

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # ranks that each take all cores slow each other down
    while True:
        try:
            environment, function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        os.environ.update(environment)
        world.forget_stores()
        try:
            answer = function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(answer))  # plain pickle: multiprocessing's own would share tensors by file handle
