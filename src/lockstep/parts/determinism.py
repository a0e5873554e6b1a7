"""Kernels that give the same bits each time, as torch has them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable: cuBLAS reads it when it starts. With a workspace of its own for each stream, it is exact."""


class NotDeterministic(Exception):
    """torch has no deterministic kernel for an operation.

    Args:
        operation: as torch names it.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} has no deterministic implementation")
        self.operation = operation


def prepare() -> None:
    """Set what cuBLAS reads when it starts."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextlib.contextmanager
def same_convolutions() -> Iterator[None]:
    """Inside, cuDNN chooses its algorithms by rules and not by measurements, so equal GPUs choose alike.

    Without `deterministic` it would go on with what it has measured before.
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
    """Inside, torch uses deterministic kernels only, where `enabled`. Afterwards its settings are as before.

    Call `prepare` before CUDA starts, too.

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
        if WORKSPACE in str(error):  # CUDA was started before by somebody else, or the variable has another value
            raise NotDeterministic(f"cuBLAS, with {WORKSPACE}={os.environ[WORKSPACE]},") from error
        raise
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
