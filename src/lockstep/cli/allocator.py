"""The settings of CUDA's allocator, which reads them from the environment when CUDA starts. This imports no torch."""

from __future__ import annotations

import os

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with settings of the allocator: the name for all GPUs, and older names."""


def use_expandable_segments(device: str) -> None:
    """Let CUDA's allocator enlarge the pieces of memory that it has, unless the environment has settings already.

    Otherwise batches of different sizes leave gaps between tensors, and a step may not fit although the gaps together
    would suffice. Call this before CUDA starts, and before a process starts from which ranks are forked.

    Args:
        device: `device` of the config.
    """
    if device not in ("cpu", "mps") and not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = "expandable_segments:True"
