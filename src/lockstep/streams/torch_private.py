"""Private parts of torch that streams need. A test uses them, and fails if they change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def outside_workers() -> Iterator[None]:
    """Within this context, `torch.utils.data.get_worker_info()` is None, so an iterable does not divide its samples
    among workers."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
