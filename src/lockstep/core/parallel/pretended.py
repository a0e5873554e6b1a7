"""A process group without any communication, to see what a task's own code asks of other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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


@contextlib.contextmanager
def noted_calls(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, `note` gets the name of each function of torch that is asked for the rank, or the number of ranks."""
    calls: dict[str, Callable[..., int]] = {"get_rank": dist.get_rank, "get_world_size": dist.get_world_size}

    def noting(name: str) -> Callable[..., int]:
        def called(*arguments: Any, **options: Any) -> int:
            note(f"{name}()")
            return calls[name](*arguments, **options)

        return called

    for name in calls:
        setattr(dist, name, noting(name))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)
