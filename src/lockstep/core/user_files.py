"""Files that a user names for a command to write: what is there already is not lost."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.errors import UsageError

_MARKED = 1 << 16  # bytes of a file in which its mark is looked for


def check_replaceable(path: Path | None, *, force: bool, mark: str | None = None) -> None:
    """Before anything is computed, check that a file can be written, and that no other file is lost.

    Args:
        path: None: nothing is written.
        force: replace whatever file is there.
        mark: a part of all files that the command writes, in their first 64 KiB: an earlier one is replaced. None:
            nothing is replaced, because the command cannot tell its own files from others.

    Raises:
        UsageError: a file is there; or `path` is a folder, its folder does not exist, or the file cannot be read.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError("is a folder", where=str(path), remedy="give a file")
    if not path.parent.is_dir():
        remedy = f"make {path.parent}, or give another place"
        raise UsageError("cannot be written: there is no such folder", where=str(path), remedy=remedy)
    if force or not path.exists() or (mark is not None and _has(path, mark)):
        return
    whose = "exists" if mark is None else "exists, and this command did not write it"
    remedy = "give --force to replace the file, or another place"
    raise UsageError(f"{whose}: it is not overwritten", where=str(path), remedy=remedy)


def _has(path: Path, mark: str) -> bool:
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(_MARKED)
    except OSError as error:
        what = f"exists, and cannot be read: {error.strerror}"
        raise UsageError(what, where=str(path), remedy="give another place") from error
