"""The peak performance of GPUs, by torch's name for them, from the vendors' data sheets.

Throughput is for dense matrices: data sheets often list twice as much, for matrices with half of their values zero.
Products of fp16 and bf16 are accumulated in fp32, as in torch. The sources: NVIDIA's data sheets of the A100 (2022),
H100 (2023), H200 (2024), HGX B200 (2024), L4, L40S (2023), A10 (2021), T4 (2019) and V100 (2020); AWS on the A10G;
NVIDIA's white papers on the architectures GA102 (2021) and Ada (2022) for RTX 3090, A6000 and 4090; AMD's data sheets
of the MI250X (2021) and MI300X (2023). None of these figures was measured with Lockstep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The data sheet of a GPU as torch sees it: half of it, for a GPU with two chips that torch sees as two."""

    name: str
    words: frozenset[str]
    """Words in torch's name of the GPU."""
    bf16: float | None
    """10^12 operations per second. None: it has no units for this format."""
    fp16: float | None
    tf32: float | None
    fp32: float
    memory_gb: float
    """10^9 bytes, as in the data sheet."""
    link_gb_per_s: float
    """To other GPUs of the machine, both directions together: NVLink or Infinity Fabric; PCIe if it has no other
    link."""


def _gpu(
    words: str,
    *,
    tensor: float | None,
    fp32: float,
    memory: float,
    link: float,
    tf32: float | None = None,
    fp16: float | None = None,
) -> Gpu:
    """Args:
    tensor: of bf16, and of fp16 unless `fp16` is given.
    memory: 10^9 bytes.
    """
    return Gpu(words, frozenset(words.lower().split()), tensor, fp16 or tensor, tf32, fp32, memory, link)


# A name may match several entries: the entry with the most words wins.
GPUS = (
    _gpu("A100", tensor=312, tf32=156, fp32=19.5, memory=40, link=600),
    _gpu("A100 80GB", tensor=312, tf32=156, fp32=19.5, memory=80, link=600),
    _gpu("A100 80GB PCIe", tensor=312, tf32=156, fp32=19.5, memory=80, link=600),
    _gpu("H100", tensor=989.4, tf32=494.7, fp32=66.9, memory=80, link=900),
    _gpu("H100 PCIe", tensor=756, tf32=378, fp32=51.2, memory=80, link=600),
    _gpu("H100 NVL", tensor=835, tf32=417.5, fp32=60, memory=94, link=600),
    _gpu("H200", tensor=989.4, tf32=494.7, fp32=66.9, memory=141, link=900),
    _gpu("H200 NVL", tensor=835, tf32=417.5, fp32=60, memory=141, link=900),
    _gpu("B200", tensor=2250, tf32=1125, fp32=75, memory=180, link=1800),
    _gpu("L4", tensor=121, tf32=60, fp32=30.3, memory=24, link=64),
    _gpu("L40S", tensor=362, tf32=183, fp32=91.6, memory=48, link=64),
    _gpu("A10", tensor=125, tf32=62.5, fp32=31.2, memory=24, link=64),
    _gpu("A10G", tensor=70, tf32=35, fp32=35, memory=24, link=64),
    _gpu("T4", tensor=None, fp16=65, fp32=8.1, memory=16, link=32),
    _gpu("V100", tensor=None, fp16=125, fp32=15.7, memory=16, link=300),
    _gpu("V100 32GB", tensor=None, fp16=125, fp32=15.7, memory=32, link=300),
    _gpu("V100 PCIe", tensor=None, fp16=112, fp32=14, memory=16, link=32),
    _gpu("V100 PCIe 32GB", tensor=None, fp16=112, fp32=14, memory=32, link=32),
    _gpu("RTX 3090", tensor=71.2, tf32=35.6, fp32=35.6, memory=24, link=112.5),
    _gpu("RTX 4090", tensor=165.2, tf32=82.6, fp32=82.6, memory=24, link=64),
    _gpu("RTX A6000", tensor=154.8, tf32=77.4, fp32=38.7, memory=48, link=112.5),
    _gpu("MI250X", tensor=191.5, fp32=47.9, memory=64, link=400),
    _gpu("MI300X", tensor=1307.4, tf32=653.7, fp32=163.4, memory=192, link=896),
)
# Words for a part of a GPU, and for other GPUs with a similar name.
_OTHER = frozenset({"mig", "grid", "laptop", "mobile", "ti", "d", "super", "max"})


def find(name: str) -> Gpu | None:
    """The data sheet of a GPU.

    Args:
        name: from `torch.cuda.get_device_name`, such as `NVIDIA A100-SXM4-80GB`.

    Returns:
        None if the GPU is unknown, or if this is a part of a GPU (MIG).
    """
    words = frozenset(re.split(r"[\s\-_/]+", name.lower()))
    fitting = [gpu for gpu in GPUS if gpu.words <= words and not words & _OTHER]
    return max(fitting, key=lambda gpu: len(gpu.words), default=None)


def flops(name: str, number_format: str) -> float | None:
    """Peak floating-point operations per second of a GPU. None: the GPU is unknown.

    Args:
        number_format: bf16, fp16, tf32 or fp32. A GPU without units for a format computes in fp32.
    """
    gpu = find(name)
    return None if gpu is None else 1e12 * (getattr(gpu, number_format) or gpu.fp32)
