"""The search space of a sweep: the keys of grid.yaml, checked against the config before anything starts."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.configs import config_layers
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError, did_you_mean
from lockstep.trainer import foreign

SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("median", "hyperband", "none")
DIRECTIONS = ("max", "min")
_SETTINGS = {"sampler": SAMPLERS, "pruner": PRUNERS, "direction": DIRECTIONS}
_KNOWN = ("keys", "metric", *_SETTINGS)
_OF_RANGE = ("low", "high", "log", "step")
_FEW, _LISTED = 20, 100_000  # values


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    """Whether to sample the logarithm uniformly."""
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        """True if the numbers are whole."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    def values(self) -> list[Any] | None:
        """All values. None: there are too many to list."""
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None or (self.high - self.low) / step > _LISTED:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self.low + number * step for number in range(count)]


@dataclass(frozen=True)
class Grid:
    """The content of grid.yaml."""

    path: Path
    keys: dict[str, list[Any] | Range]
    """For each key of the config, its values."""
    sampler: str
    pruner: str
    metric: str
    """A name of the log, such as `eval/accuracy`."""
    direction: str
    """`max` or `min`."""

    def combinations(self) -> list[dict[str, Any]]:
        """The number of combinations of values, for the sampler `grid`; the last key changes fastest."""
        lists = [values if isinstance(values, list) else values.values() or [] for values in self.keys.values()]
        return [dict(zip(self.keys, chosen, strict=True)) for chosen in itertools.product(*lists)]

    def spec(self) -> dict[str, Any]:
        """What identifies a sweep, as JSON: a sweep with other values is a different one."""
        keys = {key: values if isinstance(values, list) else vars(values) for key, values in self.keys.items()}
        return {"keys": keys} | {name: getattr(self, name) for name in ("sampler", "pruner", "metric", "direction")}


def overrides_of(values: dict[str, Any]) -> list[str]:
    """KEY=VALUE for each value, in the form of the command line."""
    return [f"{key}={_written(value)}" for key, value in values.items()]


def _written(value: Any) -> str:
    """A value in YAML on one line. A text that YAML would read as something else, such as 1e-3, gets quotes."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.:/-]*", value) is not None
    return value if is_plain and config_layers.parsed(value) == value else json.dumps(value)


def read(path: Path, target: str, overrides: Sequence[str], config: RunConfig) -> Grid:
    """Read grid.yaml, and check each of its values as `lockstep train` checks the config.

    Args:
        config: that of `target` and `overrides`.

    Raises:
        UsageError: the file has faults. The error names all of them.
    """
    raw = config_layers.read_yaml(path)
    faults = [f"{name}: is not a setting; {did_you_mean(name, _KNOWN)}known are: {', '.join(_KNOWN)}" for name in raw
              if name not in _KNOWN]  # fmt: skip
    for name, known in _SETTINGS.items():
        if name in raw and raw[name] not in known:
            faults.append(f"{name}: {raw[name]!r} is not one of {', '.join(known)}")
    given = raw.get("keys")
    if not isinstance(given, dict) or not given:
        faults.append(
            "keys: must be a mapping from keys of the config to lists or ranges, such as optim.lr: [0.1, 0.01]"
        )
        given = {}
    keys = dict[str, list[Any] | Range]()
    for key, value in given.items():
        found = _values(value)
        if isinstance(found, str):
            faults.append(f"keys: {key}: {found}")
            continue
        keys[str(key)] = found
        if raw.get("sampler") == "grid" and isinstance(found, Range) and found.values() is None:
            faults.append(f"keys: {key}: the sampler grid needs a list, or a range with a step")
        faults += [f"keys: {key}: overlaps with {other}" for other in given if str(key).startswith(f"{other}.")]
    _raise(path, faults)
    metric, direction = _aim(path, raw, config)
    grid = Grid(path, keys, raw.get("sampler") or _sampler(keys), raw.get("pruner", "median"), metric, direction)
    _check_values(grid, target, overrides)
    return grid


def _sampler(keys: dict[str, list[Any] | Range]) -> str:
    """The default sampler: all combinations if there are few, which random samplers would draw repeatedly."""
    counts = [
        len(values if isinstance(values, list) else values.values() or range(_FEW + 1)) for values in keys.values()
    ]
    return "grid" if math.prod(counts) <= _FEW else "tpe"


def _values(value: Any) -> list[Any] | Range | str:
    """The values of a key; or a text with the fault."""
    if isinstance(value, list):
        texts = [json.dumps(one, sort_keys=True, default=str) for one in value]
        if any(isinstance(one, datetime.date) for one in value):
            return "a date is not a value: put it in quotes"
        twice = [text for number, text in enumerate(texts) if text in texts[:number]]
        return f"{twice[0]} occurs twice" if twice else value or "the list is empty"
    if not isinstance(value, dict):
        return f"{value!r} is neither a list nor a range {{low: ..., high: ...}}"
    unknown = [name for name in value if name not in _OF_RANGE]
    if unknown:
        return f"a range has no {unknown[0]!r}; {did_you_mean(unknown[0], _OF_RANGE)}known are: {', '.join(_OF_RANGE)}"
    numbers: list[Any] = [value.get("low"), value.get("high"), *([value["step"]] if "step" in value else [])]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        return "low, high and step must be numbers"
    found = Range(value["low"], value["high"], value.get("log", False), value.get("step"))
    if type(found.log) is not bool:
        return f"log: {found.log!r} is not true or false"
    if not found.low < found.high:
        return f"low ({found.low:g}) must be below high ({found.high:g})"
    if found.log and (found.low <= 0 or found.step is not None):
        return "with log: true, low must be above 0, and step is not allowed"
    if found.step is not None and found.step <= 0:
        return "step must be above 0"
    count = 0 if found.step is None else math.floor((found.high - found.low) / found.step + 1e-9)
    return found if found.step is None else replace(found, high=found.low + count * found.step)


def _aim(path: Path, raw: dict[str, Any], config: RunConfig) -> tuple[str, str]:
    """The metric and the direction: from grid.yaml, else from `checkpoint.keep_best`."""
    kept = config.checkpoint.best
    metric = raw.get("metric", kept[1] if kept else None)
    if not isinstance(metric, str):
        remedy = "add a line such as metric: eval/accuracy, or set checkpoint.keep_best"
        what = "is missing, and the config keeps no best checkpoint" if metric is None else f"{metric!r} is not a name"
        raise UsageError(f"metric: {what}", where=str(path), remedy=remedy)
    direction = raw.get("direction", kept[0] if kept and kept[1] == metric else None)
    if direction is None:
        remedy = "add the line direction: max, or direction: min"
        raise UsageError(f"direction: unknown whether a higher {metric} is better", where=str(path), remedy=remedy)
    return metric, str(direction)


def _check_values(grid: Grid, target: str, overrides: Sequence[str]) -> None:
    """Check each value of each key, with the first values of the others."""
    given = {override.partition("=")[0] for override in overrides}
    faults = [f"keys: {key}: the command line also sets it" for key in grid.keys if key in given]
    first = {key: values[0] if isinstance(values, list) else values.low for key, values in grid.keys.items()}
    for key, value in _each(grid):
        try:
            config = foreign.load(target, [*overrides, *overrides_of(first | {key: value})])
            _check_config(grid, config, key, value)
        except UsageError as error:
            lines = str(error).removeprefix("the configuration has errors:\n  ").splitlines()
            faults += [re.sub(r"^\s*command line: ", "keys: ", line).strip() for line in lines]
    _raise(grid.path, list(dict.fromkeys(faults)))


def _each(grid: Grid) -> Iterator[tuple[str, Any]]:
    """Each value of a list, and the ends of each range with the first step, with its key."""
    for key, values in grid.keys.items():
        ends = [] if isinstance(values, list) else [values.low, values.low + (values.step or 0), values.high]
        for value in values if isinstance(values, list) else dict.fromkeys(ends):
            yield key, value


def _check_config(grid: Grid, config: RunConfig, key: str, value: Any) -> None:
    """Check what `train` only finds after importing torch, and what a sweep needs from a run."""
    train, kind = config.train, str(config.task.get("kind"))
    if grid.metric.startswith("eval/") and not (train.eval_every_epochs or train.eval_every_steps):
        what, remedy = f"the metric is {grid.metric}, but the run never evaluates", "set train.eval_every_epochs=1"
        raise UsageError(what, where="train", remedy=remedy)
    if "json_lines" not in config.log.writers:
        what, remedy = "the run writes no metrics.jsonl, which the sweep reads", "add json_lines to log.writers"
        raise UsageError(what, where="log.writers", remedy=remedy)
    if key == "optim.name":
        from lockstep.core import optimizer_class

        optimizer_class.find(str(value))
    if key.startswith("task.") and ".py:" in kind:  # a user's class checks its keys when it is created
        from lockstep.trainer.trainer import Trainer

        Trainer(config, quiet=True).task()


def _raise(path: Path, faults: list[str]) -> None:
    if faults:
        raise UsageError("\n  ".join([f"{path} has errors:", *faults]))
