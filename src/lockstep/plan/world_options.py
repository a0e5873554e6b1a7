"""From the words of the command line to a `World`: sizes, bandwidths and names of GPUs."""

from __future__ import annotations

import difflib
import re

from lockstep.devices import peaks
from lockstep.errors import UsageError
from lockstep.plan.setting import World

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}
_LEAST_MEMORY = 10**5  # bytes; less is a number without its unit


def size(text: str, where: str) -> int:
    """Bytes of `80GB`, `79.6GiB` or `80000000000`.

    Raises:
        UsageError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I" or not float(match[1]):
        raise UsageError(f"{text!r} is no size", where=where, remedy="write a number with GB or GiB, such as 80GB")
    found = int(float(match[1]) * _UNITS[match[2]])
    if found < _LEAST_MEMORY:
        remedy = "write a number with GB or GiB, such as 80GB"
        raise UsageError(f"{text!r} means {found} bytes, and a GPU has more", where=where, remedy=remedy)
    return found


def bandwidth(text: str, where: str) -> float:
    """Bytes in a second of `50GB/s`, `400Gbit/s` or `400Gb/s`: a small b means bits.

    Raises:
        UsageError: it is no bandwidth.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KkMGT]?i?)(B|b|bit|bits)(/s|ps)?\s*", text)
    if match is None or not float(match[1]):
        remedy = "write bytes or bits in a second, such as 50GB/s or 400Gbit/s"
        raise UsageError(f"{text!r} is no bandwidth", where=where, remedy=remedy)
    return float(match[1]) * _UNITS[match[2].upper()] / (1 if match[3] == "B" else 8)


def gpu(name: str) -> peaks.Gpu:
    """The data sheet of a GPU.

    Raises:
        UsageError: it is not known; names the nearest.
    """
    found = peaks.find(name)
    if found is not None:
        return found
    known = {each.name.lower(): each.name for each in peaks.GPUS}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    remedy = f"the nearest is {known[near[0]]!r}; there are: " if near else "there are: "
    remedy += ", ".join(known.values()) + ". Or give --gpu-memory"
    raise UsageError(f"the GPU {name!r} is not known", where="--gpu", remedy=remedy)


def world(
    gpus: int,
    *,
    gpus_per_node: int | None = None,
    gpu_memory: str | None = None,
    gpu_name: str | None = None,
    link_bandwidth: str | None = None,
    network_bandwidth: str | None = None,
    utilisation: float = 0.4,
    fp32_as_tf32: bool = False,
) -> World:
    """The world that the command line describes.

    Args:
        gpus_per_node: None: 8, or all where there are fewer.
        link_bandwidth: between GPUs of a node, one GPU in one direction. None: half of the data sheet's, which counts
            both directions. It also counts between nodes, where `network_bandwidth` is not given.
        network_bandwidth: between nodes, for one GPU in one direction.
        fp32_as_tf32: matrices of fp32 are multiplied in TF32.

    Raises:
        UsageError: neither a memory nor a GPU is given, or a word cannot be read.
    """
    if gpu_memory is None and gpu_name is None:
        remedy = "add --gpu-memory 80GB, or --gpu H100"
        raise UsageError("the memory of a GPU is not given", where="lockstep plan", remedy=remedy)
    sheet = gpu(gpu_name) if gpu_name is not None else None
    memory = size(gpu_memory, "--gpu-memory") if gpu_memory is not None else None
    link = bandwidth(link_bandwidth, "--link-bandwidth") if link_bandwidth is not None else None
    network = bandwidth(network_bandwidth, "--network-bandwidth") if network_bandwidth is not None else link
    flops = None
    if sheet is not None:
        memory = memory or int(sheet.memory_gb * 1e9)
        link = link or sheet.link_gb_per_s / 2 * 1e9
        fp32 = (sheet.tf32 if fp32_as_tf32 else None) or sheet.fp32
        by_precision = {"fp32": fp32, "bf16": sheet.bf16, "fp16": sheet.fp16}
        flops = {name: peak * 1e12 for name, peak in by_precision.items() if peak is not None}
    per_node = gpus_per_node or (8 if gpus > 8 else gpus)
    return World(
        gpus=gpus,
        gpus_per_node=per_node,
        memory_bytes=memory,
        peak_flops=flops,
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        utilisation=utilisation,
        gpu_name=sheet.name if sheet is not None else None,
    )
