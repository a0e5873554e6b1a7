"""What a forked process has in common with the one that it was forked from: places in files, and connections.

Two workers that read through one handle get each other's bytes, without an error.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.core.data import reachable
from lockstep.core.errors import DataError

_FOLDER = "/proc/self/fd"
_TCP_INFO, _COUNTERS_AT = 11, 120  # of Linux: bytes acknowledged, and bytes received
REMEDY = (
    "open it with the first sample that a process reads, and not in __init__: `if self.pid != os.getpid(): self.db = "
    "connect(); self.pid = os.getpid()`. Or data.start_method=spawn, if the data set can be pickled"
)


def is_forked() -> bool:
    """True if `multiprocessing` has forked this process from the one that it works for."""
    own = multiprocessing.current_process()
    method = getattr(own, "_start_method", None) or multiprocessing.get_start_method()  # a Process of the default kind
    return multiprocessing.parent_process() is not None and method == "fork"


def reopen_files() -> list[str]:
    """Give this forked process its own place in each file that it has inherited, and that can be read.

    Processes that share an open file share its place: if two of them seek and read, each gets what the other has
    sought. So the file is opened again under the same number, at the same place. Objects that hold the number (files of
    Python, zip and tar archives, libraries in C) notice nothing. Files that can only be written stay shared, since the
    lines of several processes must follow one another in a log.

    Returns:
        the files that could not be opened again, with the reason.
    """
    failed: list[str] = []
    if sys.platform != "linux" or not is_forked():
        return failed
    import fcntl  # not on Windows

    for number in map(int, os.listdir(_FOLDER)):
        try:
            if number <= 2 or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_APPEND | os.O_PATH):
                continue
            place = os.lseek(number, 0, os.SEEK_CUR)
        except OSError:  # the list itself was a file, which is closed now
            continue
        try:
            own = os.open(f"{_FOLDER}/{number}", flags & (os.O_ACCMODE | os.O_DIRECT))
        except OSError as error:
            failed.append(f"{os.readlink(f'{_FOLDER}/{number}')}: {error.strerror}")
            continue
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, number, inheritable=os.get_inheritable(number))
        os.close(own)
    return failed


class Connections:
    """The connections over TCP that a data set holds in a forked process, and that it must not use there."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.found = (
            dict(_sockets(reachable.held_by(data, type(data).__name__)))
            if sys.platform == "linux" and is_forked()
            else {}
        )
        self.before = {path: _traffic(number) for path, number in self.found.items()}

    def check(self) -> None:
        """Check that none of them was used since this object was made.

        Raises:
            DataError: one was; names it.
        """
        for path, number in self.found.items():
            before, now = self.before[path], _traffic(number)
            if before and now and before[0] == now[0] and before != now:  # else the worker has made its own
                raise DataError(
                    f"{path} is a connection that was open when the loader workers were forked, and a worker has used "
                    "it. Workers share it, so each may get the answer to the question of another",
                    where=f"{type(self.data).__name__}.__getitem__",
                    remedy=REMEDY,
                )


def warnings(data: Any) -> list[str]:
    """Warnings about what `data` hold if workers are forked, and whose use by workers leaves no trace."""
    held = list(reachable.held_by(data, type(data).__name__))
    shared = [f"{path} (a process with pipes)" for path, value in held if _has_pipes(value)]
    shared += [f"{path} (an environment of LMDB)" for path, value in held if _is_lmdb(value)]
    shared += [f"{path} (a connection)" for path, number in _sockets(held) if _traffic(number) is None]
    return [
        f"warning: loader workers are forked and share {name}. If they use it, reading fails or mixes samples up\n"
        f"  remedy: {REMEDY}"
        for name in shared
    ]


def _has_pipes(value: Any) -> bool:
    return isinstance(value, subprocess.Popen) and bool(value.stdout or value.stdin) and value.returncode is None


def _is_lmdb(value: Any) -> bool:
    library = sys.modules.get("lmdb")
    return library is not None and isinstance(value, library.Environment)


def _sockets(held: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    """The paths of objects that are connected to a server by an address, and their files."""
    for path, value in held:
        if callable(getattr(type(value), "fileno", None)):
            try:
                number = value.fileno()
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.type == socket.SOCK_STREAM and copy.getpeername():
                        yield path, number
            except Exception:  # noqa: S112 - closed, not connected, or another kind of `fileno`
                continue


def _traffic(number: int) -> tuple[int, ...] | None:
    """A TCP connection: its identity, and the bytes sent and received. None: it is not TCP, or closed."""
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            known = copy.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _COUNTERS_AT + 16)
            return os.fstat(number).st_ino, *struct.unpack_from("QQ", known, _COUNTERS_AT)
    except (OSError, struct.error):
        return None
