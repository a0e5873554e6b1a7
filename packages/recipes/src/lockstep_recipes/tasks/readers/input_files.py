"""The files that a user names on the command line: files, folders and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import UsageError, number_of


def find_files(arguments: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """The files that `arguments` name, each once, in the order of first occurrence.

    An argument is a file, a folder (its files of these kinds, also in folders within it, sorted by path) or a pattern
    with `*`, `?`, `[...]` or `**` (the files of these kinds and the folders that match, sorted by path). A file that is
    named directly may have any suffix. In folders, names that start with a dot are left out, as are pipes and devices.

    Args:
        suffixes: the accepted suffixes, in lower case, such as `.jpg`.

    Raises:
        UsageError: an argument does not name anything, or a folder or a pattern has no file of these kinds.
    """
    found: dict[str, Path] = {}
    for argument in arguments:
        for path in _files_of(argument, tuple(suffixes)):
            found.setdefault(os.path.abspath(path), path)
    return list(found.values())


def special_files(folder: str | Path) -> set[str]:
    """The names in a folder that are neither files nor broken links, such as pipes: opening a pipe may block
    forever."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if not entry.is_file() and os.path.exists(entry.path)}


def with_slashes(root: Path, paths: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """Paths that Windows wrote, such as `images\\a.png`, with slashes, and a note. Paths of existing files, and
    values that are not text, do not change.

    Args:
        root: the folder that paths are relative to.
    """
    found = list(paths)
    for place, path in enumerate(paths):
        if isinstance(path, str) and "\\" in path and not (root / path).exists():
            found[place] = path.replace("\\", "/")
    changed = [path for path, other in zip(paths, found, strict=True) if path != other]
    if not changed:
        return found, ()
    return found, (f"{len(changed):,} paths have backslashes, which are read as slashes, such as {changed[0]}",)


def _files_of(argument: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(argument)
    if path.is_file():
        return [path]
    if path.exists() and not path.is_dir():
        raise UsageError("is neither a file nor a folder", where=argument, remedy="copy its content to a file")
    kinds = f"files that end in {', '.join(suffixes)}"
    if path.is_dir():
        files = _files_in(path, suffixes)
        if not files:
            raise UsageError("no file in this folder can be used", where=argument, remedy=f"give {kinds}")
        return files
    if not glob.has_magic(argument):
        remedy = "give files, folders or patterns such as '*.jpg'"
        raise UsageError("no such file or folder", where=argument, remedy=remedy)
    matches = [Path(name) for name in sorted(glob.glob(argument, recursive=True))]
    files = [
        file
        for match in matches
        for file in (_files_in(match, suffixes) if match.is_dir() else [match])
        if file.name.lower().endswith(suffixes) and (file.is_file() or not file.exists())
    ]
    if not files:
        what = (
            "no file matches this pattern"
            if not matches
            else f"{number_of(len(matches), 'name', 'matches', 'match')}, but none can be used"
        )
        raise UsageError(what, where=argument, remedy=f"give {kinds}")
    return files


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kept = [name for name in names if not name.startswith(".") and name.lower().endswith(suffixes)]
        special = special_files(parent) if kept else ()
        files += [Path(parent, name) for name in kept if name not in special]
    return sorted(files)
