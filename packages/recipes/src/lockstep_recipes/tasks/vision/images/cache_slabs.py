"""Files to which many processes append at the same time, each to its own file: the pixels of a `DecodedCache`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<8sQ")  # the name of the index, and the start of free space
_PAGE = 4096
_SLABS = 256  # slabs of a full cache, so that many processes can write at once
_SMALLEST = 16 << 20
_WITHOUT_LIMIT = 1 << 30
_KEPT_FREE = 10 << 30  # bytes of disk space to leave free; on a small disk a twentieth
_TRY_AGAIN = 256  # number of images after which a process without a slab looks for one again


class FullError(Exception):
    """There is no space left. The message names the limit."""


@dataclass
class _Slab:
    """The file that this process writes to. It is locked, so no other process writes to it."""

    number: int
    handle: int
    free: int
    """The start of free space, in bytes."""
    process: int
    """The process that locked it. A forked child also has the file, but must not write."""


class Slabs:
    """Appends to slabs, files with a fixed maximum size. A slab belongs to the process that has locked it. The number
    of slabs enforces the limit without coordination. A lock ends with its process, so that another process can use the
    rest of a slab after a kill. Bytes of a slab are written only once.

    Args:
        folder: the folder of the slabs.
        name: 8 bytes that identify the index of these slabs. Slabs with a different name are not touched.
        limit_bytes: maximum size of all slabs. None: limited only by the disk.
        published_end: returns, for the number of a slab, the end of the last bytes in it that are in the index.
    """

    def __init__(
        self, folder: Path, name: bytes, *, limit_bytes: int | None, published_end: Callable[[int], int]
    ) -> None:
        self.folder, self.name, self.published_end = folder, name, published_end
        self.limit_bytes = limit_bytes
        if limit_bytes is None:
            self.slab_bytes, self.count = _WITHOUT_LIMIT, None
        else:
            size = min(limit_bytes, max(_SMALLEST, limit_bytes // _SLABS))
            self.slab_bytes = size - size % _PAGE if size >= _PAGE else size  # so that file systems do not round up
            self.count = limit_bytes // max(1, self.slab_bytes)
        self._slab: _Slab | None = None
        self._first = 0  # all earlier slabs are full
        self._wait = 0  # images until this process looks for a slab again

    def path(self, number: int) -> Path:
        """The file of a slab."""
        return self.folder / f"{number:05}.slab"

    def append(self, content: memoryview) -> tuple[int, int] | None:
        """Write bytes to the slab of this process.

        Returns:
            the number of the slab, and the offset of the bytes in it. None: there is currently no slab for them, or
            they are larger than a slab.

        Raises:
            FullError: the limit is reached, or too little disk space would stay free.
            OSError: the disk is full, or the folder cannot be written.
        """
        if _HEAD.size + content.nbytes > self.slab_bytes:
            return None
        slab = self._slab_for(content.nbytes)
        if slab is None:
            return None
        disk = os.fstatvfs(slab.handle)
        kept_free = min(_KEPT_FREE, disk.f_blocks * disk.f_frsize // 20)
        if disk.f_bavail * disk.f_frsize - content.nbytes < kept_free:
            raise FullError(f"stops growing, to leave {kept_free / 1e9:.1f} GB of the disk free for other files")
        write_all(slab.handle, content, slab.free)
        start, slab.free = slab.free, slab.free + content.nbytes
        write_all(slab.handle, memoryview(_HEAD.pack(self.name, slab.free)), 0)
        return slab.number, start

    def open(self, number: int) -> int:
        """A handle to read a slab.

        Raises:
            OSError: there is no such slab with this name. It was deleted, and possibly a new cache was started.
        """
        handle = os.open(self.path(number), os.O_RDONLY)
        if os.pread(handle, len(self.name), 0) != self.name:
            os.close(handle)
            raise FileNotFoundError(number)
        return handle

    def close(self) -> None:
        """Release the slab of this process."""
        slab, self._slab = self._slab, None
        if slab is not None:
            with contextlib.suppress(OSError):
                os.close(slab.handle)

    def _slab_for(self, size: int) -> _Slab | None:
        """A locked slab with space for `size` bytes. None: other processes use all slabs with space."""
        if self._slab is not None and self._slab.process != os.getpid():
            self.close()  # that of the parent, whose lock remains
        if self._slab is not None and self._slab.free + size <= self.slab_bytes:
            return self._slab
        if self._wait > 0:
            self._wait -= 1
            return None
        self.close()
        self._slab = self._claim(size)
        self._wait = 0 if self._slab is not None else _TRY_AGAIN
        return self._slab

    def _claim(self, size: int) -> _Slab | None:
        """The first slab with space that no process has locked.

        Raises:
            FullError: no slab has space.
        """
        is_full = True
        number = self._first
        while self.count is None or number < self.count:
            handle = os.open(self.path(number), os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                is_full = False
            else:
                free = self._free_space(number, handle, size)
                if free + size <= self.slab_bytes:
                    return _Slab(number, handle, free, os.getpid())
                os.close(handle)
                if number == self._first and free + self.slab_bytes // 100 > self.slab_bytes:
                    self._first += 1
            number += 1
        if is_full:
            raise FullError(f"is full: {(self.limit_bytes or 0) / 1e9:.3g} GB")
        return None

    def _free_space(self, number: int, handle: int, size: int) -> int:
        """The start of free space in a slab that this process has locked."""
        head = os.pread(handle, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return _HEAD.size
        name, free = _HEAD.unpack(head)
        if name != self.name:
            return self.slab_bytes
        if free + size > self.slab_bytes:
            return int(free)
        # When the machine stopped, the newest head may have been lost, but not what is in the index.
        return max(int(free), self.published_end(number))


def write_all(handle: int, content: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file, in as many calls as the system needs."""
    while content:
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written
