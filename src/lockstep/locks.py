"""Locks between processes. A lock goes with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # the file system has none


class LockedError(Exception):
    """Another process holds the lock. Its text names the process."""


@contextlib.contextmanager
def locked(
    path: Path, *, wait_s: float | None = None, poll_s: float = 0.1, tell: Callable[[str], None] | None = None
) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is made if it is not there, and stays.

    A forked child, such as a loader worker, does not share the lock: `filelock` closes the file in the child.

    Args:
        wait_s: how long to wait for another process, in seconds; None: without limit.
        poll_s: seconds between two attempts. Signals are handled in between.
        tell: gets the name of the other process before the wait begins.

    Yields:
        False if the file system knows no locks: then no process is kept out.

    Raises:
        LockedError: another process still holds the lock after `wait_s`.
        OSError: the file cannot be written.
    """
    import filelock

    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
    with contextlib.ExitStack() as held:
        try:
            if tell is not None:
                with contextlib.suppress(filelock.Timeout):
                    lock.acquire(blocking=False)
                if not lock.is_locked:
                    tell(_holder(path))
            if not lock.is_locked:
                lock.acquire(timeout=-1 if wait_s is None else wait_s, poll_interval=poll_s)
            held.callback(lock.release)
        except filelock.Timeout:
            raise LockedError(_holder(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            path.write_text(f"process {os.getpid()} on {platform.node()}\n")
        yield lock.is_locked


def is_held(path: Path) -> bool | None:
    """True if a process holds the lock of the file `path`; None if that cannot be found out. The file is not made."""
    import filelock

    if not path.is_file():
        return None
    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return True
    except (OSError, NotImplementedError):  # read-only, or a file system without locks
        return None
    lock.release()
    return False


def _holder(path: Path) -> str:
    """The process that wrote its name into a lock's file."""
    return path.read_text().strip() or "another process"
