"""Write any data set or iterable as shards. Each shard is complete or absent, so an interrupted write continues where
it stopped."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lockstep.core import atomic
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.order import permute
from lockstep.core.errors import DataError, UsageError, number_of
from lockstep_recipes.shards.counts import count
from lockstep_recipes.shards.encode import SUFFIXES, Encoder, fitting
from lockstep_recipes.shards.files import Files, tried
from lockstep_recipes.shards.find import INDEX, PROGRESS, VERSION, Shard
from lockstep_recipes.shards.lru_cache import LruCache
from lockstep_recipes.shards.places import ShardLocation, scheme

_AT_ONCE = 8192  # positions of shuffled samples that are computed together


@dataclass(frozen=True)
class Written:
    """The names in the folder."""

    index: Mapping[str, Any]
    """The content of index.json."""
    resumed: int
    """Samples that were written earlier."""


class _Folder:
    """The output folder: local, or on an fsspec file system."""

    def __init__(self, out: str, options: Mapping[str, Any]) -> None:
        self.out, self.system = out.rstrip("/"), None
        if scheme(out) in ("http", "https"):
            raise UsageError(
                "cannot write to HTTP addresses", where=out, remedy="give a folder, or an address such as s3://"
            )
        if scheme(out):
            self.system = Files(options, LruCache(1)).system(out)
        else:
            try:
                Path(out).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"cannot create the folder: {error.strerror}", where=out, remedy="give a different folder"
                ) from error

    def names(self) -> set[str]:
        if self.system is None:
            return set(os.listdir(self.out))
        system = self.system
        if not tried(self.out, lambda: system.exists(self.out)):
            return set()
        return {os.path.basename(name) for name in tried(self.out, lambda: system.ls(self.out, detail=False))}

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically: an object of a bucket appears only when it is complete."""
        if self.system is None:
            try:
                with atomic.staged_file(Path(self.out, name)) as staging:
                    staging.write_bytes(data)
            except OSError as error:  # the disk is full, or another writer removed its files
                remedy = (
                    "free disk space, and run only one writing command; then run the same command again to continue"
                )
                what = f"cannot be written: {error.strerror}"
                raise DataError(what, where=f"{self.out}/{name}", remedy=remedy) from error
        else:
            system = self.system
            tried(self.out, lambda: system.pipe_file(f"{self.out}/{name}", data))

    def load(self, name: str) -> Any:
        if self.system is None:
            return json.loads(Path(self.out, name).read_bytes())
        system = self.system
        return json.loads(tried(self.out, lambda: system.cat_file(f"{self.out}/{name}")))

    def remove(self, name: str) -> None:
        if self.system is None:
            Path(self.out, name).unlink(missing_ok=True)
        else:
            self.system.rm_file(f"{self.out}/{name}")


def write(
    samples: Any,
    out: str,
    *,
    kind: str | None,
    shard_bytes: int,
    shuffle: int | None = None,
    source: str = "",
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str, int], None] = lambda name, count: None,
) -> Written:
    """Write shards and their index. After a kill, the same call continues: finished shards are kept.

    Args:
        samples: a data set with length and index, or an iterable that returns the same samples each time.
        out: a folder, or an address of fsspec.
        kind: a format, a name of `SUFFIXES`. None: the one that fits the first sample.
        shard_bytes: the approximate size of a shard in bytes.
        shuffle: a seed to shuffle all samples with. None: they keep their order.
        source: the name of the samples, which must be the same when writing continues.
        options: fsspec's `storage_options`.
        tell: gets the name of a finished shard, and its number of samples.

    Raises:
        UsageError: the folder contains other files, or shards of a different source; or `shuffle` is set but the
            samples do not have a length.
        DataError: there are no samples, the format cannot store one, or the samples differ from those that were written
            earlier.
    """
    folder = _Folder(out, options or {})
    state = _begun(folder, {"source": source, "shard_bytes": shard_bytes, "shuffle": shuffle}, kind)
    if "last" not in state:
        _check_source(samples, state, shuffle, out)
        return Written(state, state["samples"])
    resumed, encoder, last = int(state["samples"]), None, None

    def finish() -> None:
        if encoder is not None and encoder.rows:
            name = f"shard-{len(state['shards']):05d}{SUFFIXES[state['format']]}"
            data, samples = encoder.encoded(), len(encoder.rows)
            state["shards"].append(_entry(name, data, samples, state["format"]))
            state["samples"] += samples
            state["last"] = digest_of(last)
            folder.put(name, data)
            folder.put(PROGRESS, json.dumps(state).encode())
            tell(name, samples)

    for sample in _after(samples, shuffle, resumed, state["last"], out):
        if state["format"] is None:
            state["format"] = fitting(sample)
        if encoder is None or encoder.bytes >= shard_bytes:
            finish()
            encoder = Encoder(state["format"], state["samples"])
        try:
            encoder.add(sample)
        except DataError as error:
            where = f"sample {state['samples'] + len(encoder.rows)}"
            raise DataError(error.what, where=where, remedy=error.remedy) from error
        last = sample
    finish()
    if not state["samples"]:
        raise DataError("there are no samples", where=source or out, remedy="give a source with samples")
    state["end"] = state.pop("last")
    folder.put(INDEX, json.dumps(state).encode())
    folder.remove(PROGRESS)
    return Written(state, resumed)


def _check_source(samples: Any, index: Mapping[str, Any], shuffle: int | None, out: str) -> None:
    """Compare a data set with the shards that were made from it: the number of samples, and the last sample.

    Raises:
        DataError: they differ.
    """
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__") or isinstance(samples, IterableDataset):
        return
    count, remedy = index["samples"], "empty this folder, and write all shards again"
    if len(samples) != count:
        raise DataError(
            f"it has {number_of(count, 'sample')}, but the source now has {len(samples):,}", where=out, remedy=remedy
        )
    (last,) = _places(count - 1, count, shuffle)
    if index.get("end") not in (None, digest_of(samples[last])):
        raise DataError("the samples of the source have changed", where=out, remedy=remedy)


def _begun(folder: _Folder, settings: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """The state of a write that starts or continues; or, without `last`, the index of a finished one.

    Args:
        settings: what must be the same when writing continues, in addition to the format.
    """
    names = folder.names()
    if INDEX in names or PROGRESS in names:
        state: dict[str, Any] = folder.load(INDEX if INDEX in names else PROGRESS)
        if not isinstance(state, dict) or not {"lockstep", "written", "format", "shards"} <= state.keys():
            what = f"its {INDEX if INDEX in names else PROGRESS} was not written by `lockstep shards`"
            raise UsageError(what, where=folder.out, remedy="give an empty or a new folder")
        found = {key: state["written"].get(key) for key in settings}
        if found != settings or (kind or state["format"]) != state["format"]:
            what = (
                f"the folder contains shards that were written with different settings: {found}, {state.get('format')}"
            )
            raise UsageError(what, where=folder.out, remedy="give a different folder, or empty this one")
        if missing := [shard["name"] for shard in state["shards"] if shard["name"] not in names]:
            what = f"{len(missing)} of the shards that were written are missing, such as {missing[0]}"
            raise DataError(
                what, where=folder.out, remedy="restore them, or empty this folder and write all shards again"
            )
        if INDEX in names and PROGRESS in names:
            folder.remove(PROGRESS)
        return state
    if others := [name for name in names if not name.startswith(".")]:
        what = f"the folder already contains files, such as {min(others)}"
        raise UsageError(what, where=folder.out, remedy="give an empty or a new folder")
    state = {"lockstep": VERSION, "format": kind, "samples": 0, "shards": [], "last": "", "written": settings}
    folder.put(PROGRESS, json.dumps(state).encode())
    return state


def _entry(name: str, data: bytes, samples: int, kind: str) -> dict[str, Any]:
    """The index entry of a shard. Its samples are counted as readers count them."""
    try:
        found = count(Shard(ShardLocation(name, len(data)), kind), io.BytesIO(data))
    except DataError as error:
        raise DataError(error.what, where=error.where, remedy="rename samples and values") from error
    if found.samples != samples:
        what = f"{number_of(samples, 'sample', 'was', 'were')} written, but a reader counts {found.samples}"
        raise DataError(what, where=name, remedy="give a different --format")
    blocks = {"ends": found.ends, "begins": found.begins, "stops": found.stops}
    return {"name": name, "bytes": len(data), "samples": samples} | blocks


def _places(begin: int, length: int, shuffle: int | None) -> Iterator[int]:
    for start in range(begin, length, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, length))
        yield from (places if shuffle is None else permute(places, length, shuffle)).tolist()


def _after(samples: Any, shuffle: int | None, begin: int, last: str, out: str) -> Iterator[Any]:
    """The samples from number `begin`. The one before it must be the last one that was written.

    Args:
        last: the digest of the last sample that was written.
    """
    has_index = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    has_index &= not isinstance(samples, IterableDataset)  # it inherits an index that does not work
    if has_index:
        length = len(samples)
        found: Iterator[Any] = (samples[place] for place in _places(max(0, begin - 1), length, shuffle))
    else:
        if shuffle is not None:
            what = "the samples have no length and no index, so they cannot be shuffled"
            raise UsageError(what, where="--shuffle", remedy="remove it, or give a data set with len() and [index]")
        found = itertools.islice(iter(samples), max(0, begin - 1), None)
    if begin and digest_of(next(found, None)) != last:
        what = f"sample {begin - 1} differs from the one that was written: the source has changed"
        raise DataError(
            what, where=out, remedy="give a source that returns the same samples each time, or empty this folder"
        )
    return found
