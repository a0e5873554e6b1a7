"""Deterministic kernels in torch: the same bits every time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable: cuBLAS reads it when it starts. With its own workspace for each stream, it is exact."""


class NotDeterministic(Exception):
    """torch has no deterministic kernel for an operation.

    Args:
        operation: torch's name for it.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} has no deterministic implementation")
        self.operation = operation


def prepare() -> None:
    """Set the variable that cuBLAS reads when it starts."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextlib.contextmanager
def same_convolutions() -> Iterator[None]:
    """Inside, cuDNN chooses its algorithms by rules instead of measurements, so equal GPUs make equal choices.

    Without `deterministic` it would reuse its earlier measurements.
    """
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = flags


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside, torch uses only deterministic kernels, if `enabled`. Afterwards its settings are restored.

    Also call `prepare` before CUDA starts.

    Raises:
        NotDeterministic: an operation has no such kernel.
    """
    if not enabled:
        yield
        return
    prepare()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with same_convolutions():
            yield
    except RuntimeError as error:
        found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if found is not None:
            raise NotDeterministic(found[1]) from error
        if WORKSPACE in str(error):  # something else started CUDA earlier, or the variable has a different value
            raise NotDeterministic(f"cuBLAS, with {WORKSPACE}={os.environ[WORKSPACE]},") from error
        raise
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
