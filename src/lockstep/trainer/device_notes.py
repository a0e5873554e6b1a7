"""What a person should know about the device of a run: lines for the head of its log."""

from __future__ import annotations

import glob
import os

import torch

from lockstep.core.config.sections import RunConfig


def lines(config: RunConfig, device: torch.device) -> list[str]:
    """A GPU that is not used, or one that computes in fp32."""
    if device.type == "cpu" and config.device == "auto" and (found := sorted(glob.glob("/dev/nvidia[0-9]*"))):
        what = f"WARNING: this machine has {found[0]}, but torch sees no GPU, so this run computes on the CPU"
        return [f"{what}: {_why_unseen()}. device=cpu leaves this warning out"]
    if device.type == "cuda" and config.precision == "fp32":
        tf32 = "TF32" if torch.get_float32_matmul_precision() != "highest" else "fp32"
        advice = "`--preset gpu` or precision=bf16 is usually several times as fast on GPUs that have bf16"
        return [f"precision: fp32, matrix products in {tf32} (compute.matmul_precision); {advice}"]
    return []


def _why_unseen() -> str:
    """The likely reason why torch sees no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA from pytorch.org"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides GPUs; unset it, or name a GPU that exists"
    return (
        f"the driver may be too old for CUDA {torch.version.cuda}, or a container may lack the driver (--gpus all); "
        "nvidia-smi shows the driver"
    )
