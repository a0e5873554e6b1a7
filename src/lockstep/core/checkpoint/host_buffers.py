"""Buffers in host memory into which a state is copied before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.core.devices import Device

_ALIGNMENT = 64  # bytes
_SMALL = 2**20  # bytes that may be wasted


class MemoryBlock(NamedTuple):
    """A piece of memory that holds several tensors."""

    size: int
    """Bytes."""
    offsets: dict[str, int]
    """The first byte of each tensor, by name."""


def buffers_like(tensors: Mapping[str, Tensor], device: Device) -> dict[str, Tensor]:
    """For each tensor a tensor in host memory with its shape and dtype, with any values.

    The tensors share a few blocks of memory, and each has its own storage: `torch.save` writes whole storages.

    Args:
        device: from which the values will come.
    """
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    found = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items() if not sizes[name]}
    for block in pack(sizes, powers_of_two=device.has_own_memory):
        memory = device.host_buffer(block.size).numpy()
        for name, offset in block.offsets.items():
            like = tensors[name]
            flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
            found[name] = flat.view(like.shape)
    return {name: found[name] for name in tensors}


def pack(sizes: Mapping[str, int], *, powers_of_two: bool) -> list[MemoryBlock]:
    """Blocks that hold tensors of these sizes in bytes. Empty tensors are left out.

    torch gives page-locked memory in powers of two, so a buffer for each tensor would take up to twice the memory.

    Args:
        powers_of_two: the sizes of blocks. Otherwise there is a single block.
    """
    padded = {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sizes.items() if size}
    left = sorted(padded, key=lambda name: -padded[name])
    blocks = []
    while left:
        size = sum(padded[name] for name in left)
        if powers_of_two:
            fits_all, largest = _power_of_two(size), _power_of_two(padded[left[0]])
            # Half of what fits all is filled, and the rest goes into smaller blocks.
            size = fits_all if size == fits_all or size <= _SMALL else max(fits_all // 2, largest)
        block, end = MemoryBlock(size, {}), 0
        for name in left:
            if end + padded[name] <= size:
                block.offsets[name], end = end, end + padded[name]
        left = [name for name in left if name not in block.offsets]
        blocks.append(block)
    return blocks


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
