"""Which parameters are trainable, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Stage:
    """Parameters that are frozen before a step, and trainable from that step on."""

    step: int
    """Global batches consumed before the parameters are trainable."""
    match: Sequence[str]
    """Shell patterns (`*` and `?`) over names of parameters."""


class Unfreezing:
    """Gradual unfreezing (Howard and Ruder 2018, arXiv:1801.06146).

    A parameter of several stages follows the earliest stage. A parameter of no stage stays as the model made it.

    Raises:
        UsageError: a stage matches no parameter.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        self.model = model
        names = [name for name, _ in model.named_parameters()]
        self._since: dict[str, int] = {}
        for stage in stages:
            matching = [name for name in names if any(fnmatchcase(name, pattern) for pattern in stage.match)]
            if not matching:
                remedy = f"use patterns over the model's parameter names, such as: {', '.join(names[:8])}"
                raise UsageError(f"no parameter matches {list(stage.match)}", where="train.unfreeze", remedy=remedy)
            for name in matching:
                self._since[name] = min(stage.step, self._since.get(name, stage.step))
        self.steps = frozenset(self._since.values())
        """Steps at which some parameter becomes trainable."""

    def apply(self, step: int) -> None:
        """Set `requires_grad` of the model's parameters for `step`."""
        for name, parameter in self.model.named_parameters():
            if name in self._since:
                parameter.requires_grad_(step >= self._since[name])
