"""Shortages of a machine: room for temporary files, open files, shared memory. Each has its sentence."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from lockstep.core import this_process
from lockstep.core.errors import LockstepError, number_of

_OTHER_FILES, _MANY_FILES = 128, 1 << 14  # of a rank besides its connections; a limit that seldom hinders
_LONGEST_FOLDER = 70  # of TMPDIR; Python appends 32 characters
_SHARED = Path("/dev/shm")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# torch and gloo raise their own kinds of errors, which quote the system. torch gives its shared memory this name.
_FILES_TEXT, _FULL_TEXT, _TORCH_SHARED = os.strerror(errno.EMFILE), os.strerror(errno.ENOSPC), "</torch_"


class ShortageError(LockstepError):
    """A machine has too little of something that every training needs. A new start would fail in the same way."""


def is_full(error: BaseException) -> bool:
    """True if a file system has no room left, or the user's share of it has none."""
    return isinstance(error, OSError) and error.errno in _FULL


def explanation(error: BaseException) -> ShortageError | None:
    """The error to raise instead of `error`, if the system said what it lacks; None for all other errors."""
    if isinstance(error, LockstepError):
        return None
    text = str(error)
    if _FILES_TEXT in text:
        return of_open_files()
    if _TORCH_SHARED in text and _FULL_TEXT in text:
        return of_shared_memory()
    if isinstance(error, OSError) and is_full(error) and isinstance(error.filename, str):
        with contextlib.suppress(OSError):
            if Path(error.filename).is_relative_to(tempfile.gettempdir()):
                return of_temporary_files(error)
    return None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, an error that says what the machine lacks is raised as a `ShortageError`."""
    try:
        yield
    except Exception as error:
        known = explanation(error)
        if known is None:
            raise
        raise known from error


def allow_open_files(ranks: int) -> None:
    """Raise this process's limit of open files, if the system allows more: each rank has a connection to each other.

    Rank 0 has two to each, because it also holds the store.

    Raises:
        ShortageError: the system allows too few for this many ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(needed := 2 * ranks + _OTHER_FILES, _MANY_FILES)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if 0 <= soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        raise of_open_files(f"{number_of(ranks, 'rank', 'needs', 'need')} about {needed} open files", needed)


def free_files() -> int:
    """How many more files this process may open, without a reserve."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened = len(os.listdir("/dev/fd"))
    return max(0, min(limit if limit >= 0 else _MANY_FILES, _MANY_FILES) - opened - _OTHER_FILES // 2)


def allow_short_sockets() -> None:
    """Let Python make its sockets in a folder with a short path: the system takes 107 characters.

    Loader workers hand over tensors through such sockets.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    made = settings.get("tempdir")  # by Python, in the folder for temporary files, or by a parent process
    used = tempfile.gettempdir() if made is None else os.path.dirname(made)
    if len(os.fsencode(used)) <= _LONGEST_FOLDER:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            settings["tempdir"] = made = tempfile.mkdtemp(prefix="pymp-", dir=folder)
            # As Python does with its own: at the end of this process, and not of those that it forks.
            util.Finalize(None, shutil.rmtree, args=(made, True), exitpriority=-100)
            return


def of_open_files(what: str = "too many open files", needed: int = 4096) -> ShortageError:
    """A process has no room for another open file.

    Args:
        needed: a limit that suffices.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ShortageError(
        f"{what}: a process may have {limit} of them, also counting pipes and connections",
        where="ulimit -n",
        remedy=f"raise it before the start (ulimit -n {needed}; docker run --ulimit nofile={needed}; LimitNOFILE= of a "
        "service), or lower data.workers: each takes several. If the limit is high, the data set leaves files open",
    )


def of_shared_memory() -> ShortageError:
    """Loader workers have no room for another batch."""
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(_SHARED)
        return ShortageError(
            f"shared memory is full: it has {_size(disk.total)}, and {_size(disk.free)} are free now; loader "
            "workers pass on their batches through it",
            where=str(_SHARED),
            remedy=ROOM_FOR_BATCHES,
        )
    return ShortageError("there is no shared memory for the batches of loader workers", remedy=ROOM_FOR_BATCHES)


ROOM_FOR_BATCHES = (
    "make it larger (docker run --shm-size=8g; lockstep launch kubernetes kubernetes.shm=8Gi; mount -o remount,size=8G "
    "/dev/shm), or lower data.workers; data.workers=0 needs none"
)
"""The remedy if /dev/shm is too small."""


def of_temporary_files(error: OSError) -> ShortageError:
    """No temporary file can be written."""
    try:
        folder = tempfile.gettempdir()
        disk = shutil.disk_usage(folder)
    except OSError:
        return ShortageError(
            f"no folder for temporary files can be written: {error.strerror or error}",
            where=_wanted() or "TMPDIR",
            remedy="make room in /tmp, or set TMPDIR to a folder that can be written",
        )
    return ShortageError(
        f"temporary files cannot be written: {error.strerror}; {_size(disk.free)} of {_size(disk.total)} are free",
        where=f"TMPDIR={folder}" if "TMPDIR" in os.environ else folder,
        remedy="make room there, or set TMPDIR to a folder on another disk",
    )


@contextlib.contextmanager
def temporary_folder(prefix: str = "lockstep-") -> Iterator[Path]:
    """A folder for temporary files, which is deleted at the end of the block.

    Raises:
        ShortageError: it cannot be made.
    """
    folder = new_temporary_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_temporary_folder(prefix: str) -> Path:
    """A folder for temporary files, which the caller deletes.

    Raises:
        ShortageError: it cannot be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise of_temporary_files(error) from error
    _tell_of_another_folder()
    return folder


_told: list[str] = []


def _tell_of_another_folder() -> None:
    """Say once that TMPDIR is not used. Python takes the next folder of its list without a word."""
    wanted, used = _wanted(), tempfile.gettempdir()
    if (
        wanted
        and os.path.abspath(wanted) != os.path.abspath(used)
        and wanted not in _told
        and not this_process.is_rank()
    ):
        _told.append(wanted)
        print(
            f"note: TMPDIR={wanted} {_why_not(Path(wanted))}, so temporary files are in {used}",
            file=sys.stderr,
            flush=True,
        )


def _wanted() -> str:
    return os.environ.get("TMPDIR", "")


def _why_not(folder: Path) -> str:
    """Why Python has not taken a folder for temporary files."""
    if not folder.exists():
        return "does not exist"
    if not folder.is_dir():
        return "is not a folder"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        disk = shutil.disk_usage(folder)
        free = f" ({_size(disk.free)} of {_size(disk.total)} are free)" if is_full(error) else ""
        return f"cannot be written: {error.strerror}{free}"
    return "could not be written when this process began"


def _size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**10:,.0f} KiB"
