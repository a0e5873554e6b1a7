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

_ALIGNED = 64
"""Bytes. How a kernel adds up a gradient may depend on where it begins: all begin as newly allocated tensors do."""
_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20  # the sizes of the first bucket and of the others, as in DDP


def added(left: Gradients, right: Gradients) -> Gradients:
    """The sums of the gradients of two nodes, in the memory of the left."""
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if pairs:
        ones, others = map(list, zip(*pairs, strict=True))
        torch._foreach_add_(ones, others)
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


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


class Bucket:
    """The gradients of some parameters. Ranks begin, gather and end all buckets in the same order.

    Args:
        places: of the parameters among all that train.
        parameters: of one dtype, on one device.
        count: number of virtual ranks.
    """

    def __init__(self, places: Sequence[int], parameters: Sequence[nn.Parameter], world: World, count: int) -> None:
        self.places, self.parameters, self.count = places, parameters, count
        self.used: list[bool] = []
        """For each parameter: whether a virtual rank of this rank has used it."""
        self._nodes = [nodes_of(held(rank, world.size, count), count) for rank in range(world.size)]  # of each rank
        self._ranks = world.size
        first, step = parameters[0], _ALIGNED // parameters[0].element_size()
        self._starts, end = [], 0
        for parameter in parameters:
            self._starts.append(end)
            end += -(-parameter.numel() // step) * step
        self._shard = -(-end // (world.size * step)) * step  # elements that a rank adds up
        self._whole = first.new_zeros(self._shard * world.size, requires_grad=False)
        self._work: Any = None
        self._kept: list[Tensor] = []  # the memory of the exchange

    def begin(self, nodes: Sequence[Node[Gradients]], last: int) -> None:
        """Send the gradients of this rank, and free them.

        Args:
            nodes: the sums of the virtual ranks before the last one, of all parameters.
            last: number of the last virtual rank, whose gradients the parameters have.
        """
        of_bucket = [Node(one.first, one.size, [one.value[place] for place in self.places]) for one in nodes]
        tree = Tree(self.count, added, of_bucket)
        tree.push(Node(last, 1, [parameter.grad for parameter in self.parameters]))
        self.used = [any(one.value[number] is not None for one in tree.nodes) for number in range(len(self.places))]
        wholes = [self._whole if not number else torch.zeros_like(self._whole) for number in range(len(tree.nodes))]
        for whole, node in zip(wholes, tree.nodes, strict=True):
            self._fill(whole, node.value)
        for parameter in self.parameters:
            parameter.grad = None
        sent = self._whole
        if len(wholes) > 1:  # by rank that adds up, then by node
            sent = torch.stack(wholes).view(len(wholes), self._ranks, self._shard).transpose(0, 1).contiguous().view(-1)
        received = sent.new_empty(sum(map(len, self._nodes)) * self._shard)
        size = self._shard * sent.element_size()
        self._work = dist.all_to_all_single(
            received.view(torch.uint8),  # gloo does not know every dtype
            sent.view(torch.uint8),
            [len(nodes) * size for nodes in self._nodes],
            [len(wholes) * size] * self._ranks,
            async_op=True,
        )
        self._kept = [received, sent]

    def gather(self) -> None:
        """Add up the shard of this rank, and send the sum."""
        self._work.wait()
        tree: Tree[Tensor] = Tree(self.count, lambda left, right: left.add_(right))
        nodes = [node for of_rank in self._nodes for node in of_rank]
        for node, value in zip(nodes, self._kept[0].split(self._shard), strict=True):
            tree.push(Node(node.first, node.size, value))
        total = tree.total()
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
        torch._foreach_copy_([view for view, _ in there], [one for _, one in there])

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The gradients in a tensor of this bucket, in memory as the gradients that autograd makes."""
        return [
            whole.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), start)
            for start, parameter in zip(self._starts, self.parameters, strict=True)
        ]
