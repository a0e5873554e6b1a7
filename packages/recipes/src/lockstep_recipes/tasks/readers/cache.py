"""Cache results per machine, in folders that are named by a digest of their inputs."""

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
    """Hexadecimal SHA-256 of the parts' text and the files' contents, truncated to 32 characters: a key for `cached`.

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
    """The folder `kind-key` of the cache, which `make` fills if it does not exist.

    One process of this machine makes the folder, and all others wait for its file lock, as long as it takes. No
    collective is involved. The folder gets its name when it is complete and on disk, so after a kill it is complete or
    absent.

    Args:
        make: fills an empty folder. Its exceptions are passed on, except OSError.

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
        remedy = f"free disk space, or set {CACHE_VARIABLE} to a folder on a different disk"
        what = f"the cache cannot be written: {error.strerror or error}"
        raise DataError(what, where=str(error.filename or root), remedy=remedy) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], is_alone: bool) -> None:
    prefix = f".staging-{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*") if is_alone else ():  # left over from killed processes
        shutil.rmtree(leftover, ignore_errors=True)
    own = folder.with_name(f"{prefix}{platform.node()}-{os.getpid()}")
    try:
        with atomic.staged_folder(folder, own) as staging, os_errors():
            make(staging)
    except OSError:
        if is_alone or not folder.is_dir():  # on a file system without locks, another process may have been first
            raise
