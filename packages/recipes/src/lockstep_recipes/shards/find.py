"""The shards that a source names: files, folders, patterns and addresses."""

from __future__ import annotations

import glob
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.errors import DataError, UsageError, did_you_mean
from lockstep_recipes.shards.files import Files, place_of, tried
from lockstep_recipes.shards.formats.blocks import Counted, ShardFormat
from lockstep_recipes.shards.formats.columns import Arrow, Parquet
from lockstep_recipes.shards.formats.json_lines import JsonLinesFormat
from lockstep_recipes.shards.formats.mds import Mds
from lockstep_recipes.shards.formats.tar import COMPRESSED, Tar
from lockstep_recipes.shards.places import ShardLocation, scheme

INDEX = "index.json"
"""The index file of a folder of shards: that of `lockstep shards`, or that of MDS."""
STATE = "state.json"
"""The file of a folder written by `Dataset.save_to_disk` (datasets) that lists the files of the data set."""
_TABLES = {"_delta_log": "Delta", ".hoodie": "Hudi", "metadata": "Iceberg"}
_OF_TABLES = "read it with a library for such tables, and write the samples with `lockstep shards`"
PROGRESS = ".lockstep-shards.json"
"""Present in a folder while its shards are being written."""
VERSION = 1
"""Version of the index of `lockstep shards`."""
FORMATS: Mapping[str, ShardFormat] = {
    "jsonl": JsonLinesFormat(),
    "parquet": Parquet(),
    "arrow": Arrow(),
    "tar": Tar(),
    "mds": Mds(),
}
_COPY = "copy it again"
_REMEDY = (
    "give a shard, a folder of shards, a pattern such as 'DIR/part-*.parquet' or 'https://HOST/shard-{000..012}.tar', "
    "or a list of these. Shards are .parquet, .arrow, .jsonl, .tar, or the index.json of MDS"
)


class Shard(NamedTuple):
    """A shard that was found."""

    place: ShardLocation
    format: str
    """A name of `FORMATS`."""
    counted: Counted | None = None
    """Its number of samples, if an index next to it has it."""


def format_of(name: str) -> str | None:
    """The format of a shard with this name, a name of `FORMATS`."""
    lower = name.lower()
    return next((key for key, one in FORMATS.items() if lower.endswith(one.suffixes) and key != "mds"), None)


def expanded(pattern: str) -> Iterator[str]:
    """The names that a pattern with braces expands to: `{0..9}`, or `{000..012}` with leading zeros.

    Raises:
        DataError: the first number is larger than the last.
    """
    brace = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if brace is None:
        yield pattern
        return
    width = max(map(len, brace.groups())) if any(text[0] == "0" for text in brace.groups()) else 0
    numbers = range(int(brace[1]), int(brace[2]) + 1)
    if not numbers:
        remedy = "write {000..012} with the smaller number first"
        raise DataError(f"{brace[0]} does not expand to a list of names", where=pattern, remedy=remedy)
    for number in numbers:
        yield from expanded(f"{pattern[: brace.start()]}{number:0{width}}{pattern[brace.end() :]}")


def find(files: Files, sources: Sequence[str]) -> list[Shard]:
    """The shards of all sources, each source sorted by name.

    Raises:
        DataError: a source names no shard, a shard is named twice, its format is not known, or a folder has several
            formats.
        Unreachable: a server does not answer.
    """
    names = [name for source in sources for name in ([source] if _exists(source) else expanded(source))]
    found = [shard for name in names for shard in _of_one(files, name)]
    twice = [url for url, count in Counter(shard.place.url for shard in found).items() if count > 1]
    if twice:
        raise DataError("the shard is named twice", where=twice[0], remedy="name each shard once")
    if not found:
        raise DataError("no shards", where=", ".join(sources) or "Shards", remedy=_REMEDY)
    return found


def _exists(source: str) -> bool:
    """True for a path on this disk, even if its name looks like a pattern."""
    return not scheme(source) and os.path.exists(source)


def _of_one(files: Files, source: str) -> list[Shard]:
    if source.endswith(COMPRESSED):
        remedy = "unpack it to a .tar, or write it with `lockstep shards`"
        raise DataError("a compressed shard does not give access to single samples", where=source, remedy=remedy)
    if posixpath.basename(source) == INDEX:
        return _of_index(files, posixpath.dirname(source), {})
    if scheme(source) in ("http", "https"):
        if any(letter in source.partition("?")[0] for letter in "*["):
            remedy = (
                "name the shards with braces, such as 'https://HOST/shard-{000..012}.tar'; or give the folder "
                "that contains "
            )
            raise UsageError("a web server does not list files", where=source, remedy=f"{remedy}{INDEX}")
        if format_of(source.partition("?")[0]) is None:  # HTTP does not list folders
            return _of_index(files, source.rstrip("/"), {})
        return [_shard(files.look(source))]
    if any(letter in source for letter in "*?[") and not _exists(source):
        found = _matching(files, source)
        _check_matching(source, found)
        return [_shard(place) for place in sorted(found, key=lambda place: place.url)]
    listed = _listed(files, source)
    if listed is None:
        if not scheme(source) and not _exists(source):
            parent = Path(source).parent
            hint = (
                did_you_mean(Path(source).name, os.listdir(parent)) if parent.is_dir() else "there is no such folder. "
            )
            raise DataError("there is no such shard", where=source, remedy=f"{hint}{_REMEDY[0].upper()}{_REMEDY[1:]}")
        return [_shard(files.look(source))]
    if INDEX in listed:
        return _of_index(files, source.rstrip("/"), listed)
    if STATE in listed:
        return _of_state(files, source.rstrip("/"), listed)
    _check_folder(files, source.rstrip("/"), listed)
    if PROGRESS in listed:
        remedy = "run the command that writes them again: it continues where it stopped"
        raise DataError("these shards are incomplete: writing them was interrupted", where=source, remedy=remedy)
    shards = [_shard(place) for name, place in sorted(listed.items()) if format_of(name)]
    kinds = Counter(shard.format for shard in shards)
    if len(kinds) > 1:
        kind = max(kinds, key=kinds.__getitem__)
        what = f"the folder contains shards of several formats: {', '.join(f'{n} of {k}' for k, n in kinds.items())}"
        raise DataError(what, where=source, remedy=f"choose some of them, such as '{source}/*.{kind}'")
    if not shards:
        raise DataError("no shards in this folder", where=source, remedy=_REMEDY)
    return shards


def _of_state(files: Files, folder: str, listed: Mapping[str, ShardLocation]) -> list[Shard]:
    """The shards of a folder that `datasets` saved. It may also contain results of `map` and `filter`:
    `cache-*.arrow`."""
    names = _saved_names(files.read(listed[STATE], 0, listed[STATE].size), f"{folder}/{STATE}")
    for name in names:
        if name not in listed:
            raise DataError(
                f"{STATE} lists this shard, but the file does not exist", where=f"{folder}/{name}", remedy=_COPY
            )
    return [_shard(listed[name]) for name in names]


def _saved_names(data: bytes, where: str) -> list[str]:
    try:
        return [entry["filename"] for entry in json.loads(data)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        remedy = "save the data set again with save_to_disk, or name the shards: 'DIR/data-*.arrow'"
        what = f"not a file that `datasets` wrote: {type(error).__name__}: {error}"
        raise DataError(what, where=where, remedy=remedy) from error


def _check_matching(pattern: str, found: Sequence[ShardLocation]) -> None:
    """Raise DataError if a pattern also matches files next to a data set that `datasets` saved on this disk."""
    for place in () if scheme(pattern) else found:
        folder, name = os.path.split(place.url)
        state = Path(folder, STATE)
        if state.is_file() and name not in _saved_names(state.read_bytes(), str(state)):
            what = f"{STATE} does not list this file: `datasets` keeps results of map and filter next to a data set"
            raise DataError(what, where=place.url, remedy=f"give the folder: {folder}")


def _check_folder(files: Files, folder: str, listed: Mapping[str, ShardLocation]) -> None:
    """Raise DataError if something that is not read here determines which files of a folder count."""
    if "dataset_dict.json" in listed:
        splits = json.loads(files.read(listed["dataset_dict.json"], 0, listed["dataset_dict.json"].size)).get("splits")
        remedy = " or ".join(f"{folder}/{split}" for split in splits or ["train"])
        raise DataError("the data set has splits", where=folder, remedy=f"name one: {remedy}")
    caches = sorted(name for name in listed if name.startswith("cache-") and name.endswith(".arrow"))
    if "dataset_info.json" in listed and caches:
        what = f"`datasets` keeps results of map and filter among the files of this data set: {caches[0]}"
        raise DataError(what, where=folder, remedy=f"name the files to read, such as '{folder}/NAME-train*.arrow'")
    for name, kind in _TABLES.items():
        if _is_folder(files, f"{folder}/{name}") and any(format_of(one) == "parquet" for one in listed):
            what = f"a {kind} table: {name} determines which of its files count, and old files may still be there"
            raise DataError(what, where=folder, remedy=_OF_TABLES)


def _is_folder(files: Files, url: str) -> bool:
    if not scheme(url):
        return os.path.isdir(url)
    system = files.system(url)
    return bool(tried(url, lambda: system.isdir(url)))


def _shard(place: ShardLocation) -> Shard:
    kind = format_of(place.url.partition("?")[0] if scheme(place.url) in ("http", "https") else place.url)
    if kind is None:
        raise DataError("the format of the shard is not known", where=place.url, remedy=_REMEDY)
    return Shard(place, kind)


def _matching(files: Files, pattern: str) -> list[ShardLocation]:
    """The shards that match a pattern with `*`, `?` or `[]`."""
    if not scheme(pattern):
        return [files.look(path) for path in glob.glob(pattern, recursive=True) if format_of(path)]
    system = files.system(pattern)
    found = tried(pattern, lambda: system.glob(pattern, detail=True))
    return [place_of(_with_scheme(pattern, name), about) for name, about in found.items() if format_of(name)]


def _is_shown(name: str) -> bool:
    return not name.startswith(".") or name == PROGRESS


def _listed(files: Files, source: str) -> dict[str, ShardLocation] | None:
    """The files in a folder by name. None: the source is not a folder. Names that start with a dot are left out."""
    if not scheme(source):
        if not os.path.isdir(source):
            return None
        names = [entry.name for entry in os.scandir(source) if entry.is_file() and _is_shown(entry.name)]
        return {name: files.look(os.path.join(source, name)) for name in names}
    system = files.system(source)
    if not tried(source, lambda: system.isdir(source)):
        return None
    listed = tried(source, lambda: system.ls(source, detail=True))
    entries = {posixpath.basename(about["name"]): about for about in listed if about.get("type") == "file"}
    return {name: place_of(f"{source.rstrip('/')}/{name}", about) for name, about in entries.items() if _is_shown(name)}


def _with_scheme(pattern: str, name: str) -> str:
    return name if "://" in name else f"{scheme(pattern)}://{name.lstrip('/')}"


def _of_index(files: Files, folder: str, listed: Mapping[str, ShardLocation]) -> list[Shard]:
    """The shards that an `index.json` lists.

    Args:
        listed: the files of the folder by name; empty if they are not known.
    """
    url = f"{folder}/{INDEX}" if folder else INDEX
    place = files.look(url)
    try:
        index = json.loads(files.read(place, 0, place.size))
        entries = index["shards"]
        is_own = "lockstep" in index
        if is_own and index["lockstep"] != VERSION:
            remedy = "read it with the version of Lockstep that wrote it, or write it again"
            raise DataError(
                f"the index has version {index['lockstep']}, which this Lockstep does not read",
                where=url,
                remedy=remedy,
            )
        found = [(_own if is_own else _of_mds)(folder, entry, index) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        remedy = "write the shards with `lockstep shards`, or remove this file: Lockstep counts shards without an index"
        raise DataError(f"not an index of shards: {type(error).__name__}: {error}", where=url, remedy=remedy) from error
    for shard in found:
        name = posixpath.basename(shard.place.url)
        if listed and (name not in listed and "/" not in shard.place.url.removeprefix(f"{folder}/")):
            raise DataError(
                f"{INDEX} lists this shard, but the file does not exist", where=shard.place.url, remedy=_COPY
            )
        if name in listed and listed[name].size != shard.place.size:
            raise changed(shard.place, listed[name])
    tags = {name: one.tag for name, one in listed.items()}
    return [
        shard._replace(place=replace(shard.place, tag=tags.get(posixpath.basename(shard.place.url), "")))
        for shard in found
    ]


def changed(counted: ShardLocation, now: ShardLocation) -> DataError:
    """The error for a shard that has changed since it was counted."""
    what = f"the shard has changed since it was counted: {now.size} bytes instead of {counted.size}"
    if now.size == counted.size:
        what = "the shard has changed since it was counted"
    return DataError(what, where=counted.url, remedy=f"start again; if {INDEX} lists it, write the shards again")


def _own(folder: str, entry: Mapping[str, Any], index: Mapping[str, Any]) -> Shard:
    name, form, counted = entry["name"], index["format"], Counted(entry["ends"], entry["begins"], entry["stops"])
    numbers = [entry["bytes"], *counted.ends, *counted.begins, *counted.stops]
    if not isinstance(name, str) or form not in FORMATS or not all(type(number) is int for number in numbers):
        raise ValueError(f"the shard {name!r} of the format {form!r} with the numbers {numbers[:4]}")
    if not len(counted.ends) == len(counted.begins) == len(counted.stops):
        raise ValueError(f"the shard {name!r} has {len(counted.ends)} ends, and {len(counted.begins)} begins")
    return Shard(ShardLocation(f"{folder}/{name}" if folder else name, entry["bytes"]), form, counted)


def _of_mds(folder: str, entry: Mapping[str, Any], index: Mapping[str, Any]) -> Shard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"the format is {entry['format']} {entry['version']}; only MDS version 2 is supported")
    about = {name: entry[name] for name in ("column_names", "column_encodings", "column_sizes", "samples")}
    about["bytes"] = entry["raw_data"]["bytes"]
    if not all(type(about[name]) is int for name in ("samples", "bytes")):
        raise ValueError(f"{about['samples']!r} samples of {about['bytes']!r} bytes")
    stored = entry["zip_data"] or entry["raw_data"]
    if entry["zip_data"]:
        about["compression"] = entry["compression"]
    return Shard(ShardLocation(f"{folder}/{stored['basename']}", stored["bytes"], about=about), "mds")
