"""Tensors that must keep their bits for a while. A bit that flips in memory meanwhile is found."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.core.parallel.sharded_tensor import local
from lockstep.parts.digest import quick_sums

Key = tuple[str, str]
"""The name of a parameter, and which of its tensors."""


class Resting:
    """Tensors on this rank that must not change. What a torch operation writes counts as intended."""

    def __init__(self) -> None:
        self.kept: dict[Key, tuple[Tensor, tuple[int, int], Tensor]] = {}
        """Tensors, how often torch operations had written them, and their sums."""
        self.flags: dict[Key, Tensor] = {}
        """Whether a tensor has changed, on its device."""

    def keep(self, tensors: Mapping[Key, Tensor]) -> None:
        """From now on, these tensors must not change."""
        for key, tensor in tensors.items():
            rows, version = _rows(tensor)
            self.kept[key] = tensor, version, quick_sums(rows)

    def look(self, tensors: Mapping[Key, Tensor]) -> None:
        """Compare those of these tensors that are kept."""
        for key in tensors.keys() & self.kept.keys():
            (tensor, version, sums), (rows, now) = self.kept[key], _rows(tensors[key])
            if tensor is tensors[key] and version == now:
                flag = (quick_sums(rows) != sums).any()
                self.flags[key] = flag | self.flags[key] if key in self.flags else flag

    def changed(self, device: torch.device) -> list[Key]:
        """What has changed since the last call. Waits for the device once."""
        flags, self.flags = self.flags, {}
        found = torch.stack([one.to(device) for one in flags.values()]).tolist() if flags else []
        return [key for key, is_changed in zip(flags, found, strict=True) if is_changed]


@torch.no_grad()  # so that `to_local` is a look-up
def _rows(tensor: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The rows on this rank. Writes through a sharded tensor only count there, and not in its rows."""
    rows = local(tensor)
    return rows, (tensor._version, rows._version)
