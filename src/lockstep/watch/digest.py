"""Digests of 128 bits for many tensors at once, and signed sums: what is linear in the numbers.

All sums stay on the device. Each element adds a number that depends on its bits and its place, so that the sums do not
depend on the order in which tensors come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

Digest = tuple[int, int]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements that are mixed together
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, odd
_OTHER = -2960836687070348117  # odd; of MurmurHash3's second constant and SplitMix64's increments
_SHIFTS = ((30, -4658895280553007687), (27, -7723592293110705685))
SIGNS = 4
"""Signed sums of each tensor."""


def fold(tensors: Mapping[str, Tensor], sizes: Mapping[str, int] | None = None) -> Tensor:
    """The digest of all tensors together: two int64 on their device.

    Two independent sums modulo 2**64 of the mixed bits of all elements. The first never misses a change of one element.

    Args:
        tensors: by name, on one device.
        sizes: elements by name, of these tensors and of others that may be missing. An element has a place in this
            order. None: of these.
    """
    names = sizes or {name: tensor.numel() for name, tensor in tensors.items()}
    starts = dict(zip(names, accumulate(names.values(), initial=0), strict=False))
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for bits, positions in _blocks(tensors, starts, device):
        total += torch.stack(_sums(bits, positions))
    return total


def digests(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """The digest of each tensor by itself. The host waits once."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    found = [fold({name: tensor}).to(device) for name, tensor in tensors.items()]
    return {name: (int(a), int(b)) for name, (a, b) in zip(tensors, torch.stack(found).tolist(), strict=True)}


def _sums(bits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    mixed = _mixed(bits + (positions + 1) * _GOLDEN)
    return mixed.sum(), _mixed(mixed * _OTHER + positions).sum()


def _mixed(numbers: Tensor) -> Tensor:
    """SplitMix64's finaliser. The masks make the shifts logical: torch's shift of int64 copies the sign."""
    for shift, factor in _SHIFTS:
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers ^ ((numbers >> 31) & ((1 << 33) - 1))


def _blocks(
    tensors: Mapping[str, Tensor], starts: Mapping[str, int], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The bits of all elements as int64, and their places, in few pieces: small tensors share one."""
    bits: list[Tensor] = []
    places: list[Tensor] = []
    held = 0
    for name, tensor in tensors.items():
        flat = _flat(tensor)
        for start in range(0, len(flat), _BLOCK):
            part = flat[start : start + _BLOCK]
            first = starts[name] + start
            bits.append(part.to(device=device, dtype=torch.int64))
            places.append(torch.arange(first, first + len(part), dtype=torch.int64, device=device))
            held += len(part)
            if held >= _BLOCK:
                yield (bits[0], places[0]) if len(bits) == 1 else (torch.cat(bits), torch.cat(places))
                bits, places, held = [], [], 0
    if bits:
        yield torch.cat(bits), torch.cat(places)


def _flat(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of its element's size; of complex numbers those of both parts."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def signed_sums(tensor: Tensor, start: int = 0) -> Tensor:
    """`SIGNS` sums of all elements, each with fixed signs by place, and the sum of squares: float64 on the device.

    A sum of random signs of a difference d is about |d|_2 in size (Alon, Matias and Szegedy 1996). The sums of a mean
    are the mean of the sums, so that they also check what an exchange has added up.

    Args:
        start: place of the first element in a larger tensor.
    """
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    total = torch.zeros(SIGNS + 1, dtype=torch.float64, device=flat.device)
    for first in range(0, len(flat), _BLOCK):
        part = flat[first : first + _BLOCK].double()
        places = torch.arange(start + first + 1, start + first + 1 + len(part), dtype=torch.int64, device=flat.device)
        hashed = _mixed(places * _GOLDEN)
        sums = [(part * (1 - 2 * ((hashed >> bit) & 1))).sum() for bit in range(7, 7 + SIGNS)]
        total += torch.stack([*sums, part.square().sum()])
    return total


def stacked(sums: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of several results of `signed_sums` on the host, which waits once."""
    if not sums:
        return []
    rows: list[list[float]] = torch.stack(list(sums)).tolist()
    return rows
