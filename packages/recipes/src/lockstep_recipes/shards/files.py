"""Read bytes of shards: from local files, any file system that fsspec supports, and HTTP servers with range
requests."""

from __future__ import annotations

import io
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep.core.errors import DataError, LockstepError, UsageError
from lockstep_recipes.shards.disk import Disk
from lockstep_recipes.shards.lru_cache import LruCache
from lockstep_recipes.shards.places import ShardLocation, scheme

T = TypeVar("T")
WAITS_S = (0.5, 2.0, 8.0)
"""Pauses between the attempts to read from a network, in seconds."""
_TIMEOUT_S = 60.0
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, NotImplementedError)
_RETRIED_CODES = (408, 425, 429)  # HTTP codes to retry, in addition to 500 and above


class Unreachable(LockstepError):
    """A shard cannot be read because a network or a server fails. `data.on_error=skip` does not skip its samples:
    which samples a run trains with must not depend on the network."""

    retryable = from_outside = True


def module(name: str, pip: str, *, where: str) -> Any:
    """An imported module.

    Raises:
        DataError: it is not installed. The error contains the pip command.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{name} is needed: {error}", where=where, remedy=f"pip install {pip}") from error


class Files:
    """Reads files by address. An object belongs to one process: see `Shards`.

    Args:
        options: options of fsspec for the file system (`storage_options` in pandas). For HTTP: only `headers`.
        kept: keeps whole files from a server without range requests.
        disk: keeps chunks of remote shards whose tag shows changes. None: nothing is written.
    """

    def __init__(self, options: Mapping[str, Any], kept: LruCache, disk: Disk | None = None) -> None:
        self.options, self.kept, self.disk = options, kept, disk
        self._systems: dict[str, Any] = {}
        self._without_ranges: set[str] = set()

    # ---- what the formats use

    def read(self, place: ShardLocation, start: int, stop: int, *, keeps: bool = True) -> bytes:
        """The bytes from `start` to before `stop` of a shard.

        Args:
            keeps: keep them on disk, if there is a `disk`.

        Raises:
            DataError: there is no such file, or it ends before `stop`.
            Unreachable: it cannot be read after several attempts.
        """
        if not scheme(place.url):
            data = _tried_local(place.url, lambda: _slice(place.url, start, stop))
        elif self.disk is not None and place.tag and keeps:
            data = self.disk.get(place, start, stop, lambda: self._from_far(place.url, start, stop))
        else:
            data = self._from_far(place.url, start, stop)
        if len(data) != stop - start:
            what = (
                f"bytes {start} to {stop} are incomplete: the shard is truncated, or has changed since it was counted"
            )
            raise DataError(what, where=place.url, remedy="copy or write the shard again, and start again")
        return data

    def _from_far(self, url: str, start: int, stop: int) -> bytes:
        if scheme(url) in ("http", "https"):
            return tried(url, lambda: self._http_range(url, start, stop))
        system = self.system(url)
        return tried(url, lambda: bytes(system.cat_file(url, start=start, end=stop)))

    def open(self, place: ShardLocation) -> io.BufferedReader:
        """A shard as a file for sequential reading."""
        if not scheme(place.url):
            return _tried_local(place.url, lambda: open(place.url, "rb"))
        return io.BufferedReader(_Ranges(self, place), buffer_size=4 << 20)

    def look(self, url: str) -> ShardLocation:
        """The size and the tag of a file.

        Raises:
            DataError, Unreachable: as `read`.
        """
        kind = scheme(url)
        if not kind:
            about = _tried_local(url, lambda: os.stat(url))
            return ShardLocation(url, about.st_size, str(about.st_mtime_ns))
        if kind in ("http", "https"):
            return tried(url, lambda: self._http_look(url))
        system = self.system(url)
        return place_of(url, tried(url, lambda: system.info(url)))

    def system(self, url: str) -> Any:
        """The fsspec file system for an address."""
        kind = scheme(url)
        if kind not in self._systems:
            from fsspec.core import url_to_fs
            from fsspec.registry import known_implementations

            try:
                self._systems[kind] = url_to_fs(url, **self.options)[0]
            except (ImportError, ValueError) as error:
                known = known_implementations.get(kind.split("::")[-1], {})
                remedy = known.get("err") or f"known are {', '.join(sorted(known_implementations))}"
                package = known.get("class", "").partition(".")[0]
                remedy = f"pip install {package}" if package not in ("", "fsspec") else remedy
                raise DataError(f"no file system for {kind}://: {error}", where=url, remedy=remedy) from error
        return self._systems[kind]

    # ---- HTTP with the standard library: fsspec would need aiohttp

    def _request(self, url: str, first: int, last: int) -> Any:
        headers = {**self.options.get("headers", {}), "Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        address = urllib.parse.quote(url, safe="%/:?#[]@!$&'()*+,;=~")  # spaces, and letters beyond ASCII
        request = urllib.request.Request(address, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in _RETRIED_CODES:
                kind = PermissionError if error.code in (401, 403) else FileNotFoundError
                raise kind(f"the server answers {error.code} {error.reason}") from error
            raise

    def _http_range(self, url: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        if url not in self._without_ranges:
            with self._request(url, start, stop - 1) as answer:
                if answer.status == 206:
                    return bytes(answer.read())
            self._without_ranges.add(url)
        data: bytes = self.kept.get(url, lambda: self._http_whole(url))
        return data[start:stop]

    def _http_whole(self, url: str) -> tuple[bytes, int]:
        with self._request(url, 0, 0) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            if 2 * size > self.kept.limit:
                what = f"the server does not support range requests, and the whole shard has {size:,} bytes"
                remedy = f"set Shards(cache='{-(-3 * size // 10**9)}GB'), or use a server with range requests"
                raise UsageError(what, where=url, remedy=remedy)
            data = bytes(answer.read())
        return data, len(data)

    def _http_look(self, url: str) -> ShardLocation:
        with self._request(url, 0, 0) as answer:
            span = answer.headers.get("Content-Range", "").rpartition("/")[2] if answer.status == 206 else ""
            size = span or answer.headers.get("Content-Length", "")
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if not size.isdigit():
            raise NotImplementedError("the server does not say how long the file is")
        return ShardLocation(url, int(size), tag)


def place_of(url: str, about: Mapping[str, Any]) -> ShardLocation:
    """A place made from fsspec's information about a file."""
    names = ("ETag", "etag", "blob_id", "md5Hash", "mtime", "LastModified", "last_modified", "updated")
    tag = next((str(about[name]) for name in names if about.get(name)), "")
    return ShardLocation(url, int(about.get("size") or 0), tag)


def tried(url: str, action: Callable[[], T]) -> T:
    """The result of `action`, which is tried several times, with pauses.

    Raises:
        DataError: retrying would not help: there is no such file, or reading it is not permitted.
        Unreachable: all attempts failed.
    """
    for wait in (*WAITS_S, None):
        try:
            return action()
        except LockstepError:
            raise
        except _FINAL as error:
            remedy = "check the address, and the credentials of the server"
            raise DataError(f"cannot be read: {_text(error)}", where=url, remedy=remedy) from error
        except Exception as error:  # each file system has its own errors
            if wait is None:
                what = f"cannot be read after {len(WAITS_S) + 1} attempts: {_text(error)}"
                remedy = "check network, server and credentials, then run the same command again to continue"
                raise Unreachable(what, where=url, remedy=remedy) from error
            time.sleep(wait)
    raise AssertionError


def _tried_local(path: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        remedy = "check that the shard is there, and its permissions"
        raise DataError(f"cannot be read: {error.strerror}", where=path, remedy=remedy) from error


def _slice(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class _Ranges(io.RawIOBase):
    """A remote file, read with range requests."""

    def __init__(self, files: Files, place: ShardLocation) -> None:
        self.files, self.place, self.at = files, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.place.size}[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        stop = min(self.at + len(buffer), self.place.size)
        if stop <= self.at:
            return 0
        data = self.files.read(self.place, self.at, stop, keeps=False)
        buffer[: len(data)] = data
        self.at = stop
        return len(data)
