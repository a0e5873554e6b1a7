"""Observes gradients that one optimizer has used, and that another will add to those of its next pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import recorder

_STEPS = 48
"""This many first steps of all optimizers are examined."""


@dataclasses.dataclass
class HeldPasses:
    """The backward passes since an optimizer's last step whose gradients its parameters hold."""

    passes: list[int] = dataclasses.field(default_factory=list)
    used: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By pass, the step of another optimizer that used its gradients, too."""
    was_cleared: bool = False
    """Whether gradients of such a pass were cleared."""
    before: list[Any] = dataclasses.field(default_factory=list)


class MixedPasses:
    """The passes that each optimizer holds, while there are several optimizers, in the first steps of a script."""

    def __init__(self) -> None:
        self._held: Registry[HeldPasses] = Registry()
        self._lines: dict[int, list[Any]] = {}
        """By pass, its line: once for each optimizer whose parameters it reached."""

    def begins(self, optimizers: list[Any], is_cleared: Callable[[Any], bool]) -> None:
        """A backward pass begins."""
        if len(optimizers) < 2 or recorder.counts.optimizer_steps >= _STEPS:
            return
        cleared = {id(optimizer): is_cleared(optimizer) for optimizer in optimizers}
        for optimizer in optimizers:
            held = self._held.get_or_put(optimizer, HeldPasses)
            for use in held.used.values():
                use["is_cleared"] |= cleared.get(use["by"], False)
            if cleared[id(optimizer)]:
                held.was_cleared |= bool(held.used)
                held.passes, held.used = [], {}
            held.before = _versions(optimizer)

    def ends(self, at: Any) -> None:
        """The backward pass, which has just been counted, ends."""
        for optimizer, held in self._held.items():
            if held.before and held.before != _versions(optimizer):
                held.passes.append(recorder.counts.backwards)
                self._lines.setdefault(recorder.counts.backwards, []).append(at)
            held.before = []

    def stepped(self, optimizer: Any, at: Any) -> dict[str, Any] | bool | None:
        """An optimizer steps. Returns what its gradients hold of a pass that another one has used, and that it added to
        passes after that. False: such a pass was cleared. None: there was none."""
        held, told = self._held.get(optimizer) or HeldPasses(), None
        for number, use in held.used.items():
            later = [self._lines[each] for each in held.passes if each > use["passes"]]
            if later and told is None:
                told = {"at": self._lines[number][0], "own_at": later[0][0], "used_at": use["at"]}
                told["alone"] = (use["is_cleared"] and all(len(each) == 1 for each in later)) or None
        use = {"by": id(optimizer), "at": at, "passes": recorder.counts.backwards, "is_cleared": False}
        own = set(map(id, parameters_of(optimizer)))
        for other, theirs in self._held.items():
            if other is not optimizer and own.isdisjoint(map(id, parameters_of(other))):
                theirs.used |= {n: dict(use) for n in theirs.passes if n in held.passes and n not in theirs.used}
        self._held.put(optimizer, HeldPasses())
        return told or (False if held.was_cleared else None)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _versions(optimizer: Any) -> list[Any]:
    """What changes if gradients do, at no cost on a device."""
    grads = [parameter.grad for parameter in parameters_of(optimizer)]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


mixed_passes = MixedPasses()
