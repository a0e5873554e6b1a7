"""What this process is: a rank that a launcher has started, or another process. This is the one place that asks."""

from __future__ import annotations

import os


def is_rank() -> bool:
    """True if a launcher has started this process as a rank."""
    return "RANK" in os.environ


def rank() -> int:
    """The number of this rank over all nodes; 0 if this process is not a rank."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """The number of this rank on its node; 0 if this process is not a rank."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks() -> int:
    """Number of ranks over all nodes; 1 if this process is not a rank."""
    return int(os.environ.get("WORLD_SIZE", 1))
