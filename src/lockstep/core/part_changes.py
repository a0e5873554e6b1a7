"""What a Part of a user changes: it must leave the optimizer's groups as they are, and writes to weights are noted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PartChanges:
    """Compares the optimizer's groups, and on request the weights, with what they were when this was made.

    Args:
        sees_weights: whether to look for writes to weights. torch counts all of them but those through `.data`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sees_weights: bool) -> None:
        self.optimizer = optimizer
        self.groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
        named = model.named_parameters() if sees_weights else ()
        self.versions = [(name, parameter, parameter._version) for name, parameter in named]

    def restore_groups(self) -> str:
        """Bring the groups back to what they were.

        Returns:
            how they had changed, and what to use instead; empty if they had not.
        """
        what = ""
        added = [group for group in self.optimizer.param_groups if not any(group is one for one, _, _ in self.groups)]
        if added or len(self.optimizer.param_groups) != len(self.groups):
            what = "it added or removed groups of the optimizer. Let Task.model make all parameters, and optim.groups "
            what += "or Task.optimizer their groups"
        for group, before, parameters in self.groups:
            changed = [key for key in before.keys() | group.keys() if not _same(group.get(key), before.get(key))]
            if len(group["params"]) != len(parameters):
                changed.append("params")
            if changed and not what:
                key = min(changed)
                values = "" if key == "params" else f" from {before.get(key)!r} to {group.get(key)!r}"
                what = f"it changed {key} of the optimizer's group {before.get('name')!r}{values}. Learning rates are "
                what += "those of the schedule: use schedule.name=FILE.py:FUNCTION or Task.schedule. Other settings "
                what += "may be changed by the optimizer itself: use your own class (optim.name=FILE.py:CLASS)"
            group.clear()
            group.update(before | {"params": before["params"]})
            group["params"][:] = parameters
        self.optimizer.param_groups[:] = [group for group, _, _ in self.groups]
        return what

    def written(self) -> str:
        """The name of the first parameter that was written; empty if there is none."""
        return next((name for name, parameter, version in self.versions if parameter._version != version), "")


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays
        return False
