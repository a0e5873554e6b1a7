"""Observes parameters that a script reads from modules while it trains a model past its wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe import module_creation, places
from lockstep_audit.observe.recorder import recorder


def outside(module: Any) -> list[str | int] | None:
    """The innermost line of the user outside the methods of a module and of its submodules."""
    parts = {id(part) for part in module.modules()}

    def is_inside(frame: Any) -> bool:
        kind = frame.f_code.co_qualname.rpartition(".")[0]
        return bool(kind) and not kind.endswith("<locals>") and id(module_creation.owner_of(frame)) in parts

    return next(iter(places.outside(is_inside)), None)


class Reads:
    """Replaces Module.__getattr__ for a few steps, and only once, because it slows down each attribute access.

    Args:
        used: receives each parameter that is read while gradients are on.
    """

    def __init__(self, used: Callable[[Any], None]) -> None:
        self._used, self._until = used, 0
        self._original: Any = None

    def begin(self, steps: int) -> None:
        """Watch the steps that follow, unless that was done before."""
        self._until = self._until or recorder.counts.optimizer_steps + 1 + steps

    def set(self, is_wanted: bool) -> None:
        """Start or stop watching."""
        kind: Any = torch.nn.Module
        is_on = is_wanted and recorder.counts.optimizer_steps < self._until and not recorder.is_compiled
        if is_on and self._original is None:
            self._original = original = kind.__getattr__

            def get(module: Any, name: str) -> Any:
                found = original(module, name)
                if isinstance(found, torch.nn.Parameter) and torch.is_grad_enabled():
                    recorder.guard("parameters used past a wrapper", self._used, found)
                return found

            kind.__getattr__ = get
        elif self._original is not None and not is_on:
            kind.__getattr__, self._original = self._original, None
