"""What a task's own code hears of its rank: that of another, or one in a group that communicates with nobody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[bool]:
    """Inside, this process is rank `rank` of `size` ranks. Collectives return at once, with this rank's own numbers.

    Yields:
        Whether this is so. It is not where a process group exists already, or where torch has no such group.
    """
    if not dist.is_available() or dist.is_initialized():
        yield False
        return
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:  # it is private, and torch may move it
        yield False
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield True
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def posing_as(rank: int) -> Iterator[None]:
    """Inside, code that asks for its rank (RANK, `torch.distributed.get_rank`) hears `rank`. Collectives stay."""
    asked, before = dist.get_rank, {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    os.environ.update(dict.fromkeys(before, str(rank)))
    dist.get_rank = lambda group=None: rank if group is None else asked(group)
    try:
        yield
    finally:
        dist.get_rank = asked
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
