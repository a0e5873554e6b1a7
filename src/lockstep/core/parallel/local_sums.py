"""Sums over a few ranks of one machine, over a socket between each pair of ranks.

An all-reduce of gloo wakes two more threads on each rank. Where ranks share cores, this takes 0.5 ms of a step. Here a
rank sends its numbers to every other rank, and reads theirs when it needs the sum, without further threads.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

MOST_RANKS = 8
"""Each rank sends a message to each other rank. More ranks use `tree`, or gloo."""
MOST_VALUES = 1024
"""The most values of a sum: a message fits into the buffer of a socket, so that sending never waits."""
waits_for: int | None = None
"""The rank whose numbers this process waits for, for the report of a hang."""
_ACCEPT_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group


class LocalSums:
    """The connections of a rank with all other ranks, which run on the same machine. Sums are in float64.

    Args:
        sockets: by rank.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank, self.sockets = rank, sockets
        self._last: Callable[[], list[float]] | None = None

    def begin(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Send `values` to the other ranks. The function that is returned waits for theirs, and sums in rank order.

        Raises:
            DistNetworkError: the process of another rank has ended, or it sent something else.
        """
        if self._last is not None:
            self._last()  # messages arrive in order
        message = array("d", values).tobytes()
        for rank, connection in self.sockets.items():
            try:
                connection.send(message)
            except OSError as error:
                raise _lost(rank, error) from error
        self._last = functools.cache(functools.partial(self._summed, values))
        return self._last

    def _summed(self, own: Sequence[float]) -> list[float]:
        rows = {rank: self._received(rank, len(own)) for rank in self.sockets} | {self.rank: own}
        columns = zip(*(rows[rank] for rank in sorted(rows)), strict=True)
        return [functools.reduce(operator.add, column) for column in columns]

    def _received(self, rank: int, count: int) -> Sequence[float]:
        global waits_for
        waits_for = rank
        try:
            message = self.sockets[rank].recv(8 * MOST_VALUES)
        except OSError as error:
            raise _lost(rank, error) from error
        finally:
            waits_for = None
        if len(message) != 8 * count:
            what = f"sent {len(message) // 8} values, and {count} were expected" if message else "closed its connection"
            raise dist.DistNetworkError(f"rank {rank} {what}")
        return array("d", message)

    def close(self) -> None:
        """Close the connections."""
        for connection in self.sockets.values():
            connection.close()


def _lost(rank: int, error: OSError) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"the connection to rank {rank} failed: {error}")


def connected(
    rank: int, size: int, exchange: Callable[[Any], list[Any]], timeout_s: float | None = None
) -> LocalSums | None:
    """Connect this rank with all others. A collective.

    Args:
        rank, size: of ranks that all run on this machine.
        exchange: gives the values of all ranks, in rank order, on all of them.
        timeout_s: seconds that a rank waits for another rank. None: forever.

    Returns:
        None on all ranks if two of them cannot connect.
    """
    waits_s = min(_ACCEPT_S, timeout_s or _ACCEPT_S)
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as made, contextlib.ExitStack() as listening:

        def new(stack: contextlib.ExitStack) -> socket.socket:
            found = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            found.settimeout(waits_s)
            return found

        address = None
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                listener = new(listening)
                listener.bind("")  # Linux chooses a name, which no file has
                listener.listen(size)
                address = listener.getsockname()
        places = exchange((address, os.getpid()))
        if None in (address for address, _ in places):
            return None
        with contextlib.suppress(OSError):
            for other in range(rank):  # it need not accept first
                connection = new(made)
                connection.connect(places[other][0])
                sockets[other] = connection
        if not all(exchange(len(sockets) == rank)):
            return None
        later = {process: other for other, (_, process) in enumerate(places) if other > rank}
        with contextlib.suppress(OSError, KeyError):  # a process that is none of these ranks may not take part
            while len(sockets) < size - 1:
                connection = made.enter_context(listener.accept()[0])
                sockets[later.pop(_process_of(connection))] = connection
        if not all(exchange(len(sockets) == size - 1)):
            return None
        made.pop_all()
    for connection in sockets.values():
        connection.settimeout(timeout_s)
    return LocalSums(rank, dict(sorted(sockets.items())))


def _process_of(connection: socket.socket) -> int:
    """The process at the other end, as the kernel knows it."""
    found: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return found
