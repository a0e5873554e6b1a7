"""Observes schedulers of learning rates: for how many steps each was made, and how often each steps."""

from __future__ import annotations

import dataclasses
import dis
import functools
import math
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from lockstep_audit.observe import places
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_EACH_LINE = 100
_LEAST, _ZERO, _NOISE = 3, 0.01, 1e-9
_HORIZONS = ("total_steps", "T_max", "total_iters")
_CHANGES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_DEREF", "STORE_GLOBAL", "DELETE_SUBSCR")
_SIDE_EFFECTS = ("print", "append", "write", "random", "rand", "randn", "uniform", "next", "pop", "update")


@dataclasses.dataclass
class Scheduler:
    """What is known about a scheduler."""

    number: int
    name: str
    made_at: list[str | int] | None
    horizon: int | None = None
    """For how many of its steps the schedule was made."""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """For a function of the script: numbers in it that may be its length."""
    total: int = 0
    """Its steps."""
    calls: int = 0
    """Its steps since the last step of any optimizer."""
    before: int | None = None
    at: list[str | int] | None = None
    is_outer: bool = False
    """Whether the script or a framework steps it, instead of another scheduler."""
    optimizer_steps: int = 0
    """Steps of its optimizer."""


_schedulers: Registry[Scheduler] = Registry()
_all: list[Scheduler] = []
_depth = 0


def begins(scheduler: Any, *_: Any, **__: Any) -> After:
    """A scheduler's first step, in its constructor, which the script did not make."""
    global _depth
    _depth += 1
    known = _know(scheduler)
    recorder.guard("lengths of schedules", _measure, scheduler, known)
    # A function that receives the number of steps did not compute it: its caller did.
    told = {known.horizon} if known.horizon else {*known.lengths}
    at = places.outside(lambda frame: not told.isdisjoint(_numbers(frame)))
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


def _measure(scheduler: Any, known: Scheduler) -> None:
    """The length of a schedule. For a function of the script: candidates, and where the factor stays at zero."""
    known.horizon, known.lengths = _horizon(scheduler), _lengths(scheduler)
    for number in known.lengths if not known.horizon else ():
        factors = [_factor(scheduler.lr_lambdas[0], n) for n in (number, 4 * number // 3, 2 * number)]
        if all(factor is not None and abs(factor) <= _ZERO for factor in factors):
            known.horizon = number
            return


def _horizon(scheduler: Any) -> int | None:
    """Also for the functions of transformers, which are partial functions with the number of steps."""
    function = next(iter(getattr(scheduler, "lr_lambdas", ())), None)
    keywords = getattr(function, "keywords", {})
    found = [getattr(scheduler, name, None) for name in _HORIZONS] + [keywords.get("num_training_steps")]
    return next((int(value) for value in found if isinstance(value, (int, float)) and value > 0), None)


def _lengths(scheduler: Any) -> list[int]:
    """The numbers in a function of the script at which the learning-rate factor stops falling.

    A function that may have side effects is not called.
    """
    function = next(iter(getattr(scheduler, "lr_lambdas", ())), None)
    found = list(_within(function)) if function is not None else []
    if any(isinstance(each, CodeType) and _may_change(each) for each in found):
        return []
    numbers = {int(n) for n in found if not isinstance(n, CodeType) and n > _LEAST and n == int(n)}
    return [number for number in sorted(numbers)[:_EACH_LINE] if _ends_at(function, number)]


def _within(thing: Any, depth: int = 4) -> Iterator[Any]:
    """The numbers that a function can use: from its closure, defaults, globals, attributes, partials and code."""
    if isinstance(thing, functools.partial):
        values = [thing.func, *thing.args, *thing.keywords.values()]
    else:
        method = thing if isinstance(thing, (FunctionType, MethodType)) else type(thing).__call__
        function: Any = getattr(method, "__func__", method)
        if not isinstance(function, FunctionType):
            return
        yield function.__code__
        names = function.__code__.co_names
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        values += [function.__globals__[name] for name in names if name in function.__globals__]
        owners = [getattr(each, "__dict__", {}) for each in (getattr(method, "__self__", thing), *values)]
        values += [kept[name] for kept in owners for name in names if name in kept]
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield value
        elif depth and isinstance(value, (FunctionType, MethodType, functools.partial)):
            yield from _within(value, depth - 1)


def _may_change(code: CodeType) -> bool:
    """True if the code of a function has side effects, draws random numbers, or prints."""
    sets = any(each.opname in _CHANGES for each in dis.get_instructions(code))
    return sets or any(name in _SIDE_EFFECTS for name in code.co_names)


def _ends_at(function: Any, number: int) -> bool:
    """True if a factor falls until a step, and then stays, rises again, or is no longer defined."""
    half, end, later = (_factor(function, step) for step in (number // 2, number, 2 * number))
    if half is None or end is None or end >= half:
        return False
    return later is None or later >= end - _NOISE or later <= 0


def _factor(function: Any, step: int) -> float | None:
    """The factor at a step. None: it is undefined, such as a root of a negative number."""
    try:
        return float(function(step))
    except Exception:
        return None


def steps(scheduler: Any, *arguments: Any, **named: Any) -> After:
    """The step of any scheduler. A scheduler may step others within its own step."""
    global _depth
    _depth += 1
    known = _know(scheduler)
    known.total += 1
    if _depth > 1:
        return _leave
    known.horizon = known.horizon or (None if known.is_outer else _horizon(scheduler))
    known.is_outer = True
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
    """After an optimizer's step: how often schedulers stepped since the previous one."""
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
        event |= {"lengths": known.lengths or None, "steps": known.total, "is_outer": known.is_outer}
        event |= {"optimizer_steps": known.optimizer_steps}
        recorder.emit("schedule", **event)
    return {}
