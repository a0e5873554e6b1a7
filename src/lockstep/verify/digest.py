"""One integer for the bits of a tensor."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import map_tensors

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20


def digest(tensor: Tensor) -> int:
    """A 64-bit digest of a tensor's bits and their places; not its shape.

    The sum, modulo 2**64, of what SplitMix64's finaliser makes of each element's bits and its place: two tensors that differ in
    one element never have the same. (`torch.hash_tensor` XORs: [a, -a] collides. So does any sum of bits times places: two
    flipped signs of float64 add up to 2**64.)
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(start, start + len(part), dtype=torch.int64, device=bits.device)
        mixed = part + (places + 1) * -7046029254386353131  # 2**64 / golden ratio, odd
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor  # shifted as if it had no sign
        found += (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).sum()
    return int(found)


def digest_of_batch(batch: Any) -> int:
    """A digest of all tensors in a batch, in their order."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(digest(tensor))
        return tensor

    map_tensors(batch, note)
    return zlib.crc32(repr(found).encode())
