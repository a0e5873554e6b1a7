"""Observes where evaluations begin, and the weights and buffers of the model there."""

from __future__ import annotations

import dataclasses
from typing import Any

from lockstep_audit.observe import digests, places
from lockstep_audit.observe.recorder import recorder
from lockstep_audit.observe.torch_state import has_other_ranks

_MOST = {True: 20, False: 10}
"""The number of evaluations after training that are examined, and of those that follow another evaluation."""
_LOADED = 50
"""The most that are examined if weights were loaded before."""
_FRAMES = 6


@dataclasses.dataclass
class Evaluation:
    """What came before the next evaluation of a model."""

    is_due: bool = False
    """Whether training, eval() or a load came after the last evaluation began."""
    trained: bool = False
    """Whether a training forward pass came after it."""
    changed: dict[str, Any] | None = None
    """Where weights were loaded since, and their digests before the load."""
    looks: dict[bool, int] = dataclasses.field(default_factory=lambda: {True: 0, False: 0})

    def train(self) -> None:
        """A training forward pass."""
        self.is_due, self.trained, self.changed = True, True, None


def _parameters(inner: Any) -> dict[str, str | None]:
    return digests.of_tensors(dict(inner.named_parameters()))


def _path() -> list[list[str | int]]:
    return places.outside(lambda frame: False, _FRAMES)


def load(told: Evaluation, inner: Any) -> None:
    """load_state_dict of a DDP model, or of a submodule, begins."""
    if sum(told.looks.values()) < _LOADED and has_other_ranks():
        before = told.changed["before"] if told.changed else _parameters(inner)
        told.is_due, told.changed = True, {"at": _path(), "before": before}


def begin(told: Evaluation, how: str, number: int, inner: Any, inputs: Any) -> None:
    """The first forward pass in evaluation mode since training, eval() or a load: record buffers and weights."""
    trained, changed = told.trained, told.changed
    told.is_due, told.trained, told.changed = False, False, None
    buffers = dict(inner.named_buffers())
    if trained and buffers and how != "fsdp1":
        recorder.emit("buffers", limit=50, at=places.here(), model=number, digests=digests.of_tensors(buffers))
    told.looks[trained] += 1
    is_asked = told.looks[trained] <= _MOST[trained] or (changed and told.looks[trained] <= _LOADED)
    if how == "ddp" and is_asked and has_other_ranks():
        path = _path()
        keys: dict[str, Any] = {"model": number, "digests": _parameters(inner), "path": path, "changed": changed}
        keys["inputs"] = digests.of_numbers(digests.of_batch(inputs))
        recorder.emit("weights", at=path[0] if path else None, **keys)
