"""The latency and throughput of the network between the nodes of a run."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core import devices
from lockstep.core.errors import RankError
from lockstep.core.parallel.world import World

_PATIENCE = datetime.timedelta(seconds=20)  # for the answer of another node
_SMALL, _LARGE = 1 << 16, 1 << 22  # bytes
_LARGE_S = 1.0  # the large message is sent if it would take less time than this
_TRIES, _QUICK_S = 3, 0.05  # a message that takes less time is repeated


@dataclass(frozen=True)
class Link:
    """The connection of two ranks of different nodes, in host memory (gloo)."""

    ranks: tuple[int, int]
    latency_s: float
    """Half the time of a small message there and back."""
    bytes_per_s: float


@dataclass(frozen=True)
class Sum:
    """The sum over all ranks, on their devices."""

    latency_s: float
    """Of a sum of 8 bytes."""
    bytes_per_s: float
    """2 (n - 1) / n times the bytes of the sum, divided by its time: comparable for all numbers n of ranks."""


def sum_over_ranks(world: World) -> Sum:
    """Measure sums over all ranks. A collective; rank 0's figures are those of all ranks."""
    tensor = torch.zeros(_LARGE // 4, device=world.device)
    device = devices.of(world.device)

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        dist.all_reduce(tensor[: size // 4])
        device.synchronize()
        return time.perf_counter() - begun

    seconds(8)  # connects
    tries = _TRIES if world.broadcast(seconds(8)) < _QUICK_S else 1
    latency_s = min(seconds(8) for _ in range(tries))
    size = _SMALL
    taken_s = min(seconds(size) for _ in range(tries))
    if world.broadcast(taken_s) * _LARGE / size < _LARGE_S:
        size = _LARGE
        taken_s = min(seconds(size) for _ in range(tries))
    found: Sum = world.broadcast(Sum(latency_s, 2 * (world.size - 1) / world.size * size / max(taken_s, 1e-9)))
    return found


def between_nodes(world: World) -> list[Link]:
    """Measure the connections between neighbouring nodes, in a ring, by their first ranks. A collective.

    Returns:
        the connections, on every rank.

    Raises:
        RankError: another node does not answer.
    """
    ranks = world.nodes.first_ranks
    count = len(ranks)
    pairs = [(ranks[place], ranks[(place + 1) % count]) for place in range(count if count > 2 else count - 1)]
    # Pairs of the same round have no rank in common. An odd ring needs a third round.
    rounds = [pairs[0::2], pairs[1::2]] if count % 2 == 0 or count < 3 else [pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]]
    found: list[Link] = []
    for together in rounds:
        for first, second in together:
            if world.rank == first:
                found.append(_measured(world, second))
            elif world.rank == second:
                _answer(world, first)
        world.all_sum([0.0])
    gathered: list[list[Link]] = world.broadcast(world.gather(found))
    return [link for of_rank in gathered for link in of_rank]


def _measured(world: World, other: int) -> Link:
    """Send messages to `other`, which sends them back."""

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        _send(torch.tensor([size]), world, other)
        if size:
            content = torch.zeros(size, dtype=torch.uint8)
            _send(content, world, other)
            _receive(content, world, other)
        return time.perf_counter() - begun

    seconds(8)  # connects
    tries = _TRIES if seconds(8) < _QUICK_S else 1
    latency_s = min(seconds(8) for _ in range(tries)) / 2
    size = _SMALL
    taken_s = min(seconds(size) for _ in range(tries))
    if taken_s * _LARGE / size < _LARGE_S:
        size = _LARGE
        taken_s = min(seconds(size) for _ in range(tries))
    seconds(0)
    return Link((world.rank, other), latency_s, 2 * size / max(taken_s - 2 * latency_s, 1e-9))


def _answer(world: World, other: int) -> None:
    """Send each message of `other` back, until it announces an empty message."""
    size = torch.tensor([1])
    while True:
        _receive(size, world, other)
        if not int(size):
            return
        content = torch.zeros(int(size), dtype=torch.uint8)
        _receive(content, world, other)
        _send(content, world, other)


def _send(tensor: Tensor, world: World, other: int) -> None:
    _within(lambda: dist.isend(tensor, other), world, other)


def _receive(tensor: Tensor, world: World, other: int) -> None:
    _within(lambda: dist.irecv(tensor, other), world, other)


def _within(begin: Callable[[], dist.Work | None], world: World, other: int) -> None:
    try:
        work = begin()
        assert work is not None
        work.wait(_PATIENCE)
    except RuntimeError as error:
        names = world.nodes.names
        raise RankError(
            f"no answer from node {names[other]} to node {names[world.rank]} within "
            f"{_PATIENCE.total_seconds():g} s: {str(error).splitlines()[0]}",
            where=f"link between rank {world.rank} and rank {other}",
            remedy="check the network between these nodes, firewalls, and GLOO_SOCKET_IFNAME",
        ) from error
