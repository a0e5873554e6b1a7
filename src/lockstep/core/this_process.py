"""What this process is: a rank that a launcher has started, or a process that may start ranks. It imports no torch.

This is the one place that reads the variables of a rank, which torchrun and our own launcher set.
"""

from __future__ import annotations

import os


def is_rank() -> bool:
    """True if a launcher (ours, torchrun or another) has started this process as a rank."""
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


def local_ranks() -> int:
    """Number of ranks on this node; 1 if this process is not a rank."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_first() -> bool:
    """True if this process is rank 0, or not a rank: it prints what one process prints for all."""
    return rank() == 0


def named() -> str:
    """`rank 3`; empty if this process is not a rank."""
    return f"rank {rank()}" if is_rank() else ""
