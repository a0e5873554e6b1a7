"""A task class in a user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import UsageError
from lockstep.tasks.task import Task


def load_class(kind: str) -> type[Task]:
    """The class that `FILE.py:Class` names.

    Raises:
        UsageError: there is no such file or no such Task class, or the class lacks a method that must be written.
    """
    path, _, name = kind.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(
            "no such file", where=path, remedy="the task's Python file must be where it was when the run began"
        )
    module = _import(Path(path).resolve())
    task_class: Any = getattr(module, name, None)
    if not _is_task(task_class):
        tasks = [name for name, value in vars(module).items() if _is_task(value)]
        raise UsageError(f"no Task class {name!r}", where=path, remedy=f"the file has: {', '.join(tasks) or 'none'}")
    if inspect.isabstract(task_class):
        raise UsageError(
            f"{name} lacks {', '.join(sorted(task_class.__abstractmethods__))}",
            where=path,
            remedy="write these methods",
        )
    loaded: type[Task] = task_class
    return loaded


def _is_task(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Task) and value is not Task


def _import(path: Path) -> ModuleType:
    """Import a Python file. A file in a package (a folder with `__init__.py`) is imported as a part of the package."""
    if str(path.parent) not in sys.path[:1]:
        sys.path.insert(0, str(path.parent))
    packages, root = package_of(path)
    other = _other_package(packages[0], root) if packages else None
    try:
        if packages and other is None:
            dotted = ".".join([*packages, path.stem])
            loaded = sys.modules.get(dotted)  # from an earlier call; the file may have changed since
            return importlib.import_module(dotted) if loaded is None else importlib.reload(loaded)
        module_name = f"lockstep_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # pickle looks here for the classes that loader workers use
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        remedy = f"put an empty __init__.py into {path.parent}, or write `from NAME import ...` without the dot"
        if other:
            remedy = f"give the folder {root / packages[0]} another name: Python finds {other} under this name"
        raise UsageError(f"cannot be imported: {error}", where=str(path), remedy=remedy) from error
    return module


def package_of(path: Path) -> tuple[list[str], Path]:
    """The names of the packages around a file, the outermost first, and the folder that holds the outermost package.

    For a file outside of packages: no names, and the folder of the file.
    """
    packages: list[str] = []
    folder = path.parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        packages.insert(0, folder.name)
        folder = folder.parent
    return packages, folder


def _other_package(package: str, root: Path) -> str | None:
    """The place where Python finds a package of this name, if it is not the package in `root`. None if it is."""
    if str(root) not in sys.path:
        sys.path.append(str(root))  # at the end: other files in this folder must not hide a library
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand
        return package
    places = [os.path.realpath(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return None if spec is None or str(root / package) in places else spec.origin or package
