"""Sums, and values for or from rank 0, over many ranks in few messages, one after another.

gloo passes a sum around a ring: 2 * (N - 1) messages, and each waits for the message before. Here pairs of ranks
exchange what they have (recursive doubling): a rank waits for log2(N) messages, and for two more if N is not a power
of two. Messages have tags: those of a background thread have a different tag from those of the main thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def exchanges(rank: int, size: int) -> list[tuple[int, bool, bool]]:
    """The messages of a rank, in order: the other rank, whether this rank sends, and whether it receives.

    The first ranks, a power of two, exchange with each other. Each of the other ranks gives its values to one of the
    first, and gets the result at the end.
    """
    first = 1 << (size.bit_length() - 1)
    if rank >= first:
        return [(rank - first, True, False), (rank - first, False, True)]
    pairs = [(rank ^ (1 << bit), True, True) for bit in range(first.bit_length() - 1)]
    more = rank + first
    return [(more, False, True), *pairs, (more, True, False)] if more < size else pairs


def combined(own: Tensor, combine: Callable[[Tensor, Tensor], Tensor], rank: int, size: int) -> Tensor:
    """The values of all ranks, combined in the same order on all of them: the same bits everywhere. A collective.

    Args:
        combine: commutative, such as `torch.add`.
    """
    for other, sends, receives in exchanges(rank, size):
        sending = dist.isend(own, other) if sends else None
        if receives:
            found = torch.empty_like(own)
            dist.recv(found, other)
        if sending is not None:
            sending.wait()
        if receives:
            own = combine(own, found) if sends or rank < other else found
    return own


def gathered(own: Tensor, rank: int, size: int, tag: int) -> list[Tensor] | None:
    """The bytes of all ranks, in rank order, on rank 0; None elsewhere.

    Args:
        own: uint8, of one dimension. Each rank may have a different number of bytes.
        tag: a number from 1 on, different for each thread. Sums have 0.
    """
    if rank:
        dist.send(torch.tensor([len(own)], device="cpu"), 0, tag=tag)
        dist.send(own, 0, tag=tag)
        return None
    lengths = _received([torch.tensor([0], device="cpu") for _ in range(1, size)], tag)
    return [own, *_received([torch.empty(int(length), dtype=torch.uint8, device="cpu") for length in lengths], tag)]


def _received(buffers: list[Tensor], tag: int) -> list[Tensor]:
    """`buffers`, with a message from each of the ranks 1, 2, ... at the same time."""
    for receiving in [dist.irecv(buffer, other, tag=tag) for other, buffer in enumerate(buffers, 1)]:
        receiving.wait()  # type: ignore[union-attr]
    return buffers


def next_ranks(rank: int, size: int) -> list[int]:
    """The ranks to which a rank passes on what rank 0 has: those that differ in one of the bits below its lowest."""
    bits = [1 << place for place in range(size.bit_length()) if not rank or 1 << place < rank & -rank]
    return [rank + bit for bit in reversed(bits) if rank + bit < size]


def passed_on(own: Tensor | None, rank: int, size: int, tag: int) -> Tensor:
    """The bytes of rank 0, on every rank, after at most log2(N) ranks have passed them on.

    Args:
        own: uint8, of one dimension; on rank 0.
        tag: as of `gathered`.
    """
    if own is None:
        before, length = rank & (rank - 1), torch.tensor([0], device="cpu")
        dist.recv(length, before, tag=tag)
        dist.recv(own := torch.empty(int(length), dtype=torch.uint8, device="cpu"), before, tag=tag)
    length = torch.tensor([len(own)], device="cpu")
    for sending in [dist.isend(part, n, tag=tag) for n in next_ranks(rank, size) for part in (length, own)]:
        sending.wait()  # type: ignore[union-attr]
    return own
