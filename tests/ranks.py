"""A pool of warm ranks for the whole suite: fresh processes (not forks) that have torch imported and wait for work.

`run_ranks(world, function, *arguments)` calls `function(*arguments)` in `world` processes whose environment describes
a world as torchrun would, and returns the results in rank order. `function` must be importable (top level of a module).
A failure on any rank is raised here, with that rank's traceback; a hang ends after `timeout_s` and ends the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("spawn")


class RankFailed(AssertionError):
    pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Connection) -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            environment, function, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = (True, function(*arguments))
            connection.send_bytes(pickle.dumps(answer))  # plain pickle: multiprocessing's own would share tensors by file handle
        except BaseException as error:
            connection.send_bytes(pickle.dumps((False, (f"{type(error).__name__}: {error}", traceback.format_exc()))))


class Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def _grow(self, count: int) -> None:
        while len(self.workers) < count:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120, expect_errors: bool = False) -> list[Any]:
        self._grow(world)
        port = str(free_port())
        for rank in range(world):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.workers[rank][1].send(({key: str(value) for key, value in environment.items()}, function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < world:
            waiting = {self.workers[rank][1]: rank for rank in range(world) if rank not in answers}
            ready = wait(list(waiting), timeout=timeout_s)
            if not ready:
                self.close()
                raise RankFailed(f"ranks {sorted(waiting.values())} of {world} still run after {timeout_s} s; answers so far: {answers}")
            for connection in ready:
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = (False, ("the process died", ""))
        if any(self.workers[rank][0].exitcode is not None for rank in range(world)):
            self.close()
        failed = {rank: answer[1] for rank, answer in answers.items() if not answer[0]}
        if failed and not expect_errors:
            raise RankFailed("\n".join(f"rank {rank}: {text}\n{trace}" for rank, (text, trace) in sorted(failed.items())))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers.clear()


_pool = Pool()
run_ranks = _pool.run
close = _pool.close
