"""Convert Lightning callbacks to config keys. Each argument is converted, named in the log, or refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from lockstep.core.foreign_task import Keys

_PART = "write a lockstep.Part, lockstep --explain adapters"
KEPT: dict[str, frozenset[str]] = {
    "EarlyStopping": frozenset({"monitor", "min_delta", "patience", "mode", "stopping_threshold"}),
    "ModelCheckpoint": frozenset({"monitor", "mode"}),
    "Timer": frozenset({"duration"}),
    "GradientAccumulationScheduler": frozenset({"scheduling"}),
}
"""By callback, the arguments that become config keys."""
NAMED: dict[str, frozenset[str]] = {
    "EarlyStopping": frozenset(
        {"verbose", "strict", "check_finite", "check_on_train_epoch_end", "log_rank_zero_only"},
    ),
    "ModelCheckpoint": frozenset(
        """
        dirpath filename verbose save_last save_top_k save_on_exception save_weights_only auto_insert_metric_name
        every_n_train_steps train_time_interval every_n_epochs save_on_train_epoch_end enable_version_counter
        """.split()  # noqa: SIM905 - a table of words
    ),
    "Timer": frozenset({"interval", "verbose"}),
}
"""By callback, the arguments that do not change any step. The log names those that are set."""
REFUSED: dict[str, dict[str, str]] = {
    "EarlyStopping": {"divergence_threshold": "write a lockstep.Part with `after_evaluation` and request_stop(reason)"}
}
"""By callback, the arguments that must not be set, with what to do instead."""
_SHOWING = ("LearningRateMonitor", "ModelSummary", "DeviceStatsMonitor", "ProgressBar")
"""Callbacks that only show something, with their subclasses."""
_NOT_FINITE = "EarlyStopping(check_finite=True): a result that is not finite does not count as an improvement"


def translate(given: Any, keys: Keys, faults: list[str], ignored: list[str]) -> None:
    """Turn callbacks into `keys`. Add to `faults` what is not supported, and to `ignored` what does not change any
    step."""
    for one in given if isinstance(given, list | tuple) else [given] if given else []:
        names = _names(type(one))
        kind = next((name for name in names if name in KEPT), "")
        if not any(name in _SHOWING for name in names) and (not kind or type(one).__name__ != kind):
            faults.append(f"the callback {type(one).__name__}: {_PART}")
            continue
        if not kind:
            ignored.append(type(one).__name__)
            continue
        changed = _changed(one)
        for name in sorted(changed.keys() - KEPT[kind] - NAMED.get(kind, frozenset())):
            remedy = REFUSED.get(kind, {}).get(name, "has no counterpart")
            faults.append(f"{kind}({name}={changed[name]!r}): {remedy}")
        named = [f"{name}={changed[name]!r}" for name in sorted(changed.keys() & NAMED.get(kind, frozenset()))]
        ignored += [f"{kind}({', '.join(named)})"] if named else []
        ignored += [_NOT_FINITE] if kind == "EarlyStopping" and one.check_finite else []
        if kind == "EarlyStopping" and one.min_delta * (1 if one.mode == "max" else -1) < 0:
            faults.append(f"EarlyStopping(min_delta={changed['min_delta']!r}): give a number that is not negative")
            continue
        for key, value in _KEYS[kind](one).items():
            if keys.get(key, value) != value:
                faults.append(f"two callbacks set {key}, to {keys[key]!r} and {value!r}; keep one of them")
            keys[key] = value


def _names(kind: type) -> list[str]:
    """The names of the Lightning classes that a class is or derives from."""
    return [one.__name__ for one in kind.__mro__ if one.__module__.split(".")[0] in ("pytorch_lightning", "lightning")]


def _changed(one: Any) -> dict[str, Any]:
    """The arguments of a callback that differ from their defaults, by name."""
    parameters = list(inspect.signature(type(one).__init__).parameters.values())[1:]
    needed = {each.name: argument(one, each.name) for each in parameters if each.default is each.empty}
    plain = type(one)(**needed)
    values = {each.name: (argument(one, each.name), argument(plain, each.name)) for each in parameters}
    return {name: value for name, (value, default) in values.items() if name in needed or value != default}


def argument(one: Any, name: str) -> Any:
    """An argument of a Lightning callback, which stores it under its name, or under its name with a leading
    underscore."""
    return getattr(one, name) if hasattr(one, name) else getattr(one, f"_{name}")


def _stops(one: Any) -> Keys:
    rule: dict[str, Any] = {"metric": f"eval/{one.monitor}", "mode": one.mode, "patience": max(1, one.patience)}
    rule["min_delta"] = abs(float(one.min_delta))
    if one.stopping_threshold is not None:  # in Lightning, a result equal to it does not stop the run
        better = math.inf if one.mode == "max" else -math.inf
        rule["target"] = math.nextafter(float(one.stopping_threshold), better)
    return {"train.stop_when": rule}


def _keeps(one: Any) -> Keys:
    return {"checkpoint.keep_best": f"{one.mode} eval/{one.monitor}"} if one.monitor else {}


def _ends(one: Any) -> Keys:
    seconds = one._duration
    return {} if seconds is None else {"train.max_time": float(seconds)}


_KEYS: dict[str, Callable[[Any], Keys]] = {
    "EarlyStopping": _stops,
    "ModelCheckpoint": _keeps,
    "Timer": _ends,
    "GradientAccumulationScheduler": lambda one: {},  # `trainer_arguments.accumulated` reads it
}
