"""Cache volumes on disk by their content: a volume is decoded once per machine, and slices are read individually."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.cache_folder import cache_root
from lockstep.core import atomic
from lockstep.core.foreign_errors import reading
from lockstep_recipes.tasks.ct.volumes.dicom import dicom_files
from lockstep_recipes.tasks.ct.volumes.read import read_volume
from lockstep_recipes.tasks.ct.volumes.resample import resampled
from lockstep_recipes.tasks.ct.volumes.slices import Slices
from lockstep_recipes.tasks.ct.volumes.volume import Volume
from lockstep_recipes.tasks.readers.cache import cached, digest_of

_FORMAT = 3  # version of the files, and of reading and resampling; it is part of the folder's name
_KEPT_FREE = 10 << 30  # bytes of disk space to leave free for checkpoints; on a small disk a twentieth


class CachedVolume(NamedTuple):
    """A volume whose slices stay on disk until they are used. Its other fields are those of `Volume`."""

    slices: Slices
    spacing: tuple[float, float, float]
    positions: npt.NDArray[np.float32]
    notes: tuple[str, ...]
    address: str
    """Hexadecimal digits that change with the content of the files and the arguments of `cached_volume`, but not with
    names, places and times."""


def cached_volume(
    path: Path, *, distance_mm: float | None = None, allow_gaps: bool = False, keep: bool = True
) -> CachedVolume:
    """A volume from the cache, which stores it if it is new.

    The first process that needs it reads the file and writes the volume to Lockstep's cache folder; all others wait for
    it. Whenever a process is killed, a volume in the cache is complete or absent. If the disk is nearly full, the
    volume is kept only in memory, is read again the next time, and a warning reports it.

    Args:
        path: see `read_volume`.
        distance_mm: the distance to which slices are resampled. None: slices are not resampled.
        allow_gaps: see `read_volume`.
        keep: False: nothing is written, and the whole file is read each time.

    Raises:
        DataError: see `read_volume`.
        UsageError: the cache may not be written.
    """
    address = digest_of(_FORMAT, content_address(path), distance_mm, allow_gaps)

    def read() -> Volume:
        volume = read_volume(path, allow_gaps=allow_gaps)
        return volume if distance_mm is None else resampled(volume, distance_mm)

    def in_memory(volume: Volume) -> CachedVolume:
        return CachedVolume(Slices(volume.slices), volume.spacing, volume.positions, volume.notes, address)

    if not keep:
        return in_memory(read())
    try:
        folder = cached("volume", address, lambda folder: _write(read(), folder))
    except _NoSpace as error:
        what = f"the cache of volumes {cache_root()} has no space left; volumes that are not in it are read each time"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
        return in_memory(error.volume)
    about = json.loads((folder / "volume.json").read_text(encoding="utf-8"))
    slices, positions = Slices(folder / "slices.npy"), np.load(folder / "positions.npy")
    return CachedVolume(slices, tuple(about["spacing"]), positions, tuple(about["notes"]), address)


def content_address(path: Path) -> str:
    """Hexadecimal SHA-256 of the contents of a file, or of all files in a folder, whatever their names are.

    It is kept next to the cache under path, sizes and times of the files, so that unchanged files are read once. One of
    the times is the ctime, which programs cannot set: a file that was replaced by one with the same size and date is
    read again.

    Raises:
        DataError: a file cannot be read.
    """
    files = dicom_files(path) if path.is_dir() else [path]
    with reading(path, "check the path"):
        stats = [file.stat() for file in files]
    about = [
        (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in zip(files, stats, strict=True)
    ]
    known = cache_root() / "volume-addresses" / digest_of(str(path.resolve()), about)
    try:
        return known.read_text(encoding="ascii")
    except OSError:
        pass
    parts = sorted(digest_of(files=(file,)) for file in files)
    address = hashlib.sha256("".join(parts).encode()).hexdigest()
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        with atomic.staged_file(known, known.with_name(f".{known.name}-{os.getpid()}")) as staging:
            staging.write_text(address, encoding="ascii")
    except OSError:
        pass  # it is recomputed the next time
    return address


class _NoSpace(Exception):
    """A volume that does not fit on the disk."""

    def __init__(self, volume: Volume) -> None:
        super().__init__("no space")
        self.volume = volume


def _write(volume: Volume, folder: Path) -> None:
    disk = shutil.disk_usage(folder)
    if disk.free - volume.slices.nbytes < min(_KEPT_FREE, disk.total // 20):
        raise _NoSpace(volume)
    about = {"spacing": volume.spacing, "notes": volume.notes}
    try:
        np.save(folder / "slices.npy", volume.slices)
        np.save(folder / "positions.npy", volume.positions)
        (folder / "volume.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:  # a quota, or other processes that write at the same time
        raise _NoSpace(volume) from error
