"""From the names in `log.writers` to open writers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from lockstep.errors import UsageError, did_you_mean
from lockstep.observe import writers
from lockstep.observe.writer import RunInfo, WriteGuard, Writer, guard_writers

GROUP = "lockstep.writers"  # of entry points
_CONSOLE = "console"


def open_writers(run: RunInfo, names: Sequence[str], *, quiet: bool) -> list[WriteGuard]:
    """Open the writers of these names, and the console unless `quiet`. None of them can fail afterwards.

    Raises:
        UsageError: see `find_writer`.
    """
    classes = [find_writer(name) for name in dict.fromkeys([*names, *([] if quiet else [_CONSOLE])])]
    return guard_writers({kind.name or kind.__name__: partial(kind, run) for kind in classes})


def files_of_writers(names: Sequence[str]) -> set[str]:
    """What the built-in writers, and those of these names, write into a run directory.

    Raises:
        UsageError: see `find_writer`.
    """
    return {file for name in {*_built_in(), *names} for file in find_writer(name).files}


def find_writer(name: str) -> type[Writer]:
    """The class of a writer.

    Args:
        name: a module of `lockstep.observe.writers`, an entry point of the group `lockstep.writers`, or FILE.py:Class.

    Raises:
        UsageError: there is no such writer, it cannot be imported, or it is not a subclass of `Writer`.
    """
    path, is_file, class_name = name.rpartition(".py:")
    if is_file:
        return _from_file(Path(f"{path}.py"), class_name)
    if name in _built_in():
        module = importlib.import_module(f"{writers.__name__}.{name}")
        (writer,) = _writers_of(module)
        return writer
    return _from_entry_point(name)


def _built_in() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(writers.__path__)]


def _writers_of(module: ModuleType) -> list[type[Writer]]:
    """The writers that `module` itself defines."""
    return [value for value in vars(module).values() if _is_writer(value) and value.__module__ == module.__name__]


def _is_writer(value: object) -> TypeGuard[type[Writer]]:
    return isinstance(value, type) and issubclass(value, Writer) and value is not Writer


def _from_file(path: Path, class_name: str) -> type[Writer]:
    if not path.is_file():
        raise UsageError("no such file", where=f"log.writers: {path}", remedy="give the path as FILE.py:MyWriter")
    module_name = f"lockstep_writer_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # for imports of neighbouring files
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"cannot be imported: {type(error).__name__}: {error}",
            where=f"log.writers: {path}",
            remedy="repair the file, or leave the writer out",
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    writer: object = getattr(module, class_name, None)
    if not _is_writer(writer):
        names = ", ".join(kind.__name__ for kind in _writers_of(module)) or "none"
        raise UsageError(
            f"no subclass of Writer is called {class_name!r}",
            where=f"log.writers: {path}",
            remedy=f"the file has: {names}",
        )
    return writer


def _from_entry_point(name: str) -> type[Writer]:
    points = importlib.metadata.entry_points(group=GROUP)
    if name not in points.names:
        known = sorted({*_built_in(), *points.names})
        raise UsageError(
            f"there is no writer {name!r}",
            where="log.writers",
            remedy=f"{did_you_mean(name, known)}There are: {', '.join(known)}, and FILE.py:MyWriter",
        )
    point = points[name]
    package = point.dist.name if point.dist else "an installed package"
    where = f"log.writers: {name}, which is {point.value} of {package}"
    try:
        writer = point.load()
    except Exception as error:
        raise UsageError(
            f"cannot be imported: {type(error).__name__}: {error}",
            where=where,
            remedy=f"repair or remove {package}, or leave the writer out",
        ) from error
    if not _is_writer(writer):
        raise UsageError("is not a subclass of lockstep.observe.writer.Writer", where=where, remedy=f"repair {package}")
    return writer
