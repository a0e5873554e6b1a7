"""What is trainable, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Stage:
    """From `step` on, parameters whose name matches one of `match` (shell patterns) are trainable; before, they are frozen."""

    step: int
    match: Sequence[str]


class Unfreezing:
    """Gradual unfreezing (Howard & Ruder 2018, arXiv:1801.06146). A parameter of several stages follows the earliest.

    What no stage names stays as the model made it.

    Raises:
        UsageError: a stage that names no parameter.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        self.model = model
        names = [name for name, _ in model.named_parameters()]
        self._since: dict[str, int] = {}
        for stage in stages:
            found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in stage.match)]
            if not found:
                remedy = f"use patterns over the model's parameter names, such as: {', '.join(names[:8])}"
                raise UsageError(f"no parameter matches {list(stage.match)}", where="train.unfreeze", remedy=remedy)
            for name in found:
                self._since[name] = min(stage.step, self._since.get(name, stage.step))
        self.steps = frozenset(self._since.values())  # at which something changes

    def apply(self, step: int) -> None:
        """Make the model's `requires_grad` what it is for `step`."""
        for name, parameter in self.model.named_parameters():
            if name in self._since:
                parameter.requires_grad_(step >= self._since[name])
