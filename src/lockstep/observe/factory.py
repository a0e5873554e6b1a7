"""From the names in `log.writers` to open writers."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath

from lockstep import plugins
from lockstep.errors import UsageError, did_you_mean
from lockstep.observe import writers
from lockstep.observe.own_process import OwnProcess
from lockstep.observe.writer import FOLDER, RunInfo, WriteGuard, Writer, guard_writers

GROUP = "lockstep.writers"  # of entry points
_CONSOLE = "console"


def open_writers(run: RunInfo, names: Sequence[str], *, quiet: bool) -> list[WriteGuard]:
    """Open the writers of these names, and the console unless `quiet`. None of them can fail afterwards.

    Raises:
        UsageError: see `find_writer`.
    """
    makers: dict[str, Callable[[], Writer]] = {}
    entries: dict[str, str] = {}
    for name in dict.fromkeys([*names, *([] if quiet else [_CONSOLE])]):
        kind = find_writer(name)
        label = kind.name or kind.__name__
        label = f"{label} of {name}" if label in makers else label
        makers[label] = partial(OwnProcess, kind, name, run) if kind.in_own_process else partial(kind, run)
        if name in names:
            entries[label] = f"{name} (class {kind.__name__})"
    return guard_writers(makers, entries)


def files_of_writers(names: Sequence[str]) -> set[str]:
    """What the built-in writers, and those of these names, write into a run directory.

    Raises:
        UsageError: see `find_writer`; or a writer names a place outside of the run directory, or all of it.
    """
    kinds = {*(_built_in_writer(name) for name in _built_in()), *(find_writer(name) for name in names)}
    for kind in kinds:
        for file in map(PurePath, kind.files):
            if not file.parts or file.is_absolute() or ".." in file.parts:
                what = f"{str(file)!r} is not inside the run directory, and --fresh would delete it"
                raise UsageError(what, where=f"{kind.__name__}.files", remedy="name files of the run directory")
    return {FOLDER, *(file for kind in kinds for file in kind.files)}


def find_writer(name: str) -> type[Writer]:
    """The class of a writer.

    Args:
        name: a module of `lockstep.observe.writers`, an entry point of the group `lockstep.writers`, or FILE.py:Class.

    Raises:
        UsageError: there is no such writer, it cannot be imported, it is not a subclass of `Writer`, or its library is
            not installed.
    """
    kind = _named(name)
    if kind.library and importlib.util.find_spec(kind.library) is None:
        remedy = f"pip install 'torch-lockstep[{kind.library}]'" if name in _built_in() else f"install {kind.library}"
        what = f"{kind.library} is not installed"
        raise UsageError(what, where=f"log.writers: {name}", remedy=f"{remedy}, or leave the writer out")
    return kind


def _named(name: str) -> type[Writer]:
    path, is_file, class_name = name.rpartition(".py:")
    if is_file:
        return _from_file(Path(f"{path}.py"), class_name)
    if name in _built_in():
        return _built_in_writer(name)
    return _from_entry_point(name)


def _built_in() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(writers.__path__)]


def _built_in_writer(name: str) -> type[Writer]:
    module = importlib.import_module(f"{writers.__name__}.{name}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    (writer,) = (value for value in own if plugins.is_subclass(value, Writer))
    return writer


def _from_file(path: Path, class_name: str) -> type[Writer]:
    where = f"log.writers: {path}"
    if not path.is_file():
        raise UsageError("no such file", where=where, remedy="give the path as FILE.py:MyWriter")
    try:
        module = plugins.import_file(path.resolve(), prefix="lockstep_writer_", where=where)
    except UsageError:
        raise
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(what, where=where, remedy="repair the file, or leave the writer out") from error
    return plugins.class_of(module, class_name, Writer, where=where)


def _from_entry_point(name: str) -> type[Writer]:
    entries = plugins.entry_points(GROUP)
    if name not in entries:
        known = sorted({*_built_in(), *entries})
        raise UsageError(
            f"there is no writer {name!r}",
            where="log.writers",
            remedy=f"{did_you_mean(name, known)}There are: {', '.join(known)}, and FILE.py:MyWriter",
        )
    entry = entries[name]
    try:
        writer: object = plugins.load(entry)
        if not plugins.is_subclass(writer, Writer):
            raise plugins.unusable(entry, "is not a subclass of lockstep.observe.writer.Writer")
    except UsageError as error:
        remedy = f"{error.remedy}, or leave the writer out"
        raise UsageError(error.what, where=f"log.writers: {name} of {error.where}", remedy=remedy) from error
    return writer
