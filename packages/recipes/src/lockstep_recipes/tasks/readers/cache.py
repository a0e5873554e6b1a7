"""Results that are computed once per machine and kept: folders, named by a digest of what they were made from."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep import locks
from lockstep.cache_folder import CACHE_VARIABLE, cache_root
from lockstep.core import atomic
from lockstep.core.errors import DataError, UsageError
from lockstep.core.foreign_errors import os_errors, reading

_POLL_S = 0.1


def digest_of(*parts: object, files: tuple[Path, ...] = ()) -> str:
    """Hexadecimal SHA-256 of the parts' text and the files' contents, cut to 32 characters: a key for `cached`.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for part in parts:
        text = repr(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    for path in files:
        with reading(path), path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder `kind-key` of the cache, which `make` fills if it is not there.

    Of all processes on this machine one makes the folder, and the others wait for its file lock, as long as it takes:
    no collective is involved. The folder gets its name when it is complete and on disk, so a kill at any instant
    leaves it whole or absent.

    Args:
        make: fills the empty folder that it is given. What it raises comes through, except an OSError.

    Raises:
        UsageError: the cache may not be written.
        DataError: the disk of the cache is full.
    """
    root = cache_root()
    folder = root / f"{kind}-{key}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locks.locked(root / f".{kind}-{key}.lock", poll_s=_POLL_S) as is_alone:
            if not folder.is_dir():
                _make(folder, make, is_alone)
    except PermissionError as error:
        remedy = f"set {CACHE_VARIABLE} to a folder that you may write to"
        raise UsageError(f"cannot write: {error.strerror}", where=str(error.filename or root), remedy=remedy) from error
    except OSError as error:
        remedy = f"free disk space, or set {CACHE_VARIABLE} to a folder on another disk"
        what = f"the cache cannot be written: {error.strerror or error}"
        raise DataError(what, where=str(error.filename or root), remedy=remedy) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], is_alone: bool) -> None:
    prefix = f".staging-{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*") if is_alone else ():  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    own = folder.with_name(f"{prefix}{platform.node()}-{os.getpid()}")
    try:
        with atomic.staged_folder(folder, own) as staging, os_errors():
            make(staging)
    except OSError:
        if is_alone or not folder.is_dir():  # where the file system knows no locks, another process may have been first
            raise
