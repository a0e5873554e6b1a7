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
    """Words in torch's name of the GPU."""
    bf16: float | None
    """10^12 operations per second. None: it has no units for this format."""
    fp32: float
    memory_gb: float
    """10^9 bytes, as in the data sheet."""
    link_gb_per_s: float
    """To other GPUs of the machine, both directions together: NVLink or Infinity Fabric; PCIe if it has no other
    link."""
    tf32: float | None = None
    half: float | None = None
    """Of fp16, if it differs from bf16."""

    @property
    def fp16(self) -> float | None:
        return self.half or self.bf16

    @property
    def words(self) -> frozenset[str]:
        return frozenset(self.name.lower().split())


# A name may match several entries: the entry with the most words wins.
GPUS = (
    Gpu("A100", bf16=312, tf32=156, fp32=19.5, memory_gb=40, link_gb_per_s=600),
    Gpu("A100 80GB", bf16=312, tf32=156, fp32=19.5, memory_gb=80, link_gb_per_s=600),
    Gpu("A100 80GB PCIe", bf16=312, tf32=156, fp32=19.5, memory_gb=80, link_gb_per_s=600),
    Gpu("H100", bf16=989.4, tf32=494.7, fp32=66.9, memory_gb=80, link_gb_per_s=900),
    Gpu("H100 PCIe", bf16=756, tf32=378, fp32=51.2, memory_gb=80, link_gb_per_s=600),
    Gpu("H100 NVL", bf16=835, tf32=417.5, fp32=60, memory_gb=94, link_gb_per_s=600),
    Gpu("H200", bf16=989.4, tf32=494.7, fp32=66.9, memory_gb=141, link_gb_per_s=900),
    Gpu("H200 NVL", bf16=835, tf32=417.5, fp32=60, memory_gb=141, link_gb_per_s=900),
    Gpu("B200", bf16=2250, tf32=1125, fp32=75, memory_gb=180, link_gb_per_s=1800),
    Gpu("L4", bf16=121, tf32=60, fp32=30.3, memory_gb=24, link_gb_per_s=64),
    Gpu("L40S", bf16=362, tf32=183, fp32=91.6, memory_gb=48, link_gb_per_s=64),
    Gpu("A10", bf16=125, tf32=62.5, fp32=31.2, memory_gb=24, link_gb_per_s=64),
    Gpu("A10G", bf16=70, tf32=35, fp32=35, memory_gb=24, link_gb_per_s=64),
    Gpu("T4", bf16=None, half=65, fp32=8.1, memory_gb=16, link_gb_per_s=32),
    Gpu("V100", bf16=None, half=125, fp32=15.7, memory_gb=16, link_gb_per_s=300),
    Gpu("V100 32GB", bf16=None, half=125, fp32=15.7, memory_gb=32, link_gb_per_s=300),
    Gpu("V100 PCIe", bf16=None, half=112, fp32=14, memory_gb=16, link_gb_per_s=32),
    Gpu("V100 PCIe 32GB", bf16=None, half=112, fp32=14, memory_gb=32, link_gb_per_s=32),
    Gpu("RTX 3090", bf16=71.2, tf32=35.6, fp32=35.6, memory_gb=24, link_gb_per_s=112.5),
    Gpu("RTX 4090", bf16=165.2, tf32=82.6, fp32=82.6, memory_gb=24, link_gb_per_s=64),
    Gpu("RTX A6000", bf16=154.8, tf32=77.4, fp32=38.7, memory_gb=48, link_gb_per_s=112.5),
    Gpu("MI250X", bf16=191.5, fp32=47.9, memory_gb=64, link_gb_per_s=400),
    Gpu("MI300X", bf16=1307.4, tf32=653.7, fp32=163.4, memory_gb=192, link_gb_per_s=896),
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
