"""Code that Lockstep finds by name: classes in a user's files, and entry points of other distributions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

from lockstep.core.entry_points import EntryPoint, entry_points
from lockstep.core.errors import UsageError, did_you_mean

T = TypeVar("T")


# ---- classes in a file


USER_PREFIX = "lockstep_user_"
"""Begins the names of modules that are files of the user outside of packages."""


def import_file(path: Path, *, prefix: str, where: str, is_main: bool = False) -> ModuleType:
    """Import a Python file. A file in a package (a folder with `__init__.py`) is imported as a part of the package.

    A file outside of packages is executed at each call. The file may import its neighbours, at any time.

    Args:
        path: an existing file, as an absolute path without links.
        prefix: the first part of the module's name, for a file outside of packages.
        where: what errors call the file.
        is_main: whether the run is about this file. The folder of the main file stays first in `sys.path`; other
            folders go to the end. A main file in a package is executed at each call, too; other files in packages are
            not, because objects of their classes may exist.

    Raises:
        UsageError: the file, or a file that it imports, has a syntax error. Or the file imports relatively, and is
            not in a package that Python finds.
    """
    folder = str(path.parent)
    if not is_main or sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    packages, root = package_of(path)
    other = _other_package(packages[0], root) if packages else None
    try:
        if not packages or other is not None:
            return execute(path, f"{prefix}{path.stem}")
        name = ".".join([*packages, path.stem])
        return importlib.reload(sys.modules[name]) if is_main and name in sys.modules else importlib.import_module(name)
    except SyntaxError as error:
        place = f"{error.filename or where}:{error.lineno}" if error.lineno else error.filename or where
        line = f": {error.text.strip()}" if error.text else ""
        raise UsageError(f"is not valid Python: {error.msg}{line}", where=place, remedy="correct this line") from error
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        remedy = f"put an empty __init__.py into {path.parent}, or write `from NAME import ...` without the dot"
        if other:
            remedy = f"give the folder {root / packages[0]} another name: Python finds {other} under this name"
        raise UsageError(f"cannot be imported: {error}", where=where, remedy=remedy) from error
    finally:
        if not is_main:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)


def execute(path: Path, name: str) -> ModuleType:
    """Execute a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle looks here for the classes that loader workers use
    spec.loader.exec_module(module)
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


def class_of(module: ModuleType, name: str, base: type[T], *, where: str) -> type[T]:
    """The class `name` of a module. It must be a subclass of `base`, with all its methods written.

    Args:
        where: what errors call the module.

    Raises:
        UsageError: the module has no such class, or the class lacks a method. Names the classes or the methods.
    """
    found: object = getattr(module, name, None)
    if not is_subclass(found, base):
        known = ", ".join(key for key, value in vars(module).items() if is_subclass(value, base))
        raise UsageError(f"no {base.__name__} class {name!r}", where=where, remedy=f"the file has: {known or 'none'}")
    missing: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
    if missing:
        raise UsageError(f"{name} lacks {', '.join(sorted(missing))}", where=where, remedy="write these methods")
    return found


def is_subclass(value: object, base: type[T]) -> TypeGuard[type[T]]:
    """True if `value` is a subclass of `base`, and not `base` itself."""
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def named_class(
    name: str,
    base: type[T],
    *,
    group: str,
    key: str,
    built_in: Callable[[str], type[T]] | None = None,
    known: Sequence[str] = (),
) -> type[T]:
    """A class that a key of the config names.

    Args:
        name: FILE.py:Class, a name in `known`, or an entry point.
        base: the class is a subclass of it.
        group: of the entry points.
        key: of the config, for errors.
        built_in: the class of a name in `known`.

    Raises:
        UsageError: there is no such class, it cannot be imported, or it is not a subclass of `base`.
    """
    word = base.__name__.lower()
    path, is_file, class_name = name.rpartition(".py:")
    if is_file:
        return _class_in_file(Path(f"{path}.py"), class_name, base, key)
    if built_in is not None and name in known:
        return built_in(name)
    entries = entry_points(group)
    if name not in entries:
        names = sorted({*known, *entries})
        there_are = f"There are: {', '.join(names)}, and" if names else "There are none installed; give"
        remedy = f"{did_you_mean(name, names)}{there_are} FILE.py:My{base.__name__}"
        raise UsageError(f"there is no {word} {name!r}", where=key, remedy=remedy)
    entry = entries[name]
    try:
        found: object = load(entry)
        if not is_subclass(found, base):
            raise unusable(entry, f"is not a subclass of {base.__module__}.{base.__name__}")
    except UsageError as error:
        remedy = f"{error.remedy}, or leave the {word} out"
        raise UsageError(error.what, where=f"{key}: {name} of {error.where}", remedy=remedy) from error
    return found


def _class_in_file(path: Path, name: str, base: type[T], key: str) -> type[T]:
    word, where = base.__name__.lower(), f"{key}: {path}"
    if not path.is_file():
        raise UsageError("no such file", where=where, remedy=f"give the path as FILE.py:My{base.__name__}")
    try:
        module = import_file(path.resolve(), prefix=f"lockstep_{word}_", where=where)
    except UsageError:
        raise
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(what, where=where, remedy=f"repair the file, or leave the {word} out") from error
    return class_of(module, name, base, where=where)


NAMED_PREFIX = "lockstep_named_"
"""Begins the names of modules that are files of the user, for `named`."""


def named(name: str, *, key: str) -> Any:
    """The object that a key of the config names. None if the module has no such object.

    Args:
        name: FILE.py:NAME or package.module:NAME.
        key: of the config, for errors.

    Raises:
        UsageError: there is no such file, or it cannot be imported.
    """
    module, _, word = name.rpartition(":")
    remedy = "write it as FILE.py:NAME or package.module:NAME, and install its distribution"
    try:
        if not module.endswith(".py"):
            return getattr(importlib.import_module(module), word, None)
        if not Path(module).is_file():
            raise UsageError("no such file", where=f"{key}: {module}", remedy=remedy)
        return getattr(import_file(Path(module).resolve(), prefix=NAMED_PREFIX, where=f"{key}: {module}"), word, None)
    except UsageError:
        raise
    except Exception as error:
        what = f"{module} cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(what, where=f"{key}={name}", remedy=remedy) from error


# ---- entry points


def load(entry: EntryPoint) -> Any:
    """The object that an entry point names.

    Raises:
        UsageError: see `unusable`; it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        what = f"cannot be loaded for {entry.group} {entry.name!r}: {type(error).__name__}: {error}"
        raise unusable(entry, what) from error


def unusable(entry: EntryPoint, what: str) -> UsageError:
    """An error that names the entry point, its fault `what`, and its distribution."""
    remedy = "repair this distribution, or uninstall it"
    return UsageError(f"{entry.value} {what}", where=entry.origin, remedy=remedy)
