"""Patterns in the memory of a device: written, read back, and inverted."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.core.errors import number_of

_BLOCK = 1 << 23  # elements of 8 bytes: 64 MiB
_PATTERNS = {"zeros": 0, "ones": -1, "0101": 0x5555555555555555, "1010": -0x5555555555555556}


def check(size: int, device: torch.device) -> Iterator[tuple[str, str | None]]:
    """Fill memory with patterns, and read each back when all of it is filled.

    Args:
        size: bytes.

    Yields:
        the name of each pattern, and what is wrong, in words; None: nothing.
    """
    blocks = [torch.empty(_BLOCK, dtype=torch.int64, device=device) for _ in range(max(1, size // (8 * _BLOCK)))]
    for name, value in _PATTERNS.items():
        for block in blocks:
            block.fill_(value)
        yield name, _first_wrong(blocks, value)
    for sign in (1, -1):  # each word holds its own address: this detects rows or lines that are confused
        for number, block in enumerate(blocks):
            torch.arange(number * _BLOCK, (number + 1) * _BLOCK, out=block)
            block.mul_(sign)
        yield ("addresses" if sign > 0 else "inverted addresses"), _first_wrong(blocks, None, sign)


def _first_wrong(blocks: list[Tensor], value: int | None, sign: int = 1) -> str | None:
    wrong, first = 0, ""
    for number, block in enumerate(blocks):
        right: Tensor | int = value if value is not None else _addresses(block, number, sign)
        differing = block != right
        count = int(differing.sum())
        if count and not first:
            place = int(differing.nonzero()[0])
            expected = value if value is not None else sign * (number * _BLOCK + place)
            bits = (int(block[place]) ^ expected) % (1 << 64)
            first = (
                f"byte {8 * (number * _BLOCK + place)} and the next 7 differ in {number_of(bits.bit_count(), 'bit')}"
            )
        wrong += count
    return f"{number_of(wrong, 'wrong word')} of 8 bytes: {first}" if wrong else None


def _addresses(block: Tensor, number: int, sign: int) -> Tensor:
    return sign * torch.arange(number * _BLOCK, (number + 1) * _BLOCK, device=block.device)
