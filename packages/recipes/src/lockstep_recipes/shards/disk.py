"""Cache chunks of remote shards on the disk of this machine, for all its processes: each chunk is downloaded once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from lockstep import locks
from lockstep.cache_folder import cache_root
from lockstep.core import atomic
from lockstep_recipes.shards.places import ShardLocation


class Disk:
    """A disk cache with a limit, which is checked from time to time. The least recently used chunks are deleted first.

    Args:
        limit: bytes of all chunks of all shards on this machine.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.folder = limit, cache_root() / "shards" / "parts"
        self._new = limit  # bytes since the folder was last checked; the first chunk checks it

    def get(self, place: ShardLocation, start: int, stop: int, load: Callable[[], bytes]) -> bytes:
        """The bytes from `start` to before `stop`. One process loads them, and all others wait for it."""
        key = json.dumps([place.url, place.size, place.tag, start, stop]).encode()
        path = self.folder / hashlib.sha256(key).hexdigest()[:32]
        if (data := _read(path)) is not None:
            return data
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # without a lock, several processes load the same bytes
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(locks.locked(self.folder / f".{path.name[:3]}.lock", poll_s=0.02))
            if (data := _read(path)) is None:
                data = load()
                self._new += len(data)
                if self._new > self.limit // 16:
                    self._let_go()
                with contextlib.suppress(OSError), atomic.staged_file(path) as staging:  # a full disk only costs time
                    staging.write_bytes(data)
        return data

    def _let_go(self) -> None:
        self._new = 0
        parts = []
        with contextlib.suppress(OSError):  # the folder does not exist, or another process was first
            for entry in os.scandir(self.folder):
                if not entry.name.startswith("."):
                    parts.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        size = sum(part[1] for part in parts)
        for _, bytes_, path in sorted(parts):
            if size <= self.limit * 15 // 16:
                break
            Path(path).unlink(missing_ok=True)
            size -= bytes_


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    return data
