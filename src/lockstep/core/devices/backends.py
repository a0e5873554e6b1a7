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
def chosen(
    *,
    matmul_precision: str | None = None,
    cudnn_benchmark: bool = False,
    sdpa_backends: Sequence[str] | None = None,
) -> Iterator[None]:
    """Inside, torch computes as the arguments say. Afterwards the switches are as before.

    Args:
        matmul_precision: `highest`, `high` or `medium`, for `torch.set_float32_matmul_precision`. TF32 in convolutions
            is off with `highest`, and on with the others. None: the switches stay.
        cudnn_benchmark: switch cuDNN's measurements of its algorithms on. False: the switch stays.
        sdpa_backends: the implementations of attention that torch may choose from. None: the switches stay.
    """
    with contextlib.ExitStack() as stack:
        if matmul_precision is not None:
            cudnn = torch.backends.cudnn
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            torch.set_float32_matmul_precision(matmul_precision)
            cudnn.allow_tf32 = matmul_precision != "highest"
        if cudnn_benchmark:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        if sdpa_backends is not None:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel([getattr(SDPBackend, _ATTENTION[name]) for name in sdpa_backends]))
        yield
