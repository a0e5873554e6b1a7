"""Buckets of gradients, which ranks exchange and add up in the order of a tree; see `virtual`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.parallel.virtual import Node, Tree, held, nodes_of
from lockstep.core.parallel.world import World

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its new and its old name

Gradients = list[Tensor | None]
"""Of some parameters. None is a gradient of zeros."""

_SENT = torch.empty(0)
"""Takes the place of a gradient that was sent, whose memory is free."""
_ALIGNED = 64
"""Bytes. How a kernel adds up a gradient may depend on where it begins: all begin as newly allocated tensors do."""
_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20  # the sizes of the first bucket and of the others, as in DDP


def buckets(parameters: Sequence[nn.Parameter], world: World, count: int, most_bytes: int | None) -> list[Bucket]:
    """Buckets of parameters, the last first: the order in which a backward pass completes their gradients.

    Args:
        count: number of virtual ranks.
        most_bytes: of the gradients of a bucket. None: as DDP.
    """
    found: list[list[int]] = []
    size, kind = 0, None
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        limit = most_bytes or (_BYTES if len(found) > 1 else _FIRST_BYTES)
        if not found or size >= limit or kind != (parameter.dtype, parameter.device):
            found.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        found[-1].append(number)
        size += parameter.numel() * parameter.element_size()
    return [Bucket(numbers, [parameters[number] for number in numbers], world, count) for numbers in found]


def by_owner(wholes: Sequence[Tensor], ranks: int) -> Tensor:
    """What a rank sends: from gradients of shape (ranks * shard,), one of each node, to the shards by owner, then by
    node."""
    if len(wholes) == 1:
        return wholes[0]
    return torch.stack(list(wholes)).view(len(wholes), ranks, -1).transpose(0, 1).contiguous().view(-1)


def add_up(received: Tensor, nodes: Sequence[Sequence[Node[None]]], count: int) -> Tensor:
    """The sum of the shards that a rank received, by rank and by node, in the order of the tree. Uses their memory.

    Args:
        nodes: of each rank.
        count: number of virtual ranks.
    """
    tree: Tree[Tensor] = Tree(count, lambda left, right: left.add_(right))
    of_all = [node for of_rank in nodes for node in of_rank]
    for node, value in zip(of_all, received.chunk(len(of_all)), strict=True):
        tree.push(Node(node.first, node.size, value))
    return tree.total()


class Bucket:
    """The gradients of some parameters. Ranks begin, gather and end all buckets in the same order.

    Args:
        places: of the parameters among all that train.
        parameters: of one dtype, on one device.
        count: number of virtual ranks.
    """

    def __init__(self, places: Sequence[int], parameters: Sequence[nn.Parameter], world: World, count: int) -> None:
        self.places, self.parameters, self.count = places, parameters, count
        self.missing = len(places)
        """The parameters whose gradients are not complete in this step."""
        self._nodes = [nodes_of(held(rank, world.size, count), count) for rank in range(world.size)]  # of each rank
        self._ranks = world.size
        self._is_pair = world.size == 2 and all(len(nodes) == 1 for nodes in self._nodes)
        """There are two sums: their order does not matter, so an all-reduce does the same."""
        first, step = parameters[0], _ALIGNED // parameters[0].element_size()
        self._starts, end = [], 0
        for parameter in parameters:
            self._starts.append(end)
            end += -(-parameter.numel() // step) * step
        self._shard = max(1, -(-end // (world.size * step))) * step  # elements that a rank adds up
        self._whole = first.new_zeros(self._shard * world.size, requires_grad=False)
        self._work: Any = None
        self._received: Tensor | None = None
        self._kept: list[Tensor] = []  # the memory of the exchange

    def begin(self, nodes: Sequence[Node[Gradients]]) -> None:
        """Send the sums of this rank's virtual ranks, and free them. They have the gradients of all parameters."""
        self.missing = len(self.places)
        wholes = [self._whole if not number else torch.zeros_like(self._whole) for number in range(len(nodes))]
        for whole, node in zip(wholes, nodes, strict=True):
            self._fill(whole, [node.value[place] for place in self.places])
            for place in self.places:
                node.value[place] = None if node.value[place] is None else _SENT
        if self._is_pair:
            self._work = dist.all_reduce(self._whole, async_op=True)
            return
        sent = by_owner(wholes, self._ranks)
        if self._received is None:  # new memory at each step would take longer
            self._received = sent.new_empty(sum(map(len, self._nodes)) * self._shard)
        received = self._received
        size = self._shard * sent.element_size()
        self._work = dist.all_to_all_single(
            received.view(torch.uint8),  # gloo does not know every dtype
            sent.view(torch.uint8),
            [len(of_rank) * size for of_rank in self._nodes],
            [len(wholes) * size] * self._ranks,
            async_op=True,
        )
        self._kept = [sent]

    def gather(self) -> None:
        """Add up the shard of this rank, and send the sum."""
        if self._is_pair:
            return
        self._work.wait()
        assert self._received is not None
        total = add_up(self._received, self._nodes, self.count)
        self._kept = [total]
        self._work = _all_gather(self._whole.view(torch.uint8), total.view(torch.uint8), async_op=True)

    def end(self) -> None:
        """Give the parameters their gradients."""
        self._work.wait()
        self._kept = []
        for parameter, gradient in zip(self.parameters, self._views(self._whole), strict=True):
            parameter.grad = gradient

    def _fill(self, whole: Tensor, gradients: Gradients) -> None:
        views = self._views(whole)
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        there = [(view, one) for view, one in zip(views, gradients, strict=True) if one is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [one for _, one in there])

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The gradients in a tensor of this bucket, in memory as the gradients that autograd makes."""
        return [
            whole.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), start)
            for start, parameter in zip(self._starts, self.parameters, strict=True)
        ]
