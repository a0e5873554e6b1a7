"""The trainable parameters, as a pure function of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from lockstep.core.config.config_section import Section
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parameter_names import matches, names_of_parameters

if TYPE_CHECKING:
    from torch import nn


class Stage(Section):
    """Parameters that are frozen until the beginning of an epoch, or until a step."""

    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of parameter names, with `*` and `?`, or the words `head`, `last N` and `all`. A tied parameter goes by
    all its names. `last N` contains the last N of the model's repeated blocks and everything after them. `head`
    contains what is after the blocks and outside of the module that contains them."""
    epoch: Annotated[float, Field(ge=0)] | None = None
    """Epochs, counted from 0, before the parameters train."""
    step: PositiveInt | None = None
    """Steps before the parameters train."""

    @model_validator(mode="after")
    def _epoch_or_step(self) -> Self:
        if (self.epoch is None) == (self.step is None):
            raise ValueError("give either epoch or step")
        return self

    def begins(self, steps_per_epoch: int) -> int:
        """The step with which the parameters begin to train."""
        return self.step or math.ceil((self.epoch or 0) * steps_per_epoch)


def stages_of(value: Any) -> Any:
    """Stages from their short form: patterns or words by epoch, such as `{0: head, 1: last 2, 3: all}`."""
    if not isinstance(value, Mapping):
        return value
    return [{"epoch": epoch, "match": [match] if isinstance(match, str) else match} for epoch, match in value.items()]


class Unfreezing:
    """Gradual unfreezing (Howard and Ruder 2018, arXiv:1801.06146).

    A parameter of several stages follows the earliest stage. A parameter of no stage stays as the model made it.

    Args:
        blocks: names of the model's repeated blocks, in the model's order.

    Raises:
        UsageError: a pattern matches no parameter, or the model has fewer blocks than `last N` names.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[Stage], steps_per_epoch: int, blocks: Sequence[str] = ()
    ) -> None:
        self.model = model
        self._names = names_of_parameters(model)
        self._since: dict[str, int] = {}
        self._patterns: dict[int, list[str]] = {}
        for stage in stages:
            step = stage.begins(steps_per_epoch)
            self._patterns.setdefault(step, []).extend(stage.match)
            found = {pattern: self._matching(pattern, blocks) for pattern in stage.match}
            if unused := [pattern for pattern in stage.match if not found[pattern]]:
                remedy = f"use patterns over the model's parameter names, such as: {', '.join([*self._names][:8])}"
                raise UsageError(f"no parameter matches {unused}", where="train.unfreeze", remedy=remedy)
            for name in set().union(*found.values()):
                self._since[name] = min(step, self._since.get(name, step))
        self.steps = frozenset(self._since.values())
        """Steps at which some parameter becomes trainable."""

    def _matching(self, pattern: str, blocks: Sequence[str]) -> list[str]:
        """The parameters that a pattern or word of a stage names, each by its first name."""
        word = re.fullmatch(r"(all)|(head)|last ([1-9]\d*)", pattern)
        found = [name for name, names in self._names.items() if matches(names, [pattern])]
        if word and not found:
            found = [*self._names] if word[1] else self._end(blocks, None if word[2] else int(word[3]))
        return found

    def _end(self, blocks: Sequence[str], last: int | None) -> list[str]:
        """The parameters of the last blocks and of everything after them. `last` is None: those of the head."""
        if len(blocks) < (last or 1):
            remedy = "name fewer blocks, use patterns of parameter names, or name the blocks in parallel.shard_modules"
            what = f"last {last}" if last else "head"
            found = f"the model has {number_of(len(blocks), 'repeated block')}"
            raise UsageError(f"{found}, so there is no {what!r}", where="train.unfreeze", remedy=remedy)
        names = list(self._names)
        first = blocks[len(blocks) - (last or 1)]
        begin = next(place for place, name in enumerate(names) if name.startswith(f"{first}."))
        if last is not None:
            return names[begin:]
        of_blocks = f"{first.partition('.')[0]}."
        return [name for name in names[begin:] if not name.startswith(of_blocks)]

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
                if not matches(self._names[name], [pattern]):
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
