"""From a config's task section to a Task: the shipped kinds, and classes in a user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError, did_you_mean
from lockstep.tasks.task import Task

_SHIPPED = {"toy": "toy:Toy", "classification": "classification:Classification", "text": "text:Text"}


def build_task(section: dict[str, Any], train: str | None, evaluation: str | None) -> Task:
    """Make the task that `section` describes: `kind`, and the constructor's arguments.

    A constructor that has the parameters `train` or `eval` also gets the config's data.train and data.eval.

    Raises:
        UsageError: no such file or class, or arguments that its constructor does not take; names what it takes.
    """
    if "kind" not in section:
        raise UsageError("the config names no task", where="task", remedy="set task.kind, or give a Task object to fit, evaluate or predict")
    arguments = {key: value for key, value in section.items() if key != "kind"}
    kind = section["kind"]
    task_class = _shipped(_SHIPPED[kind]) if kind in _SHIPPED else _from_file(kind)
    signature = inspect.signature(task_class)
    takes = signature.parameters
    arguments |= {name: value for name, value in (("train", train), ("eval", evaluation)) if name in takes and value is not None}
    any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    known = [name for name, parameter in takes.items() if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)]
    for key in arguments:
        if key not in known and not any_key:
            hint = did_you_mean(key, known)
            raise UsageError("unknown key", where=f"task.{key}", remedy=f"{hint}{task_class.__name__} takes: {', '.join(known) or 'no keys'}")
    missing = [name for name in known if takes[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        keys = ", ".join(f"data.{name}" if name in ("train", "eval") else f"task.{name}" for name in missing)
        raise UsageError(f"{task_class.__name__} needs {keys}", where="config", remedy=f"give {keys}, in the file or as key=value")
    return task_class(**arguments)


def _shipped(home: str) -> type[Task]:
    module, _, name = home.partition(":")
    task_class: type[Task] = getattr(importlib.import_module(f"lockstep.tasks.{module}"), name)
    return task_class


def _from_file(kind: str) -> type[Task]:
    path, _, name = kind.rpartition(":")
    if not Path(path).is_file():
        raise UsageError("no such file", where=path, remedy="the task's Python file must be where it was when the run began")
    module_name = f"lockstep_user_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where pickle looks for the classes of loader workers
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        tasks = [n for n, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Task) and value is not Task]
        raise UsageError(f"no Task class {name!r}", where=path, remedy=f"the file has: {', '.join(tasks) or 'none'}")
    if inspect.isabstract(found):
        raise UsageError(f"{name} lacks {', '.join(sorted(found.__abstractmethods__))}", where=path, remedy="write these methods")
    return found
