"""The file of a bundle: a zip archive with `bundle.json`, the source of the task, and `content.pt`.

`bundle.json` is plain text, which can be read without executing anything. `content.pt` is a pickle of torch, and needs
the source. So whoever loads it runs code of the bundle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
import zipfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.errors import UsageError

FORMAT = 1
"""Of `bundle.json`. It changes when an older reader would misunderstand a bundle."""
_ABOUT, _CONTENT, _SOURCE = "bundle.json", "content.pt", "source"


def write(path: Path, about: Mapping[str, Any], sources: Mapping[str, str], content: Any) -> None:
    """Write a bundle, whole or not at all.

    Args:
        about: what `read_about` returns.
        sources: texts by their path below the folder of the source.
        content: what `torch.save` writes, by `save`.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with (
            atomic.staged_file(path) as staging,
            zipfile.ZipFile(staging, "w", zipfile.ZIP_STORED) as archive,
        ):
            archive.writestr(_ABOUT, json.dumps({"format": FORMAT, **about}, indent=1))
            for name, text in sources.items():
                archive.writestr(f"{_SOURCE}/{name}", text)
            with archive.open(_CONTENT, "w", force_zip64=True) as file:
                content(file)
    except OSError as error:
        remedy = "make room, or give another place" if error.errno == errno.ENOSPC else "give another place"
        what = f"cannot be written: {error.strerror or error}"
        raise UsageError(what, where=str(path), remedy=remedy) from error


def read_about(path: Path) -> dict[str, Any]:
    """The content of `bundle.json`. Nothing of the bundle is executed.

    Raises:
        UsageError: the file is not a bundle, is not complete, or is of a later version.
    """
    with _opened(path) as archive:
        about: dict[str, Any] = json.loads(archive.read(_ABOUT))
    if about.get("format") != FORMAT:
        versions = about.get("versions", {})
        what = f"the bundle has format {about.get('format')}, and this version of Lockstep reads format {FORMAT}"
        raise UsageError(what, where=str(path), remedy=f"use Lockstep {versions.get('lockstep', '')}, which wrote it")
    return about


def sources(path: Path) -> dict[str, int]:
    """The files of code in a bundle, with their sizes in bytes."""
    with _opened(path) as archive:
        return {
            one.filename.removeprefix(f"{_SOURCE}/"): one.file_size
            for one in archive.infolist()
            if one.filename.startswith(f"{_SOURCE}/")
        }


@contextlib.contextmanager
def unpacked(path: Path) -> Generator[tuple[Path, Path], None, None]:
    """Inside, the folder of the source and the file of the content are there. Nothing of them is executed.

    Raises:
        UsageError: the bundle is damaged, or there is no room for its content.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-bundle-") as name:
        with _opened(path) as archive:
            try:
                archive.extractall(name)  # it compares checksums, and writes nothing outside of the folder
            except OSError as error:
                where = f"{path}, unpacked into {name}"
                remedy = "make room there, or set TMPDIR"
                raise UsageError(f"cannot be unpacked: {error.strerror}", where=where, remedy=remedy) from error
        folder = Path(name)
        yield folder / _SOURCE, folder / _CONTENT


@contextlib.contextmanager
def _opened(path: Path) -> Generator[zipfile.ZipFile, None, None]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        what = f"is not a whole bundle: {error}"
        remedy = "compare its size with that of the original, and copy it again; or write it again: lockstep bundle"
        raise UsageError(what, where=str(path), remedy=remedy) from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
