"""Work that is done once per machine and kept: folders by the digest of what they were made from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import DataError, UsageError

CACHE_VARIABLE = "LOCKSTEP_CACHE"
_POLL_S = 0.1


def cache_root() -> Path:
    """`$LOCKSTEP_CACHE`, or `lockstep` in the user's cache folder. May be deleted at any time: it is made again."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


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
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror}", where=str(path), remedy="check the path and its permissions"
            ) from error
    return digest.hexdigest()[:32]


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder `kind-key` of the cache, which `make` fills if it is not there.

    Of all processes on this machine one makes it, and the others wait on a file lock, for as long as it takes: no
    collective is involved. The folder gets its name when it is complete and on disk, so a kill at any instant
    leaves it whole or absent, and the lock goes with the process.

    Raises:
        UsageError: the cache cannot be written. DataError: its disk is full. What `make` raises comes through, but for an OSError.
    """
    root = cache_root()
    folder = root / f"{kind}-{key}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{kind}-{key}.lock") as alone:
            if not folder.is_dir():
                _make(folder, make, alone)
    except PermissionError as error:
        remedy = f"set {CACHE_VARIABLE} to a folder that you may write to"
        raise UsageError(f"cannot write: {error.strerror}", where=str(error.filename or root), remedy=remedy) from error
    except OSError as error:
        remedy = f"free disk space, or set {CACHE_VARIABLE} to a folder on another disk"
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}", where=str(error.filename or root), remedy=remedy
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], alone: bool) -> None:
    staging = folder.with_name(f".staging-{folder.name}-{platform.node()}-{os.getpid()}")
    for left in folder.parent.glob(f".staging-{folder.name}-*") if alone else ():  # of processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        staging.mkdir()
        make(staging)
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # where the file system knows no locks, another may have been first
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Alone among the processes of this machine; False where the file system knows no locks. Polls: a wait inside flock would put off signals."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # whoever is first wins
                alone = False
                break
        yield alone
