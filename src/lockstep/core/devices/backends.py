"""Switches of torch that choose how a device computes: number formats and implementations of its operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

_ATTENTION = {  # names in torch.nn.attention.SDPBackend
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}


@contextlib.contextmanager
def chosen(precision: str | None, cudnn_benchmark: bool, attention: Sequence[str] | None) -> Iterator[None]:
    """Inside, torch computes as the arguments say. Afterwards the switches are as before.

    A switch without a value stays as it is. TF32 in convolutions is off with the precision `highest`, and on with the
    others. For the arguments, see `compute.matmul_precision`, `cudnn_benchmark` and `sdpa_backends` of the config.
    """
    with contextlib.ExitStack() as stack:
        if precision is not None:
            cudnn = torch.backends.cudnn
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = precision != "highest"
        if cudnn_benchmark:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        if attention is not None:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel([getattr(SDPBackend, _ATTENTION[name]) for name in attention]))
        yield
