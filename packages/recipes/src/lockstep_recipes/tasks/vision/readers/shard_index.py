"""The index of a tar shard: the offset and the class of each image. It is made in one pass over the headers, and
cached."""

from __future__ import annotations

import io
import json
import os
import platform
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.cache_folder import cache_root
from lockstep.core import atomic
from lockstep.core.errors import DataError
from lockstep.core.foreign_errors import reading
from lockstep_recipes.shards.formats.tar import members
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.readers.cache import digest_of
from lockstep_recipes.tasks.vision.images.decode import reads_heif
from lockstep_recipes.tasks.vision.readers.image_files import image_suffixes

_FORMAT = 1  # version of the index files; an index with a different version is made again


@dataclass
class ShardIndex:
    """What is known about a shard without reading its images."""

    size: int
    """Bytes of the shard when it was indexed."""
    time_ns: int
    """Time of its last change when it was indexed, in nanoseconds."""
    members: list[str]
    """Names of the members with images, in the order of the shard."""
    offsets: Array
    """The offset of each image in bytes: (images,) int64."""
    sizes: Array
    """Bytes of each image: (images,) int64."""
    labels: list[str]
    """Names of the classes, sorted."""
    codes: Array
    """The class of each image as its index in `labels`, or -1: (images,) int64."""
    others: int
    """Number of members that do not belong to an image."""


def load_index(shard: Path, label: str) -> ShardIndex:
    """The index of a shard, from the file next to it or in the cache. If there is none, it is made and saved. The file
    is `.NAME.index` next to the shard, or in Lockstep's cache if that folder cannot be written. If size or modification
    time of the shard changed, the index is made again.

    Args:
        label: the field of `KEY.json` with the class.

    Raises:
        DataError: see `make_index`.
    """
    with reading(shard, "check the path"):
        about = os.stat(shard)
    key = {"format": _FORMAT, "label": label, "size": about.st_size, "time_ns": about.st_mtime_ns}
    key |= {"heif": True} if reads_heif() else {}  # an index without this key has no HEIC images
    places = (shard.with_name(f".{shard.name}.index"), cache_root() / f"shard-{digest_of(str(shard.resolve()))}.index")
    for place in places:
        if (index := _read(place, key)) is not None:
            return index
    index = make_index(shard, label)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, index, key)
            break
        except OSError:
            continue  # without a saved index, the next start reads the headers again
    return index


def _read(place: Path, key: dict[str, Any]) -> ShardIndex | None:
    """A saved index, or None: it does not exist, it is damaged, or the shard has changed."""
    try:
        # From memory, so that the file is read completely even if another process replaces it.
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as kept:
            about = json.loads(str(kept["about"]))
            if about["key"] != key:
                return None
            arrays = {name: kept[name] for name in ("offsets", "sizes", "codes")}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, zipfile.BadZipFile):  # it can be made again
        return None
    known = {name: about[name] for name in ("members", "labels", "others")}
    return ShardIndex(size=key["size"], time_ns=key["time_ns"], **known, **arrays)


def _write(place: Path, index: ShardIndex, key: dict[str, Any]) -> None:
    about = {"key": key, "members": index.members, "labels": index.labels, "others": index.others}
    staging = place.with_name(f"{place.name}.{platform.node()}-{os.getpid()}.new")
    with atomic.staged_file(place, staging), staging.open("wb") as file:
        np.savez_compressed(
            file, about=np.array(json.dumps(about)), offsets=index.offsets, sizes=index.sizes, codes=index.codes
        )


@dataclass
class _Key:
    """The members of one KEY."""

    image: tuple[str, int, int] | None = None
    """Name, offset and bytes of the image."""
    cls: str | None = None
    """The class that KEY.cls names."""
    json: str | None = None
    """The class that KEY.json names."""

    @property
    def label(self) -> str | None:
        """The class, if a member names it."""
        return self.json if self.cls is None else self.cls


def make_index(shard: Path, label: str) -> ShardIndex:
    """The index of a shard, from its headers and its small members with classes.

    Raises:
        DataError: the shard is not a tar file, is truncated, or has bytes after its end; a member is a link; a KEY has
            two images or none; a class is neither text nor a number. The error names shard and member.
    """
    keys: dict[str, _Key] = {}
    suffixes, others = image_suffixes(), 0
    with reading(shard), shard.open("rb") as file:
        about = os.fstat(file.fileno())
        for member in members(shard, file):
            folder, _, name = member.name.rpartition("/")
            stem, dot, suffix = name.partition(".")
            kind = f"{dot}{suffix}".lower()
            if name.startswith(".") or kind not in (*suffixes, ".cls", ".json"):
                others += 1
                continue
            where = f"{shard}, member {member.name}"
            if not member.isreg() or member.issparse():
                remedy = "pack with `tar --hard-dereference --dereference` and without --sparse"
                raise DataError("the member is not a regular file", where=where, remedy=remedy)
            entry = keys.setdefault(f"{folder}/{stem}", _Key())
            if kind in suffixes:
                if entry.image is not None:
                    remedy = f"KEY is {stem!r}, and ends at the first dot of a name; rename or remove one of them"
                    raise DataError(f"a second image of KEY, after {entry.image[0]}", where=where, remedy=remedy)
                entry.image = (member.name, member.offset_data, member.size)
            else:
                content = os.pread(file.fileno(), member.size, member.offset_data)
                if kind == ".cls":
                    entry.cls = _class_of_text(content, where)
                else:
                    entry.json = _class_of_json(content, label, where)
    alone = next((key for key, entry in keys.items() if entry.image is None and entry.label is not None), None)
    if alone is not None:
        remedy = f"add an image ({', '.join(suffixes)}), or remove the members of this KEY"
        raise DataError("a label without an image", where=f"{shard}, KEY {alone.lstrip('/')}", remedy=remedy)
    found = [entry for entry in keys.values() if entry.image is not None]
    others += sum(entry.image is None for entry in keys.values())
    given = [entry.label for entry in found]
    labels = sorted({name for name in given if name is not None})
    places = {name: number for number, name in enumerate(labels)}
    pictures = [entry.image for entry in found if entry.image is not None]
    return ShardIndex(
        size=about.st_size,
        time_ns=about.st_mtime_ns,
        members=[name for name, _, _ in pictures],
        offsets=np.array([offset for _, offset, _ in pictures], dtype=np.int64),
        sizes=np.array([size for _, _, size in pictures], dtype=np.int64),
        labels=labels,
        codes=np.array([-1 if name is None else places[name] for name in given], dtype=np.int64),
        others=others,
    )


def _class_of_text(content: bytes, where: str) -> str | None:
    try:
        return content.decode().strip() or None
    except UnicodeDecodeError as error:
        remedy = "a .cls member must contain the class as text, such as 7"
        raise DataError("the class is not text", where=where, remedy=remedy) from error


def _class_of_json(content: bytes, label: str, where: str) -> str | None:
    """The class in a JSON object, or None if it has no such field."""
    remedy = f'a .json member must contain an object such as {{"{label}": 7}}'
    try:
        value = json.loads(content)
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=where, remedy=remedy) from error
    if not isinstance(value, dict):
        raise DataError(f"a JSON {type(value).__name__}, not an object", where=where, remedy=remedy)
    found = value.get(label)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise DataError(f"the class in {label!r} is {found!r}, not text or a number", where=where, remedy=remedy)
    return str(found).strip() or None
