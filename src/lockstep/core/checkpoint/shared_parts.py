"""Reads once per node: one rank reads the parts of a checkpoint that several ranks of the node want, and sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.core.parallel.nodes import NodeGroup

FilePart = Mapping[str, Any]
"""A part of a tensor in a file; see `files.Index`."""
Place = tuple[str, int]
_TOGETHER_BYTES = 1 << 23  # small parts travel together; 8 MiB take a few milliseconds


def place(part: FilePart) -> Place:
    """The place of a part: the file, and the offset in bytes."""
    return part["file"], part["offset"]


class SharedParts:
    """The parts of a checkpoint that several ranks of this node want.

    Each of these ranks takes the parts that it wants in the order of the index. The bytes come in pieces of up to
    8 MiB, or of a single larger part. Every rank of the node receives every piece, and keeps what it wants until it has
    taken it.

    Args:
        read: reads the bytes of a part into a buffer. It is called on one rank of the node.
        index: the places of all tensors; see `files.Index`.
        wanted: the parts that this rank wants, by the names of the tensors.
        node: the ranks of this node. None: nothing is shared.
    """

    def __init__(
        self,
        read: Callable[[FilePart, memoryview], None],
        index: Mapping[str, Mapping[str, Any]],
        wanted: Mapping[str, Sequence[FilePart]],
        node: NodeGroup | None,
    ) -> None:
        self.read, self.node = read, node
        self.own = {place(part) for parts in wanted.values() for part in parts}
        ranks = Counter(found for rank in (node.gather(self.own) if node else ()) for found in rank)
        tensors = sorted(index.values(), key=lambda entry: place(entry["parts"][0]))
        self.left = [part for entry in tensors for part in entry["parts"] if ranks[place(part)] > 1][::-1]
        self.shared = {place(part) for part in self.left}
        self.held: dict[Place, memoryview] = {}

    def take(self, part: FilePart) -> memoryview | None:
        """The bytes of a part that this rank wants. None: no other rank of the node wants it."""
        if place(part) not in self.shared:
            return None
        while place(part) not in self.held:
            self._receive()
        return self.held.pop(place(part))

    def finish(self) -> None:
        """Receive what only other ranks of the node still want."""
        while self.left:
            self._receive()

    def _receive(self) -> None:
        assert self.node is not None
        parts = [self.left.pop()]
        size = parts[0]["length"]
        while self.left and size + self.left[-1]["length"] <= _TOGETHER_BYTES:
            parts.append(self.left.pop())
            size += parts[-1]["length"]

        def read(buffer: memoryview) -> None:
            at = 0
            for part in parts:
                self.read(part, buffer[at : at + part["length"]])
                at += part["length"]

        content, at = self.node.pass_on(size, read), 0
        for part in parts:
            if place(part) in self.own:
                self.held[place(part)] = content[at : at + part["length"]]
            at += part["length"]
