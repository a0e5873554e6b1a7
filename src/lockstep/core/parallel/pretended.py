"""A process group without any communication, to see what a task's own code asks of other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[bool]:
    """Inside, this process is rank `rank` of `size` ranks. Collectives return at once, with this rank's own numbers.

    Yields:
        Whether this is so. It is not if a process group exists already, or if torch has no such group.
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
