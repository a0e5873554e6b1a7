"""What tasks of other people's code share: the config that the code implies, and when they learn of the real one."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.code_files import LOCKSTEP, PYTHON, library_of
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from lockstep.core.part import Part, Training
from lockstep.core.task import Task
from lockstep.core.task_checks import line_of as line_of

Keys = dict[str, Any]
"""Values of the config by dotted path, such as `batch.global`."""
DOCS = "docs/adapters.md"
_LIBRARIES = (LOCKSTEP, PYTHON, "pytorch_lightning", "lightning", "torch", "torchmetrics", "transformers")


class Foreign(Task):
    """A task made of another library's objects."""

    is_prepared = False
    """True if `prepare_data` was called on this node."""
    foreign: Any
    """The object whose class is the user's code."""

    implied: Keys
    """What the code says of the config, by dotted path. A key that the config sets takes precedence."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Lines for the log: what was understood, and what is left out."""
        self.clock = Clock()

    def prepare_data(self) -> None:
        """Download what the data need. Called once on each node, before anything else; elsewhere it does nothing."""

    def configured(self, config: RunConfig) -> None:
        """Learn the config of the training, before the model is made."""


class Clock(Part):
    """How far the training is, for code that asks. It keeps no state: the training tells it."""

    def __init__(self) -> None:
        self.step, self.steps_per_epoch, self.last_step = 0, 1, 0

    def start(self, training: Training) -> None:
        self.steps_per_epoch, self.last_step = training.steps_per_epoch, training.last_step
        self.after_step(training)

    def after_step(self, training: Training) -> None:
        self.step = training.step


def with_implied(config: RunConfig, implied: Mapping[str, Any]) -> RunConfig:
    """`config`, with the values of `implied` for keys that it does not set.

    Of keys that exclude each other, such as `train.epochs` and `train.steps`, none is taken where the config sets one.
    """
    raw = config.model_dump(by_alias=True, exclude_unset=True)
    for path, value in implied.items():
        section, _, key = path.rpartition(".")
        values = raw.setdefault(section, {}) if section else raw
        if key not in values and not _excluding(section, key) & values.keys():
            values[key] = value
    return RunConfig.model_validate(raw)


def _excluding(section: str, key: str) -> set[str]:
    if section == "batch":
        return {"per_rank"}
    kind: Any = RunConfig.model_fields[section].annotation if section else None
    pairs: Sequence[tuple[str, str]] = getattr(kind, "alternatives", ())
    return {other for pair in pairs if key in pair for other in pair}


def users_line() -> str:
    """File and line of the nearest caller that is the user's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and library_of(frame.f_code.co_filename) in _LIBRARIES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_with(function: Any, text: str) -> str:
    """File and line at which the code of a function has `text`; the function's first line where it does not."""
    first = line_of(function)
    path, _, number = first.rpartition(":")
    lines = linecache.getlines(path) if number.isdigit() else []
    for place in range(int(number or 0), len(lines) + 1) if lines else ():
        if text in lines[place - 1]:
            return f"{path}:{place}"
    return first


def refused(what: str, where: str, remedy: str) -> UsageError:
    """The error for something that cannot be kept."""
    return UsageError(what, where=where, remedy=f"{remedy} ({DOCS})")
