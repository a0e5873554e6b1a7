"""What tasks of other people's code share: the config that the code implies, and when they learn of the real one."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lockstep.core.code_files import LOCKSTEP, PYTHON, library_of
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from lockstep.core.part import Part, Training
from lockstep.core.task import Task
from lockstep.core.task_checks import line_of as line_of

Keys = dict[str, Any]
"""Values of the config by dotted path, such as `batch.global`."""
DOCS = "lockstep --explain adapters"
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
        self.clock = TrainingClock()

    def prepare_data(self) -> None:
        """Download what the data need. Called once on each node, before anything else; elsewhere it does nothing."""

    def configured(self, config: RunConfig) -> None:
        """Learn the config of the training, before the model is made."""


class TrainingClock(Part):
    """How far the training is, for code that asks. It keeps no state: the training sets it."""

    def __init__(self) -> None:
        self.step, self.steps_per_epoch, self.last_step = 0, 1, 0

    def start(self, training: Training) -> None:
        self.steps_per_epoch, self.last_step = training.steps_per_epoch, training.last_step
        self.after_step(training)

    def after_step(self, training: Training) -> None:
        self.step = training.step


def with_implied(config: RunConfig, implied: Mapping[str, Any]) -> RunConfig:
    """`config`, with the values of `implied` for keys that it does not set.

    If keys exclude each other, such as `train.epochs` and `train.steps`, and the config sets one, none is taken.

    Raises:
        UsageError: a value of the config and a value of the code exclude each other.
    """
    raw = config.model_dump(by_alias=True, exclude_unset=True)
    for path, value in implied.items():
        section, _, key = path.rpartition(".")
        values = raw.setdefault(section, {}) if section else raw
        if path == "batch.micro":  # the config may set a smaller global batch
            value = min(value, values.get("global", value))
        if key not in values and not _excluding(section, key) & values.keys():
            values[key] = value
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        text = "\n  ".join(["the config does not match what the code says:", *faults])
        said = ", ".join(f"{path}={value!r}" for path, value in sorted(implied.items()))
        raise UsageError(text, remedy=f"change the key, or set the other one; the code says {said} ({DOCS})") from error


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
    """File and line at which the code of a function has `text`; the function's first line if it does not."""
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


def together(looks: Sequence[Callable[[], object]]) -> list[UsageError]:
    """The errors of several looks at the user's code, so that one message can name all of them."""
    errors = []
    for look in looks:
        try:
            look()
        except UsageError as error:
            errors.append(error)
    return errors


def raise_all(errors: Sequence[UsageError]) -> None:
    """Raise the errors, if there are any, as one.

    Raises:
        UsageError: of several errors, it names each with its place and its remedy.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        texts = [str(error).replace("\n", "\n  ") for error in errors]
        raise UsageError("\n  ".join([f"{len(errors)} things prevent this:", *texts])) from errors[0]
