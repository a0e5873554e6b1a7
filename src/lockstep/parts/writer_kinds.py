"""The classes of writers: Lockstep's own, those of other distributions, and those in a user's file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import PurePath

from lockstep.core import plugins
from lockstep.core.errors import UsageError
from lockstep.core.writer import FOLDER, Writer
from lockstep.parts import writers

GROUP = "lockstep.writers"  # of entry points


def files_of_writers(names: Sequence[str]) -> set[str]:
    """The files that the built-in writers, and those of these names, write into a run directory.

    Raises:
        UsageError: see `find_writer`; or a writer names a path outside the run directory, or the whole directory.
    """
    kinds = {*(_built_in_writer(name) for name in _built_in()), *(find_writer(name) for name in names)}
    for kind in kinds:
        for file in map(PurePath, kind.files):
            if not file.parts or file.is_absolute() or ".." in file.parts:
                what = f"{str(file)!r} is not inside the run directory, but --fresh would delete it"
                raise UsageError(what, where=f"{kind.__name__}.files", remedy="name files in the run directory")
    return {FOLDER, *(file for kind in kinds for file in kind.files)}


def find_writer(name: str) -> type[Writer]:
    """The class of a writer.

    Args:
        name: a module of `lockstep.parts.writers`, an entry point of the group `lockstep.writers`, or FILE.py:Class.

    Raises:
        UsageError: the writer does not exist or cannot be imported, it is not a subclass of `Writer`, or its library is
            not installed.
    """
    kind = plugins.named_class(
        name, Writer, group=GROUP, key="log.writers", built_in=_built_in_writer, known=_built_in()
    )
    if kind.library and importlib.util.find_spec(kind.library) is None:
        remedy = f"pip install {kind.library}" if name in _built_in() else f"install {kind.library}"
        what = f"{kind.library} is not installed"
        raise UsageError(what, where=f"log.writers: {name}", remedy=f"{remedy}, or remove the writer")
    return kind


def _built_in() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(writers.__path__)]


def _built_in_writer(name: str) -> type[Writer]:
    module = importlib.import_module(f"{writers.__name__}.{name}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    (writer,) = (value for value in own if plugins.is_subclass(value, Writer))
    return writer
