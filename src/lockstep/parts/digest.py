"""Digests of tensors, by which ranks compare their states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements that are converted to int64 together


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """The digest of each tensor. The host waits once for each device, and not once for each tensor."""
    totals = [_digest(tensor) for tensor in tensors]
    found = [0] * len(totals)
    for device in {total.device for total in totals}:
        places = [place for place, total in enumerate(totals) if total.device == device]
        for place, number in zip(places, torch.stack([totals[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found


def digest(tensor: Tensor) -> int:
    """A 64-bit digest of a tensor's bits and of their positions, but not of its shape.

    The digest is a sum modulo 2**64. Each element adds its bits and its position, mixed by the finaliser of SplitMix64.
    Two tensors that differ in a single element never have the same digest. (`torch.hash_tensor` takes the XOR, in which
    [a, -a] cancel. A sum of bits times positions fails too: two flipped signs of float64 add up to 2**64.)
    """
    return int(_digest(tensor))


def _digest(tensor: Tensor) -> Tensor:
    """The digest on the tensor's device."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        positions = torch.arange(start, start + len(block), dtype=torch.int64, device=bits.device)
        mixed = block + (positions + 1) * -7046029254386353131  # 2**64 / golden ratio, odd
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            # The mask makes this a logical shift: torch's shift of int64 copies the sign.
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).sum()
    return total
