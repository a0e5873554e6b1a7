"""Images in tar shards of the WebDataset layout. An index provides the length, and direct access to any image.

A shard holds members `KEY.jpg` (or another image) with `KEY.cls` (the class as text) or `KEY.json` (an object with
the class in a field). KEY ends at the first dot of the file's name, as WebDataset defines it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import locks
from lockstep.cache_folder import cache_root
from lockstep.core.errors import DataError, did_you_mean, number_of
from lockstep_recipes.shards.find import expanded
from lockstep_recipes.shards.formats.tar import COMPRESSED
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.cache import digest_of
from lockstep_recipes.tasks.readers.labels import sorted_names
from lockstep_recipes.tasks.readers.packed_text import PackedText
from lockstep_recipes.tasks.vision.readers.image_files import add_file
from lockstep_recipes.tasks.vision.readers.shard_index import ShardIndex, load_index


def names_shards(source: str) -> bool:
    """True if a source is a tar file, or a pattern of tar files."""
    return source.endswith((".tar", *COMPRESSED))


def has_shards(folder: Path) -> bool:
    """True if a folder contains tar files."""
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(".tar") and not entry.name.startswith(".") for entry in entries)


def find_shards(source: str) -> list[Path]:
    """The shards that a source names, in order.

    Args:
        source: a tar file, a folder of tar files, a pattern with braces (`shard-{000..012}.tar`, `{a,b}.tar`), or a
            pattern with `*`, `?` or `[]`.

    Raises:
        DataError: a shard is missing, or is compressed, which does not give access to single images.
    """
    if source.endswith(COMPRESSED):
        remedy = "unpack it to a .tar: images are already compressed"
        raise DataError("a compressed shard does not give access to single images", where=source, remedy=remedy)
    if os.path.isdir(source):
        return sorted(path for path in Path(source).glob("*.tar") if not path.name.startswith("."))
    shards: list[Path] = []
    for name in [source] if os.path.exists(source) else expanded(source):
        found = [name] if os.path.exists(name) else sorted(glob.glob(name))
        if not found:
            parent = Path(name).parent
            hint = did_you_mean(Path(name).name, os.listdir(parent)) if parent.is_dir() else "there is no such folder. "
            part = "" if name == source else f" (data source {source})"
            remedy = f"{hint}Give a .tar, a folder of them, or a pattern such as 'DIR/shard-{{000..012}}.tar'"
            raise DataError(f"there is no such shard{part}", where=name, remedy=remedy)
        shards += map(Path, found)
    return shards


class ShardImages:
    """Images in tar shards. Each is read at its offset, so processes can share a file.

    An object may only be used by one thread of each process. It keeps some files open, up to a fraction of the process
    limit.

    Args:
        shards: the tar files.
        indices: their indices.
    """

    def __init__(self, shards: Sequence[Path], indices: Sequence[ShardIndex]) -> None:
        self.shards = list(shards)
        self.ends: Array = np.cumsum([len(index.offsets) for index in indices], dtype=np.int64)
        self.offsets: Array = np.concatenate([index.offsets for index in indices])
        self.sizes: Array = np.concatenate([index.sizes for index in indices])
        self.members = [PackedText(index.members) for index in indices]
        self.times = [(index.size, index.time_ns) for index in indices]
        self._open: OrderedDict[int, int] = OrderedDict()
        self._most_open = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def __len__(self) -> int:
        return len(self.offsets)

    def _place(self, index: int) -> tuple[int, str]:
        """The number of the shard, and the name of the member."""
        shard = int(np.searchsorted(self.ends, index, side="right"))
        return shard, self.members[shard][index - (int(self.ends[shard - 1]) if shard else 0)]

    def read(self, index: int) -> bytes:
        shard = int(np.searchsorted(self.ends, index, side="right"))
        size = int(self.sizes[index])
        try:
            data = os.pread(self._handle(shard), size, int(self.offsets[index]))
        except OSError as error:
            remedy = "check that the shard is there, and its permissions"
            raise DataError(f"cannot be read: {error.strerror}", where=self.where(index), remedy=remedy) from error
        if len(data) < size:
            what = f"the shard was truncated since it was indexed: {len(data)} of {size} bytes remain"
            raise DataError(what, where=self.where(index), remedy="restore the shard, and start again")
        return data

    def _handle(self, shard: int) -> int:
        """An open file of a shard. The least recently used file is closed for it."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) >= self._most_open:
            os.close(self._open.popitem(last=False)[1])
        self._open[shard] = handle = os.open(self.shards[shard], os.O_RDONLY)
        return handle

    def name(self, index: int) -> str:
        shard, member = self._place(index)
        return f"{self.shards[shard].name}/{member}"

    def where(self, index: int) -> str:
        shard, member = self._place(index)
        return f"{self.shards[shard]}, member {member}"

    def digest(self) -> str:
        digest = hashlib.sha256(repr((self.times, len(self))).encode())
        for path in self.shards:
            add_file(digest, path, name=os.path.realpath(path))
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # each process opens its own files

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when Python exits, `os` may be gone
        for handle in self.__dict__.get("_open", {}).values():
            try:  # noqa: SIM105 - `contextlib` may also be gone
                close(handle)
            except OSError:
                pass


def read_shards(
    source: str, *, label: str, labelled: bool = True
) -> tuple[ShardImages, Array, list[str], tuple[str, ...]]:
    """The images of shards: images, the class number of each, class names (sorted; numbers by value), notes.

    Args:
        source: see `find_shards`.
        label: the field of `KEY.json` with the class. `KEY.cls` does not need it, and takes precedence.
        labelled: whether each image needs a class. Otherwise the class number of an image without a class is -1.

    Raises:
        DataError: a shard is missing, truncated or not a tar file; a KEY lacks its image or its class, or has two
            images. The error names shard and member, or KEY.
    """
    shards = find_shards(source)
    indices = _indices(shards, label)
    if not sum(len(index.members) for index in indices):
        remedy = "name members KEY.jpg (or .png, ...) with KEY.cls or KEY.json; KEY ends at the first dot"
        raise DataError(f"no images in {number_of(len(shards), 'shard')}", where=source, remedy=remedy)
    for shard, index in zip(shards, indices, strict=True):
        bare = np.flatnonzero(index.codes < 0)
        if labelled and len(bare):
            member = index.members[bare[0]]
            more = f" ({len(bare)} of {len(index.members)} images of this shard have none)" if len(bare) > 1 else ""
            remedy = f"add KEY.cls, or KEY.json with the field {label!r}; task.columns.label sets a different field"
            raise DataError(f"no label{more}", where=f"{shard}, member {member}", remedy=remedy)
    names = sorted_names({name for index in indices for name in index.labels})
    place = {name: number for number, name in enumerate(names)}
    codes = [np.array([*(place[name] for name in index.labels), -1], dtype=np.int64)[index.codes] for index in indices]
    others = sum(index.others for index in indices)
    notes = (
        (f"left out: {number_of(others, 'member')} of {number_of(len(shards), 'shard')} without an image",)
        if others
        else ()
    )
    return ShardImages(shards, indices), np.concatenate(codes), names, notes


def _indices(shards: Sequence[Path], label: str) -> list[ShardIndex]:
    """The indices of the shards. One process of this machine makes the missing ones, and all others wait."""
    with contextlib.ExitStack() as held:
        root = cache_root()
        with contextlib.suppress(OSError):  # without a lock, each process makes the same
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(root / f".shards-{digest_of([*map(str, shards)])}.lock"))
        return [load_index(shard, label) for shard in shards]
