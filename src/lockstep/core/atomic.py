"""Files and folders that a kill at any instant leaves whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged_file(path: Path, staging: Path | None = None) -> Iterator[Path]:
    """Yield a path to write to. At the end of the block this file is flushed to disk, and takes the place of `path`.

    If the block or the flush raises, `path` stays as it was, and the staged file is deleted. A power cut soon
    afterwards may bring the old file back. If that must not be, call `sync` on the folder.

    Args:
        staging: path to write to, on the file system of `path`; None: a hidden file next to `path`.
    """
    staging = staging or path.with_name(f".{path.name}.new")
    try:
        yield staging
        sync(staging)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as `path`, whole or not at all.

    Raises:
        OSError: the disk is full, or `path` cannot be written.
    """
    with staged_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def staged_folder(path: Path, staging: Path | None = None, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill. At the end of the block it is flushed to disk with all in it, and becomes `path`.

    If the block or the flush raises, the staged folder is deleted, and there is no new folder at `path`.

    Args:
        staging: folder to fill, on the file system of `path`, deleted first if it is there (a killed process left it);
            None: a hidden folder next to `path`.
        replace: delete a folder, or a link, that is at `path`. Otherwise only an empty folder may be there.
    """
    staging = written = staging or path.with_name(f".{path.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        for inner in (*staging.rglob("*"), staging):
            sync(inner)
        if replace and (path.is_dir() or path.is_symlink()):
            remove(path)
        written = staging.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Delete a file, a folder with all in it, or a link: what the link leads to stays. Nothing may be there.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
