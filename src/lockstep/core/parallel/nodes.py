"""The nodes of ranks, and groups in which the ranks of a node pass on what one of them has read."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.errors import LockstepError, number_of
from lockstep.core.parallel.heartbeat import Heartbeat

NODE = "LOCKSTEP_NODE"
"""Environment variable: the name of this node in messages. Default: the host name."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHOWN = 4  # this many single ranks are named
_PIECE_BYTES = 1 << 26  # of one broadcast: a rank that receives a large tensor shows signs of life in between


def own_name() -> str:
    """The name of the node of this process."""
    return os.environ.get(NODE) or socket.gethostname()


def own_key() -> str:
    """A text that all processes of this node share, and no process of a different node has.

    Two machines may have the same host name, as containers do, but each start of a system has its own id.
    """
    with contextlib.suppress(OSError):
        return f"{own_name()} {_BOOT.read_text().strip()}"
    return own_name()


@dataclass(frozen=True)
class Nodes:
    """The node of each rank."""

    keys: tuple[str, ...]
    """By rank: what the ranks of a node have in common."""
    names: tuple[str, ...]
    """By rank: the name of its node, for messages. Two nodes may have the same name."""
    devices: tuple[str, ...]
    """By rank: the device on which it computes, for messages."""

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(set(self.keys))

    def ranks_with(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`, in order, with `rank` itself."""
        return [other for other, key in enumerate(self.keys) if key == self.keys[rank]]

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each node, in order."""
        return [rank for rank, key in enumerate(self.keys) if self.keys.index(key) == rank]

    def describe(self, ranks: Sequence[int]) -> str:
        """Some ranks with their nodes and devices: `rank 3 (node b, cuda:1)`, `all 8 ranks of node b`, or a list."""
        if len(ranks) == 1:
            return f"rank {ranks[0]} (node {self.names[ranks[0]]}, {self.devices[ranks[0]]})"
        left, texts = list(ranks), []
        for first in self.first_ranks if self.count > 1 else ():
            of_node = self.ranks_with(first)
            if len(of_node) > 1 and set(of_node) <= set(left):
                texts.append(f"all {len(of_node)} ranks of node {self.names[first]}")
                left = [rank for rank in left if rank not in of_node]
        texts += [self.describe([rank]) for rank in left[:_SHOWN]]
        more = [number_of(len(left) - _SHOWN, "more rank")] if len(left) > _SHOWN else []
        return ", ".join([*texts, *more])


class NodeGroup:
    """The ranks of this node; one of them reads for all."""

    def __init__(self, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None, heartbeat: Heartbeat) -> None:
        self.ranks, self.rank, self.group, self.heartbeat = list(ranks), rank, group, heartbeat

    @property
    def reads(self) -> bool:
        """True if this rank is the one that reads."""
        return self.rank == self.ranks[0]

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank of the node, on all of them. Any picklable object."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def pass_on(self, size: int, read: Callable[[memoryview], None]) -> memoryview:
        """`size` bytes that one rank reads, on all ranks of the node.

        Args:
            read: fills a buffer of `size` bytes. It is called on one rank.

        Raises:
            LockstepError: on all ranks of the node, if `read` raises it.
        """
        buffer = torch.empty(size, dtype=torch.uint8)
        view = memoryview(buffer.numpy().data)
        fault: LockstepError | None = None
        if self.reads:
            try:
                read(view)
            except LockstepError as error:
                fault = error
        failed = torch.tensor([int(fault is not None)])
        dist.broadcast(failed, self.ranks[0], group=self.group)
        if int(failed):
            box = [fault]
            dist.broadcast_object_list(box, self.ranks[0], group=self.group)
            assert box[0] is not None
            raise box[0]
        for piece in torch.split(buffer, _PIECE_BYTES) if size else ():
            dist.broadcast(piece, self.ranks[0], group=self.group)
            self.heartbeat.beats += 1
        return view


def group_of(nodes: Nodes, rank: int, heartbeat: Heartbeat) -> NodeGroup | None:
    """The ranks that share this rank's node. None: this rank has its node to itself. A collective."""
    ranks = nodes.ranks_with(rank)
    if len(ranks) == 1:
        return None
    group = None
    if len(ranks) < len(nodes.keys):
        group = dist.new_group(
            ranks, backend="gloo", timeout=datetime.timedelta(days=1), use_local_synchronization=True
        )
    return NodeGroup(ranks, rank, group, heartbeat)
