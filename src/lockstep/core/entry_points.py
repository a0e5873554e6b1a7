"""Entry points of installed distributions, read without `importlib.metadata`, which takes 50 ms to import.

Nothing that an entry point names is imported until `EntryPoint.load`.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import os
import sys
from typing import Any, NamedTuple

from lockstep.core.errors import UsageError

_SUFFIX = ".dist-info"
_OWN = "torch-lockstep"


class EntryPoint(NamedTuple):
    """A name that a distribution declares in a group, and the object that it names."""

    group: str
    name: str
    value: str
    """`module` or `module:attribute`."""
    distribution: str
    """Its name and version."""

    @property
    def origin(self) -> str:
        """What errors call the distribution."""
        return f"distribution {self.distribution}"

    @property
    def is_own(self) -> bool:
        """True for a distribution of Lockstep."""
        name = self.distribution.rpartition(" ")[0]
        return name == _OWN or name.startswith(f"{_OWN}-")

    def load(self) -> Any:
        """Import the object.

        Raises:
            Exception: whatever the import raises.
        """
        module, _, attributes = self.value.partition(":")
        found: Any = importlib.import_module(module.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            found = getattr(found, attribute)
        return found


def entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name: those of Lockstep's distributions first, each part sorted by name.

    Raises:
        UsageError: two distributions, none of them Lockstep's, declare the same name differently; or a distribution's
            file is damaged.
    """
    found: dict[str, EntryPoint] = {}
    entries = _all(tuple((path, _changed(path)) for path in dict.fromkeys(sys.path)))
    for entry in sorted(entries, key=lambda entry: not entry.is_own):
        if entry.group != group:
            continue
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value and not other.is_own:  # nothing replaces what Lockstep declares
            what = f"{entry.name!r} is declared twice, as {other.value} and as {entry.value}"
            raise UsageError(what, where=f"{other.origin}, {entry.origin}", remedy="uninstall one of them")
    return dict(sorted(found.items(), key=lambda item: (not item[1].is_own, item[0])))


def _changed(folder: str) -> int:
    """When names in the folder changed. 0 if it is not a folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _all(places: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    """The entry points of Lockstep's groups in these folders. If a distribution is there twice, the first counts."""
    seen: set[str] = set()
    found: list[EntryPoint] = []
    for folder, changed in places:
        for name in _names_in(folder or ".") if changed else ():
            if not name.endswith(_SUFFIX):
                continue
            project, _, version = name.removesuffix(_SUFFIX).partition("-")
            if version.count("-"):  # such as `line-task-1.5`, which no installer writes
                project, _, version = name.removesuffix(_SUFFIX).rpartition("-")
            project = project.replace("_", "-").lower()
            if project not in seen:
                seen.add(project)
                found += _declared(os.path.join(folder, name, "entry_points.txt"), f"{project} {version}")
    return found


def _names_in(folder: str) -> list[str]:
    """The names in a folder, sorted. None if it is a file, or if it may not be read: Python imports nothing from it."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _declared(path: str, distribution: str) -> list[EntryPoint]:
    """The entry points of Lockstep's groups in a file.

    Raises:
        UsageError: the file is damaged; names the file.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:  # most distributions declare none
        return []
    if "[lockstep." not in text:
        return []
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except configparser.Error as error:
        what = f"cannot be read: {str(error).splitlines()[0]}"
        raise UsageError(what, where=path, remedy=f"install {distribution.rpartition(' ')[0]} again") from error
    return [
        EntryPoint(group, name, value.partition("[")[0].strip(), distribution)
        for group in parser.sections()
        if group.startswith("lockstep.")
        for name, value in parser[group].items()
    ]
