"""Exchanges between ranks with known results: sums, broadcasts, gathers and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.parallel.world import World

_LENGTH = 1 << 12  # elements for each rank
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64}


def _of_rank(rank: int, seed: int) -> Tensor:
    """-1, 0 and 1, so that sums over ranks are exact in all formats and orders."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randint(-1, 2, (_LENGTH,), generator=generator)


def check(world: World) -> Iterator[tuple[str, str | None]]:
    """Exchange numbers with all ranks, and compare what arrives. A collective: all ranks consume all that it yields.

    Yields:
        the name of each exchange, and what is wrong on this rank, in words; None: nothing.
    """
    kinds: dict[str, Callable[[World, torch.dtype], tuple[Tensor, Tensor]]] = {
        "sum over ranks": _sum,
        "copy to all ranks": _broadcast,
        "shares of all ranks": _all_gather,
    }
    for name, exchange in kinds.items():
        for format_, dtype in _FORMATS.items():
            found, right = exchange(world, dtype)
            yield f"{name} {format_}", _wrong(found, right)
    for distance in (1 << power for power in range((world.size - 1).bit_length())):
        other = (world.rank - distance) % world.size
        yield f"messages at distance {distance}", _message(world, distance, other)


def _sum(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tensor = _of_rank(world.rank, 1).to(world.device, dtype)
    dist.all_reduce(tensor)
    right = torch.zeros(_LENGTH, dtype=torch.int64)
    for rank in range(world.size):
        right += _of_rank(rank, 1)
    return tensor, right


def _broadcast(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    root = world.size - 1
    right = _of_rank(root, 2)
    tensor = (right if world.rank == root else torch.zeros_like(right)).to(world.device, dtype)
    dist.broadcast(tensor, root)
    return tensor, right


def _all_gather(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    own = _of_rank(world.rank, 3).to(world.device, dtype)
    tensors = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(tensors, own)
    return torch.cat(tensors), torch.cat([_of_rank(rank, 3) for rank in range(world.size)])


def _message(world: World, distance: int, other: int) -> str | None:
    """Each rank sends to the rank at a distance and receives likewise: a wrong message identifies a pair of ranks."""
    own = _of_rank(world.rank, 3 + distance).to(world.device)
    received = torch.empty_like(own)
    operations = [
        dist.P2POp(dist.isend, own, (world.rank + distance) % world.size),
        dist.P2POp(dist.irecv, received, other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    wrong = _wrong(received, _of_rank(other, 3 + distance))
    return f"from rank {other} to rank {world.rank}: {wrong}" if wrong else None


def _wrong(found: Tensor, right: Tensor) -> str | None:
    on_host = found.cpu().double()
    differing = (on_host != right).nonzero()
    if not len(differing):
        return None
    place = int(differing[0])
    return f"element {place} is {float(on_host[place])!r}, should be {int(right[place])}, {len(differing)} are wrong"
