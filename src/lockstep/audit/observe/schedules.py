"""Observes schedulers of learning rates: for how many steps each was made, and how often each steps."""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

from lockstep.audit.observe import places
from lockstep.audit.observe.data import After
from lockstep.audit.observe.objects import Registry
from lockstep.audit.observe.recorder import recorder

_EACH_LINE = 100
_LEAST, _ZERO = 3, 0.01
_HORIZONS = ("total_steps", "T_max", "total_iters")


@dataclasses.dataclass
class Scheduler:
    """What is known of a scheduler."""

    number: int
    name: str
    made_at: list[str | int] | None
    horizon: int | None = None
    """For how many of its steps the schedule was made."""
    total: int = 0
    """Its steps."""
    calls: int = 0
    """Its steps since the last step of any optimizer."""
    before: int | None = None
    at: list[str | int] | None = None
    is_outer: bool = False
    """Whether the script or a framework steps it, and not another scheduler."""
    optimizer_steps: int = 0
    """Steps of its optimizer."""


_schedulers: Registry[Scheduler] = Registry()
_all: list[Scheduler] = []
_depth = 0


def begins(scheduler: Any, *_: Any, **__: Any) -> After:
    """A scheduler's first step, in its constructor, which is not the script's."""
    global _depth
    _depth += 1
    known = _know(scheduler)
    known.horizon = recorder.guard("lengths of schedules", _horizon, scheduler)
    # A function that was given the number of steps has not computed it: its caller has.
    at = places.outside(lambda frame: bool(known.horizon and known.horizon in _numbers(frame)))
    known.made_at = at[0] if at else None
    return _leave


def _numbers(frame: Any) -> list[int]:
    return [each for each in places.arguments(frame) if isinstance(each, int)]


def _know(scheduler: Any) -> Scheduler:
    known = _schedulers.get(scheduler)
    if known is None:
        known = _schedulers.put(scheduler, Scheduler(len(_all), type(scheduler).__name__, None))
        _all.append(known)
    return known


def _leave(result: Any, error: BaseException | None) -> None:
    global _depth
    _depth -= 1


def _horizon(scheduler: Any) -> int | None:
    """Also of the functions of transformers, which are partial functions with the number of steps."""
    function = next(iter(getattr(scheduler, "lr_lambdas", ())), None)
    keywords = getattr(function, "keywords", {})
    found = [getattr(scheduler, name, None) for name in _HORIZONS] + [keywords.get("num_training_steps")]
    known = next((int(value) for value in found if isinstance(value, (int, float)) and value > 0), None)
    return known or (_end_of(function) if isinstance(function, FunctionType) else None)


def _end_of(function: FunctionType) -> int | None:
    """Of the numbers that a factor of the learning rate is made from: the step from which on the factor is zero."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for number in sorted({each for each in cells if isinstance(each, int) and each > _LEAST}):
        later = (number, 4 * number // 3, 2 * number)
        if function(number // 2) > _ZERO and all(abs(function(n)) <= _ZERO for n in later):
            return number
    return None


def steps(scheduler: Any, *arguments: Any, **named: Any) -> After:
    """The step of any scheduler. A scheduler may step others within its step."""
    global _depth
    _depth += 1
    known = _know(scheduler)
    known.total += 1
    if _depth > 1:
        return _leave
    known.is_outer = True
    known.horizon = known.horizon or _horizon(scheduler)
    known.calls += 1
    known.at = places.here()
    metric = next(iter([*arguments, *named.values()]), None) if "Plateau" in known.name else None

    def after(result: Any, error: BaseException | None) -> None:
        _leave(result, error)
        if metric is not None and error is None:
            _tell(scheduler, known, float(metric))

    return after


def _tell(scheduler: Any, known: Scheduler, metric: float | None = None) -> None:
    optimizer = getattr(scheduler, "optimizer", None)
    event: dict[str, Any] = {"at": known.at, "scheduler": known.number, "class": known.name, "per_step": known.calls}
    event |= {"metric": metric}
    event |= {"lr": [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else None}
    recorder.emit("scheduler", limit=_EACH_LINE, **event)


def after_step(optimizer: Any) -> None:
    """After an optimizer's step: how often schedulers stepped since the step before."""
    for scheduler, known in _schedulers.items():
        if known.calls != (known.before or 0):
            _tell(scheduler, known)
        known.before, known.calls = known.calls, 0
        inner = getattr(scheduler, "optimizer", None)
        known.optimizer_steps += getattr(inner, "optimizer", inner) is optimizer


def at_exit() -> dict[str, Any]:
    """All schedules, and what came after the last optimizer step."""
    for scheduler, known in _schedulers.items():
        if known.calls != (known.before or 0):
            _tell(scheduler, known)
    for known in _all:
        event: dict[str, Any] = {"at": known.at, "made_at": known.made_at, "name": known.name, "horizon": known.horizon}
        event |= {"steps": known.total, "is_outer": known.is_outer, "optimizer_steps": known.optimizer_steps}
        recorder.emit("schedule", **event)
    return {}
