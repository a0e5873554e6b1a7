"""Count the samples of shards once: one process of each machine counts, and the cache folder keeps the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep import locks
from lockstep.cache_folder import cache_root
from lockstep.core import atomic
from lockstep.core.errors import LockstepError
from lockstep_recipes.shards.files import Files
from lockstep_recipes.shards.find import FORMATS, Shard
from lockstep_recipes.shards.formats.blocks import Counted, damaged
from lockstep_recipes.shards.places import ShardLocation

_FORMAT = 2  # version of the cached files; shards with a different version are counted again
_AT_ONCE = 8  # shards that are counted at the same time
_TOLD = 1 << 28  # from this many bytes of uncounted shards, the log mentions it


def counted(files: Files, shards: Sequence[Shard]) -> list[Counted]:
    """The samples of each shard: from an index, from the cache folder, or counted now.

    Raises:
        DataError: a shard is damaged.
        Unreachable: a shard cannot be read.
    """
    found = [shard.counted or _kept(shard.place) for shard in shards]
    if all(one is not None for one in found):
        return [one for one in found if one is not None]
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without a lock, each process counts
            _folder().mkdir(parents=True, exist_ok=True)
            names = hashlib.sha256("\n".join(shard.place.url for shard in shards).encode()).hexdigest()[:32]
            held.enter_context(locks.locked(_folder() / f".{names}.lock"))
        missing = [shard for shard, one in zip(shards, found, strict=True) if one is None and not _kept(shard.place)]
        size = sum(shard.place.size for shard in missing)
        if size > _TOLD:
            text = f"counting the samples of {len(missing):,} shards ({size / 1e9:,.1f} GB); this happens only once"
            print(text, file=sys.stderr, flush=True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            fresh = dict(
                zip([one.place for one in missing], pool.map(lambda one: _count(files, one), missing), strict=True)
            )
        return [
            one or fresh.get(shard.place) or _kept(shard.place) or _count(files, shard)
            for shard, one in zip(shards, found, strict=True)
        ]


def count(shard: Shard, file: Any) -> Counted:
    """Count the samples of a shard that is open as a file.

    Raises:
        DataError: the shard is damaged.
    """
    try:
        return FORMATS[shard.format].count(file, shard.place)
    except LockstepError:
        raise
    except Exception as error:  # pyarrow, gzip and others have their own errors
        what = f"not readable as {shard.format}: {type(error).__name__}: {error}"
        raise damaged(what, shard.place) from error


def _count(files: Files, shard: Shard) -> Counted:
    with files.open(shard.place) as file:
        found = count(shard, file)
    if shard.place.tag:
        with contextlib.suppress(OSError):  # without a cached count, the next start counts again
            atomic.write_text(_file(shard.place), json.dumps([found.ends, found.begins, found.stops]))
    return found


def _kept(place: ShardLocation) -> Counted | None:
    """What the cache folder has for this version of a shard. A shard without a tag may have changed unnoticed."""
    if not place.tag:
        return None
    try:
        return Counted(*json.loads(_file(place).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _file(place: ShardLocation) -> Path:
    key = json.dumps([_FORMAT, place.url, place.size, place.tag, dict(place.about)])
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _folder() -> Path:
    return cache_root() / "shards"
