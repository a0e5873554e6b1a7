"""Sums over many ranks in few messages, one after another: pairs of ranks exchange what they have (recursive doubling).

gloo passes a sum around a ring: 2 * (N - 1) messages, each of which waits for the message before. Here a rank waits for
log2(N) messages, and for two more where N is no power of two.
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


def combined(
    own: Tensor, combine: Callable[[Tensor, Tensor], Tensor], rank: int, size: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The values of all ranks, combined in the same order on all of them: the same bits everywhere. A collective.

    Args:
        combine: commutative, such as `torch.add`.
    """
    for other, sends, receives in exchanges(rank, size):
        sending = dist.isend(own, other, group=group) if sends else None
        if receives:
            found = torch.empty_like(own)
            dist.recv(found, other, group=group)
        if sending is not None:
            sending.wait()
        if receives:
            own = combine(own, found) if sends or rank < other else found
    return own
