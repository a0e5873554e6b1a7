"""Virtual ranks: which of them a rank computes, and the one order in which their results are added.

Addition is not associative, so a sum over virtual ranks has the same bits only if its order is fixed. The order is a
balanced binary tree over the numbers of the virtual ranks. A node (first, size) is the sum over the virtual ranks
`first` to `first + size - 1`: `size` is a power of two, and `first` a multiple of it. A node whose right half has no
virtual rank is its left half.

Virtual ranks are called logical workers in EasyScale (Li et al., SC 2023, arXiv:2208.14228) and virtual nodes in
VirtualFlow (Or et al., MLSys 2022, arXiv:2009.09523).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def held(rank: int, ranks: int, count: int) -> range:
    """The virtual ranks that a rank computes, of `count`: neighbours, and as many on each rank, up to one."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


@dataclass(frozen=True)
class Node(Generic[T]):
    """The sum of the values of `size` virtual ranks from `first` on."""

    first: int
    size: int
    value: T


@dataclass
class Tree(Generic[T]):
    """Adds up the values of virtual ranks, which come in ascending order, in the order of the tree.

    It keeps a value for each node that still lacks its other half: at most log2(count) + 1 at a time.
    """

    count: int
    """Number of virtual ranks."""
    add: Callable[[T, T], T]
    """The sum of two values. It may use the memory of the first."""
    nodes: list[Node[T]] = field(default_factory=list)
    """The largest complete nodes so far."""

    def push(self, node: Node[T]) -> None:
        """Add a node, which begins where the last one ends."""
        first, size, value = node.first, node.size, node.value
        while size < self.count:
            is_right = first // size % 2 == 1
            if is_right and self.nodes and self.nodes[-1].first == first - size:
                value = self.add(self.nodes.pop().value, value)
                first -= size
            elif is_right or first + size < self.count:  # the other half is on another rank, or follows
                break
            size *= 2
        self.nodes.append(Node(first, size, value))

    def total(self) -> T:
        """The sum of all virtual ranks, which have all been added."""
        (root,) = self.nodes
        return root.value


def nodes_of(numbers: range, count: int) -> list[Node[None]]:
    """The nodes that a rank with these virtual ranks has when it has computed them all, without values."""
    tree: Tree[None] = Tree(count, lambda left, right: None)
    for number in numbers:
        tree.push(Node(number, 1, None))
    return tree.nodes
