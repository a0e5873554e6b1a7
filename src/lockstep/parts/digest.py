"""128-bit digests with which ranks compare tensors.

They make one pass over the numbers, in pieces that stay in a cache of the processor. All sums stay on the device.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.data.order import derive_seed, derive_seeds
from lockstep.core.data.tensors import map_tensors, values_of

Digest = tuple[int, int]

SMALL = 1 << 16
"""Elements: smaller tensors are put together before they are digested."""
_BLOCK = (64, 256)
"""Rows and columns of words that `quick_sums` adds up."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def piece_length(device: torch.device) -> int:
    """Numbers of 8 bytes that are digested together: a cache's worth, and few calls."""
    return 1 << 17 if device.type == "cpu" else 1 << 20


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Two rows of random odd factors of 64 bits, by place in a piece."""
    rows = [np.array(derive_seeds(range(piece_length(device)), state=derive_seed(row)), np.uint64) for row in (1, 2)]
    return torch.from_numpy((np.stack(rows) | np.uint64(1)).view(np.int64)).to(device)


def fold(tensors: Mapping[str, Tensor]) -> Tensor:
    """The digest of all tensors together: two int64 on the device of the first.

    Both are sums modulo 2**64, over the words of 8 bytes, of products with a random odd factor for each position: one
    sum is over the words, the other over their upper halves, because a change of high bits only would vanish in
    products: two flipped signs would add up to 2**64. A change of one word is never missed, and other changes with at
    most about 2**-32: the first sum detects changes of lower halves, the second all others. Names and numbers of
    elements count, too.
    """
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for key, words in _groups(tensors, device):
        total += _sums(words, key)
    return total


def quick_sums(tensor: Tensor) -> Tensor:
    """Sums that change with a tensor, for comparing a rank with itself: their `fold` takes less than half the time.

    The words of 8 bytes form matrices. The result is the sums modulo 2**64 of all rows and columns, then the words that
    are left. Changes of up to three words always change a sum. The smallest change that is missed affects four words at
    the corners of a rectangle in a matrix, by the same number with alternating signs. For pieces of `piece_length`
    elements, the sums equal those of the whole.
    """
    words, block = _words([_flat(tensor)]), _BLOCK[0] * _BLOCK[1]
    matrices = words[: len(words) // block * block].view(-1, *_BLOCK)
    return torch.cat([torch.cat([matrices.sum(1), matrices.sum(2)], 1).flatten(), words[matrices.numel() :]])


def digests(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """The digest of each tensor. The host waits once for each device, and not once for each tensor."""
    folded = {name: fold({"": tensor}) for name, tensor in tensors.items()}
    found: dict[str, Digest] = {}
    for device in {one.device for one in folded.values()}:
        names = [name for name, one in folded.items() if one.device == device]
        pairs = torch.stack([folded[name] for name in names]).tolist()
        found |= {name: (first, second) for name, (first, second) in zip(names, pairs, strict=True)}
    return {name: found[name] for name in tensors}


def digest(tensor: Tensor) -> Digest:
    """The digest of a tensor's bits, their places and their number, but not of its shape."""
    return digests({"": tensor})[""]


def fold_batch(batch: Any) -> Tensor:
    """The digest of all tensors in a batch, in order: two int64 on the device of the first."""
    found: dict[str, Tensor] = {}

    def add(tensor: Tensor) -> Tensor:
        for part in values_of(tensor):
            found[str(len(found))] = part
        return tensor

    map_tensors(batch, add)
    return fold(found)


def digest_of_batch(batch: Any) -> Digest:
    """The digest of all tensors in a batch, in order."""
    first, second = fold_batch(batch).tolist()
    return int(first), int(second)


def _sums(words: Tensor, key: int) -> Tensor:
    factors, piece = _factors(words.device), piece_length(words.device)
    room = torch.empty(min(piece, len(words)), dtype=torch.int64, device=words.device)
    starts = range(0, len(words), piece)
    found = torch.empty(2, len(starts), dtype=torch.int64, device=words.device)
    for number, start in enumerate(starts):
        part = words[start : start + piece]
        high = room[: len(part)]  # new memory for each piece would take twice as long
        _dot(part, factors[0, : len(part)], high, found[0, number])
        torch.bitwise_right_shift(part, 32, out=high)  # torch copies the sign; different halves stay different
        _dot(high, factors[1, : len(part)], high, found[1, number])
    odd = [[_odd(key, number, row) for number in (*range(len(starts)), -1)] for row in range(2)]
    last = torch.tensor(odd).to(words.device)
    return (found * last[:, :-1]).sum(1) + last[:, -1]


def _dot(one: Tensor, other: Tensor, room: Tensor, result: Tensor) -> None:
    if one.device.type == "cpu":  # GPUs lack this product of integers
        torch.dot(one, other, out=result)
    else:
        torch.sum(torch.mul(one, other, out=room), 0, out=result)


def _odd(*words: int) -> int:
    """A random odd factor, as a signed number of 64 bits."""
    number = derive_seed(*words) | 1
    return number - (1 << 64) if number >> 63 else number


def _groups(tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """A key and the words of each large tensor, and of all small tensors of one element size together."""
    small: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        flat = _flat(tensor)
        if len(flat) > SMALL:
            yield _key([(name, len(flat))]), _words([flat.to(device)])
        else:
            small.setdefault(flat.dtype, []).append((name, flat.to(device)))
    for pairs in small.values():
        yield _key([(name, len(flat)) for name, flat in pairs]), _words([flat for _, flat in pairs])


def _key(sizes: Sequence[tuple[str, int]]) -> int:
    return zlib.crc32(repr(sizes).encode())


def _words(parts: list[Tensor]) -> Tensor:
    """Integers of any size as words of 8 bytes, with zeros at the end."""
    each = 8 // parts[0].element_size()
    count = sum(map(len, parts))
    if count % each:
        parts = [*parts, parts[0].new_zeros(each - count % each)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if whole.storage_offset() * whole.element_size() % 8:
        whole = whole.clone()
    return whole.view(torch.int64)


def _flat(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of its element size; for complex numbers, those of both parts."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])
