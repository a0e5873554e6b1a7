"""What all formats share: a shard is split into blocks of samples, and each block is read at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import DataError
from lockstep_recipes.shards.places import ShardLocation

BLOCK = 1 << 22
"""The minimum number of bytes of a shard to read at once. Blocks end where a sample ends."""
Read = Callable[[int, int], bytes]


@dataclass
class Counted:
    """The samples of a shard by block."""

    ends: list[int] = field(default_factory=list)
    """Number of samples of the shard up to the end of each block."""
    begins: list[int] = field(default_factory=list)
    """First byte of each block."""
    stops: list[int] = field(default_factory=list)
    """The byte after each block."""

    @property
    def samples(self) -> int:
        """The number of samples in the shard."""
        return self.ends[-1] if self.ends else 0

    def add(self, samples: int, begin: int, stop: int) -> None:
        """Add samples that follow the others. They join the last block while it is small."""
        if not samples:
            return
        if self.stops and self.stops[-1] - self.begins[-1] < BLOCK:
            self.ends[-1], self.stops[-1] = self.ends[-1] + samples, stop
        else:
            self.add_block(samples, begin, stop)

    def add_block(self, samples: int, begin: int, stop: int) -> None:
        """Add a block that follows the others."""
        self.ends.append(self.samples + samples)
        self.begins.append(begin)
        self.stops.append(stop)


class SampleBlock(Protocol):
    """Samples that were read together. Each call makes a new sample, which the caller may change."""

    nbytes: int
    """Bytes that the block takes in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class ShardFormat(Protocol):
    """A format of shards."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of shards, in lower case."""
        ...

    def count(self, file: BinaryIO, place: ShardLocation) -> Counted:
        """Count the samples of a shard.

        Raises:
            DataError: the shard is damaged, or cannot be read by block.
        """
        ...

    def head(self, read: Read, place: ShardLocation, counted: Counted) -> tuple[Any, int]:
        """What is read once for all blocks of a shard, and its size in bytes."""
        ...

    def block(self, data: bytes, head: Any, place: ShardLocation, number: int) -> SampleBlock:
        """The samples in the bytes of a block.

        Args:
            number: the number of the block in its shard.
        """
        ...


def no_head(read: Read, place: ShardLocation, counted: Counted) -> tuple[Any, int]:
    """For formats whose blocks need nothing else."""
    return None, 0


def damaged(what: str, place: ShardLocation, at: str = "") -> DataError:
    """The error for a shard that cannot be used."""
    return DataError(what, where=f"{place.url}{at}", remedy="copy or write the shard again")


Offsets = npt.NDArray[np.int64]
