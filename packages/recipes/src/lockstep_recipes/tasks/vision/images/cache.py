"""Cache decoded images on disk: only the first epoch decodes. All processes of a machine fill and read one cache."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import secrets
import struct
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core import this_process
from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.images.cache_slabs import FullError, Slabs, write_all

Pixels = npt.NDArray[np.uint8]

_FORMAT = 2  # version of the files and of the digest; it is part of the folder's name
# An entry of the index: slab, boot, offset, height, width, CRC of the pixels; then the CRC of these fields.
_FIELDS = struct.Struct("<IIQIII")
_CHECK = struct.Struct("<I")
_ENTRY = np.dtype(
    [("slab", "<u4"), ("boot", "<u4"), ("offset", "<u8"), ("height", "<u4"), ("width", "<u4"), ("crcs", "<u4", 2)]
)
_NAME = 8  # bytes after the entries: the random name of the index. One more byte marks that a warning was shown


_NO_LIMITS = CacheOptions()


class DecodedCache:
    """uint8 pixels by index, in files that any number of processes fill and read at the same time, without locking.

    A process appends pixels to its own file (a slab), and then writes an entry to the index, which all processes map
    into memory. So an image is complete or absent in the cache, even if a process is killed.

    After a reboot, the first reader of an image compares its pixels with their CRC, because the system may have written
    the entry to disk but not the pixels. Pixels that differ are decoded again.

    If the cache cannot be written (permissions, full disk, limit), the pixels are the same, but are decoded each time,
    and there is one warning. The cache stops growing before the disk is full, to leave space for checkpoints.

    An object may only be used by one thread of each process. The folder should be on a local disk: on a network file
    system, machines would not see each other's entries immediately, and a failed write may be noticed too late.

    Args:
        folder: a folder for only this cache. Its name must identify the content; see `folder_name`.
        count: number of images.
        channels: the number of channels of all images.
        options: images that are larger than `shorter_side` are reduced before they are cached, and in the same way if
            they are not cached. Boxes and masks of an image must be scaled accordingly.
    """

    def __init__(self, folder: Path, count: int, *, channels: int = 3, options: CacheOptions = _NO_LIMITS) -> None:
        self.folder, self.count, self.channels, self.options = folder, count, channels, options
        self.stopped: str | None = None
        """Why this process stopped writing, or None."""
        self._boot = _boot()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._handle = -1
        self._index: mmap.mmap | None = None
        name = b""
        try:
            name = self._open_index()
        except OSError as error:
            self._stop(_cannot_write(error))
        self._slabs = Slabs(folder, name, limit_bytes=options.limit_bytes, published_end=self._published_end)

    def pixels(self, index: int, read: Callable[[], Pixels]) -> Pixels:
        """The pixels of an image, from the cache or from `read`.

        Args:
            read: decodes the image: uint8 (height, width, channels). Its exceptions are passed on.

        Returns:
            A new array (height, width, channels). It is the same whether it was cached or not.

        Raises:
            UsageError: `read` returned something else.
        """
        if (kept := self._kept(index)) is not None:
            return kept
        pixels = np.ascontiguousarray(reduced(self._checked(read()), self.options.shorter_side))
        if self.stopped is None:
            try:
                place = self._slabs.append(pixels.data.cast("B")) if pixels.size else None
                if place is not None:
                    self._publish(index, (place[0], self._boot, place[1], *pixels.shape[:2], zlib.crc32(pixels.data)))
            except FullError as error:
                self._stop(str(error))
            except OSError as error:
                self._stop(_cannot_write(error))
        return pixels

    def __contains__(self, index: int) -> bool:
        return self._entry(index) is not None

    def summary(self) -> str:
        """A line for the log: how many images are in the cache, their size on disk, the limit, the folder."""
        held = sum(index in self for index in range(self.count))
        limit = "" if self.options.limit_bytes is None else f" of {self.options.limit_bytes / 1e9:.3g}"
        why = "" if self.stopped is None else f"; it {self.stopped}"
        size = f"{self.bytes_on_disk() / 1e9:.3g}{limit} GB"
        return f"decoded images: {held:,} of {self.count:,} in {self.folder}, {size}{why}"

    def bytes_on_disk(self) -> int:
        """Bytes that the pixels currently occupy on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.slab"))

    # ---- entries

    def _entry(self, index: int) -> tuple[int, ...] | None:
        """The fields of an entry. None: there is no entry, or another process is writing it."""
        if self._index is None:
            return None
        raw = self._index[index * _ENTRY.itemsize : (index + 1) * _ENTRY.itemsize]
        if _CHECK.unpack_from(raw, _FIELDS.size)[0] != zlib.crc32(raw[: _FIELDS.size]):
            return None
        return _FIELDS.unpack_from(raw)

    def _publish(self, index: int, fields: tuple[int, ...]) -> None:
        raw = _FIELDS.pack(*fields)
        # The pixels were written before the entry, so a process that sees the entry also sees the pixels.
        write_all(self._handle, memoryview(raw + _CHECK.pack(zlib.crc32(raw))), index * _ENTRY.itemsize)

    def _published_end(self, slab: int) -> int:
        """The end of the last pixels of a slab that have an entry."""
        assert self._index is not None
        entries = np.frombuffer(self._index, dtype=_ENTRY, count=self.count)
        mine = entries[entries["slab"] == slab]
        ends = mine["offset"] + mine["height"].astype(np.uint64) * mine["width"] * self.channels
        return int(ends.max(initial=0))

    def _kept(self, index: int) -> Pixels | None:
        entry = self._entry(index)
        if entry is None:
            return None
        slab, boot, offset, height, width, crc = entry
        pixels = np.empty((height, width, self.channels), dtype=np.uint8)
        try:
            # One read for the whole image. The page cache is shared by all processes.
            if os.preadv(self._opened(slab), [pixels.data], offset) != pixels.nbytes:
                return None
        except OSError:
            return None  # somebody deleted the slab
        if boot != self._boot:
            if zlib.crc32(pixels.data) != crc:
                return None
            with contextlib.suppress(OSError):
                self._publish(index, (slab, self._boot, offset, height, width, crc))
        return pixels

    def _opened(self, slab: int) -> int:
        """An open file of a slab. The least recently used file is closed for it."""
        if slab in self._open:
            self._open.move_to_end(slab)
            return self._open[slab]
        while len(self._open) >= self._most_open:
            os.close(self._open.popitem(last=False)[1])
        self._open[slab] = self._slabs.open(slab)
        return self._open[slab]

    def _checked(self, pixels: Any) -> Pixels:
        is_array = isinstance(pixels, np.ndarray)
        if is_array and pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == self.channels:
            return pixels  # type: ignore[no-any-return]
        about = f"{pixels.dtype} {pixels.shape}" if is_array else f"a {type(pixels).__name__}"
        remedy = f"return a uint8 array (height, width, {self.channels})"
        raise UsageError(f"the decoder returned {about}", where=str(self.folder), remedy=remedy)

    # ---- opening, and the end

    @property
    def _tail(self) -> int:
        """The end of the entries of the index."""
        return self.count * _ENTRY.itemsize

    def _open_index(self) -> bytes:
        """Open and map the index, which is created if it does not exist. Returns its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.folder / "index", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._handle, self._tail + _NAME + 1)  # every process does this; it does not change entries
        with self._locked_tail():
            name = os.pread(self._handle, _NAME, self._tail)
            name = name if any(name) else secrets.token_bytes(_NAME)
            os.pwrite(self._handle, name + b"\0", self._tail)  # no warning yet
        self._index = mmap.mmap(self._handle, self._tail + _NAME + 1, prot=mmap.PROT_READ)
        return name

    @contextlib.contextmanager
    def _locked_tail(self) -> Iterator[None]:
        fcntl.lockf(self._handle, fcntl.LOCK_EX, _NAME + 1, self._tail)
        try:
            yield
        finally:
            fcntl.lockf(self._handle, fcntl.LOCK_UN, _NAME + 1, self._tail)

    def _stop(self, why: str) -> None:
        """Stop writing in this process, and warn once for all processes of this machine."""
        self.stopped = why
        if "_slabs" in self.__dict__:
            self._slabs.close()
        if not self._was_told():
            rest = "training continues, and images that are not in it are decoded in every epoch"
            warnings.warn(f"the cache of decoded images {self.folder} {why}; {rest}", RuntimeWarning, stacklevel=3)

    def _was_told(self) -> bool:
        """True if a process of this machine has warned since the cache was opened. This call counts as a warning."""
        if self._index is None:  # there is nowhere to leave a mark
            return this_process.local_rank() != 0
        try:
            with self._locked_tail():
                told = os.pread(self._handle, 1, self._tail + _NAME) == b"\1"
                os.pwrite(self._handle, b"\1", self._tail + _NAME)
        except OSError:
            return False
        return told

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "count": self.count, "channels": self.channels, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __del__(self) -> None:
        if "_slabs" in self.__dict__:
            self._slabs.close()
        for handle in (*self.__dict__.get("_open", {}).values(), self.__dict__.get("_handle", -1)):
            with contextlib.suppress(OSError):
                os.close(handle)


def folder_name(digest: str, *, channels: int, shorter_side: int | None) -> str:
    """The name of the folder of a cache, which identifies the content.

    Args:
        digest: changes if an image of the source changes.
    """
    side = "full" if shorter_side is None else str(shorter_side)
    return f"pictures-{_FORMAT}-{digest[:24]}-{channels}x{side}"


def reduced(pixels: Pixels, shorter_side: int | None) -> Pixels:
    """An image reduced to a shorter side of at most `shorter_side` pixels, with PIL's antialiasing bilinear filter. PIL
    computes with integers, so the pixels are the same on all machines.

    Args:
        pixels: (height, width, channels) uint8, with 1, 3 or 4 channels.
        shorter_side: the limit in pixels. None: the image is not changed.
    """
    height, width, channels = pixels.shape
    size = reduced_size(height, width, shorter_side)
    if size == (height, width):
        return pixels
    from PIL import Image

    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    return np.array(image.resize(size[::-1], Image.Resampling.BILINEAR)).reshape(*size, channels)


def reduced_size(height: int, width: int, shorter_side: int | None) -> tuple[int, int]:
    """(height, width) of an image after `reduced`."""
    shorter = min(height, width)
    if shorter_side is None or shorter <= shorter_side:
        return height, width
    new_height, new_width = ((side * shorter_side + shorter // 2) // shorter for side in (height, width))
    return new_height, new_width


def _cannot_write(error: OSError) -> str:
    return f"cannot be written ({error.strerror or error})"


def _boot() -> int:
    """A 32-bit number that identifies the current boot of this machine. If the system does not provide it, the number
    is random, and each process compares CRCs."""
    try:
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return secrets.randbits(32)
