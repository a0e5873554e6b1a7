"""A rank that acts as another rank, to see whether a task's own code behaves differently by rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def acting_as_rank(rank: int) -> Iterator[None]:
    """Inside, code that asks for its rank (RANK, `torch.distributed.get_rank`) gets `rank`. Collectives stay."""
    asked, before = dist.get_rank, {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    os.environ.update(dict.fromkeys(before, str(rank)))
    dist.get_rank = lambda group=None: rank if group is None else asked(group)
    try:
        yield
    finally:
        dist.get_rank = asked
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
