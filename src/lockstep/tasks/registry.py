"""From a config's task section to a Task: the shipped kinds, and classes in a user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import UsageError, did_you_mean
from lockstep.tasks.task import Task

_SHIPPED = {"toy": "toy.task:Toy", "classification": "classification.task:Classification", "text": "text.task:Text"}


def build_task(section: dict[str, Any], train: str | None, evaluation: str | None) -> Task:
    """Make the task that `section` describes: `kind`, and the constructor's arguments.

    A constructor that has the parameters `train` or `eval`, or takes any, also gets the config's data.train and
    data.eval.

    Raises:
        UsageError: no such file or class, or arguments (also data.train and data.eval) that its constructor does not
            take; names what it takes.
    """
    if "kind" not in section:
        raise UsageError(
            "the config names no task",
            where="task",
            remedy="set task.kind, or give a Task object to fit, evaluate or predict",
        )
    arguments = {key: value for key, value in section.items() if key != "kind"}
    kind = section["kind"]
    task_class = _shipped(_SHIPPED[kind]) if kind in _SHIPPED else _from_file(kind)
    signature = inspect.signature(task_class)
    takes = signature.parameters
    data = {name: value for name, value in (("train", train), ("eval", evaluation)) if value is not None}
    any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    known = [
        name
        for name, parameter in takes.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    listed = f"{task_class.__name__} takes: {', '.join(known) or 'no keys'}"
    for key in arguments:
        if key not in known and not any_key:
            raise UsageError("unknown key", where=f"task.{key}", remedy=f"{did_you_mean(key, known)}{listed}")
    for key, value in data.items():
        if key not in known and not any_key:
            remedy = f"leave it out, or give the constructor a parameter {key!r}. {listed}"
            raise UsageError(f"{task_class.__name__} has no use for {value!r}", where=f"data.{key}", remedy=remedy)
    arguments |= data
    missing = [name for name in known if takes[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        keys = ", ".join(f"data.{name}" if name in ("train", "eval") else f"task.{name}" for name in missing)
        raise UsageError(
            f"{task_class.__name__} needs {keys}", where="config", remedy=f"give {keys}, in the file or as key=value"
        )
    return task_class(**arguments)


def _shipped(home: str) -> type[Task]:
    module, _, name = home.partition(":")
    task_class: type[Task] = getattr(importlib.import_module(f"lockstep.tasks.{module}"), name)
    return task_class


def _from_file(kind: str) -> type[Task]:
    path, _, name = kind.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(
            "no such file", where=path, remedy="the task's Python file must be where it was when the run began"
        )
    module = _import(Path(path).resolve())
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        tasks = [
            n
            for n, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Task) and value is not Task
        ]
        raise UsageError(f"no Task class {name!r}", where=path, remedy=f"the file has: {', '.join(tasks) or 'none'}")
    if inspect.isabstract(found):
        raise UsageError(
            f"{name} lacks {', '.join(sorted(found.__abstractmethods__))}", where=path, remedy="write these methods"
        )
    return found


def _import(path: Path) -> ModuleType:
    """The module of a Python file; of a file in a package (a folder with `__init__.py`) as a part of it."""
    if str(path.parent) not in sys.path[:1]:
        sys.path.insert(0, str(path.parent))
    packages, root = package_of(path)
    other = _other_of(packages[0], root) if packages else None
    try:
        if packages and other is None:
            dotted = ".".join([*packages, path.stem])
            loaded = sys.modules.get(dotted)  # by an earlier call: the file may be another by now
            return importlib.import_module(dotted) if loaded is None else importlib.reload(loaded)
        module_name = f"lockstep_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where pickle looks for the classes of loader workers
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        remedy = f"put an empty __init__.py into {path.parent}, or write `from NAME import ...` without the dot"
        if other:
            remedy = f"give the folder {root / packages[0]} another name: Python finds {other} under this one"
        raise UsageError(f"cannot be imported: {error}", where=str(path), remedy=remedy) from error
    return module


def package_of(path: Path) -> tuple[list[str], Path]:
    """Names of the packages around a file, the outermost first, and the folder that this is in, or the file's own."""
    packages: list[str] = []
    folder = path.parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        packages.insert(0, folder.name)
        folder = folder.parent
    return packages, folder


def _other_of(package: str, root: Path) -> str | None:
    """Where Python finds a package of this name that is not the one in `root`; None where it finds that."""
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last: what else lies there must not hide a library
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand
        return package
    places = [os.path.realpath(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return None if spec is None or str(root / package) in places else spec.origin or package
