"""Locks between processes. A lock goes with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # the file system has none


class LockedError(Exception):
    """Another process holds the lock. Its text names the process."""


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float | None = None, poll_s: float = 0.1) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is made if it is not there, and stays.

    A forked child, such as a loader worker, does not share the lock: `filelock` closes the file in the child.

    Args:
        wait_s: how long to wait for another process, in seconds; None: without limit.
        poll_s: seconds between two attempts. Signals are handled in between.

    Yields:
        False where the file system knows no locks: then nobody is kept out.

    Raises:
        LockedError: another process still holds the lock after `wait_s`.
        OSError: the file cannot be written.
    """
    import filelock

    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.acquire(timeout=-1 if wait_s is None else wait_s, poll_interval=poll_s))
        except filelock.Timeout:
            raise LockedError(path.read_text().strip() or "another process") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            path.write_text(f"process {os.getpid()} on {platform.node()}\n")
        yield lock.is_locked
