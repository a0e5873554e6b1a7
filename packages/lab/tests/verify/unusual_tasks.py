"""The unusual tasks, and how the command line takes them."""

from __future__ import annotations

import importlib
from pathlib import Path

from lockstep.core.task import Task

MODULES = ("unusual_models", "unusual_losses", "unusual_data", "unusual_kinds")
COMMON = {"optim.lr": "0.01", "batch.global": "40", "device": "cpu"}


def tasks() -> dict[str, type[Task]]:
    """All unusual tasks by name, in the order of their files."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(f"packages.lab.tests.verify.{module_name}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
            if own and not name.startswith("_"):
                found[name] = value
    return found


def arguments(task: type[Task]) -> list[str]:
    """The target of the command and its overrides: those of all tasks, and the task's own in `overrides`."""
    overrides = COMMON | getattr(task, "overrides", {})
    path = Path(__file__).resolve().parent / f"{task.__module__.rpartition('.')[2]}.py"
    return [f"{path}:{task.__name__}", *(f"{key}={value}" for key, value in overrides.items())]
