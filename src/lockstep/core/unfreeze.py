"""Which parameters are trainable, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lockstep.core.errors import UsageError


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
        UsageError: a stage has no patterns, or a pattern matches no parameter.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        self.model = model
        names = [name for name, _ in model.named_parameters()]
        self._since: dict[str, int] = {}
        self._patterns: dict[int, list[str]] = {}
        for stage in stages:
            unused = [pattern for pattern in stage.match if not any(fnmatchcase(name, pattern) for name in names)]
            if unused or not stage.match:
                remedy = f"use patterns over the model's parameter names, such as: {', '.join(names[:8])}"
                raise UsageError(f"no parameter matches {unused}", where="train.unfreeze", remedy=remedy)
            self._patterns.setdefault(stage.step, []).extend(stage.match)
            for name in _matching(names, stage.match):
                self._since[name] = min(stage.step, self._since.get(name, stage.step))
        self.steps = frozenset(self._since.values())
        """Steps at which some parameter becomes trainable."""

    def apply(self, step: int) -> None:
        """Set `requires_grad` of the model's parameters for `step`."""
        for name, parameter in self.model.named_parameters():
            if name in self._since:
                parameter.requires_grad_(step >= self._since[name])

    def begin(self, step: int) -> tuple[list[str], list[nn.Parameter]]:
        """The patterns whose parameters begin to train with `step`, and these parameters."""
        named = self.model.named_parameters()
        return self._patterns.get(step, []), [one for name, one in named if self._since.get(name) == step]

    def check_frozen(self, until: Mapping[str, int]) -> None:
        """Check that parameters stay frozen as long as a task needs it.

        Args:
            until: steps by pattern over names of parameters: no parameter that matches may train before this step.

        Raises:
            UsageError: a parameter trains earlier. The error names the first parameter and the steps.
        """
        for pattern, step in until.items():
            for name, parameter in self.model.named_parameters():
                if not fnmatchcase(name, pattern):
                    continue
                first = self._since.get(name, 0 if parameter.requires_grad else step)
                if first < step:
                    raise UsageError(
                        f"{name} trains from step {first} on, and the task needs {pattern} to stay frozen until step "
                        f"{step}",
                        where="train.unfreeze",
                        remedy="unfreeze later, name all these parameters in train.unfreeze, or lower the number of "
                        "frozen epochs in the task's options",
                    )


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
