"""Sums with random signs, which are linear in the numbers: they check the result of an exchange."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.core import devices
from lockstep.core.data.order import derive_seed, derive_seeds
from lockstep.parts.digest import piece_length

SIGNS = 4
"""Signed sums of each tensor."""


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`SIGNS` rows of random signs by place in a piece."""
    bits = np.array(derive_seeds(range(piece_length(device)), state=derive_seed(3)), np.uint64)
    rows = [1.0 - 2.0 * ((bits >> np.uint64(row)) & np.uint64(1)).astype(np.float64) for row in range(SIGNS)]
    return torch.from_numpy(np.stack(rows)).to(device, dtype)


def signed_sums(tensor: Tensor, start: int = 0) -> Tensor:
    """`SIGNS` sums of all elements, each with random signs by position, and the sum of squares: float64 on the device.

    A random-sign sum of a difference d is about |d|_2 in size (Alon, Matias and Szegedy 1996). The sums of a mean are
    the mean of the sums, so they can also check the result of an exchange.

    Args:
        start: place of the first element in a larger tensor.
    """
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    dtype = torch.float64 if devices.of(flat.device).has_float64 else torch.float32
    signs, piece = _signs(flat.device, dtype), piece_length(flat.device)
    found = [torch.zeros(SIGNS + 1, dtype=dtype, device=flat.device)]
    turns, first = [1.0] * (SIGNS + 1), 0
    while first < len(flat):
        number, within = divmod(start + first, piece)
        part = flat[first : first + piece - within].to(dtype)
        found += [torch.mv(signs[:, within : within + len(part)], part), part.dot(part).reshape(1)]
        bits = derive_seed(4, number)
        turns += [*(1.0 - 2 * ((bits >> row) & 1) for row in range(SIGNS)), 1.0]
        first += len(part)
    turned = torch.cat(found) * torch.tensor(turns, dtype=dtype, device=flat.device)
    return turned.view(-1, SIGNS + 1).sum(0)


def stacked(sums: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of several results of `signed_sums` on the host, which waits once."""
    if not sums:
        return []
    rows: list[list[float]] = torch.stack(list(sums)).tolist()
    return rows
