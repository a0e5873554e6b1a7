"""Small computations whose exact results are known: a device that gets them wrong is at fault."""

from __future__ import annotations

import torch

_SIZE = 256
_TIMES = 4


def faults(device: torch.device) -> list[str]:
    """The computations that `device` gets wrong, in words.

    All numbers are small integers, and all sums are below 2**24: every order of adding gives the same float32.
    """
    places = torch.arange(_SIZE * _SIZE, dtype=torch.int64)
    left = ((places * 2654435761) % 7 - 3).reshape(_SIZE, _SIZE)
    right = ((places * 40503) % 5 - 2).reshape(_SIZE, _SIZE)
    products = left @ right
    wrong = []
    for dtype in (torch.float32, torch.float64) if device.type != "mps" else (torch.float32,):
        a, b = left.to(device, dtype), right.to(device, dtype)
        for _ in range(_TIMES):
            found = {
                "a product of matrices": (a @ b, products),
                "a sum": (a.sum(0), left.sum(0)),
                "a product by element": (a * b + b, left * right + right),
            }
            wrong += [
                f"{name} in {str(dtype).removeprefix('torch.')}"
                for name, (got, expected) in found.items()
                if not torch.equal(got.cpu().to(torch.int64), expected)
            ]
    return list(dict.fromkeys(wrong))
