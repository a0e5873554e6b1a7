"""Writes predictions as text, as CSV, JSON or JSON lines, as arrays (NumPy or safetensors), or into a folder."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from lockstep.core import atomic
from lockstep.core.errors import UsageError
from lockstep.parts.plain import dumps, plain
from lockstep.trainer import arrays

_SUFFIXES = (".csv", ".json", ".jsonl", ".npz", ".safetensors")
_ARRAYS = (".npz", ".safetensors")
ROWS = "predictions.jsonl"
"""The file in the folder with the rows of all predictions."""
MARKER = ".lockstep-predictions"
"""An empty file that marks a folder of predictions: what is in it may be replaced by other predictions."""
_SHOWN = 8  # names in an error
_LONGEST = 100  # characters of a part of a name
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\]')


def is_folder(path: Path | None) -> bool:
    """True if predictions are written into a folder: `path` has no suffix, or is a folder without such a suffix as
    files of predictions have."""
    if path is None or path.name.startswith("."):
        return path is not None and path.is_dir()
    return not path.suffix or (path.is_dir() and path.suffix not in _SUFFIXES)


def file_of(path: Path) -> Path:
    """The file with the rows of predictions that are written to `path`."""
    return path / ROWS if is_folder(path) else path


def takes_rows(path: Path | None) -> bool:
    """True if `path` holds the rows of `Presenter.rows`: any number for each sample. Otherwise, and on stdout, a sample
    has one object."""
    return path is not None and path.suffix not in _ARRAYS


def check(path: Path, skips: bool = False) -> None:
    """Check, before predicting, that predictions can be written to `path`: a file, or a folder (see `is_folder`).

    Args:
        skips: whether inputs that cannot be read are left out.

    Raises:
        UsageError: the suffix is unknown, or the folder does not exist, is not writable, or holds something else than
            predictions; or the format has no texts, and so cannot say which inputs were left out.
    """
    if is_folder(path):
        nearest = path if path.exists() else path.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            remedy = "give a folder that is writable, or a new folder in such a folder"
            raise UsageError("cannot be written there", where=f"--out {path}", remedy=remedy)
        check_free(path)
        return
    if path.suffix not in _SUFFIXES:
        remedy = f"end it with {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, or give a folder (no suffix)"
        raise UsageError(f"unknown suffix {path.suffix!r}", where=f"--out {path}", remedy=remedy)
    if skips and path.suffix == ".safetensors":
        raise UsageError(
            "it holds numbers only, so it cannot show which inputs were left out",
            where=f"--out {path}",
            remedy="use .csv, .jsonl or .npz, or --on-error raise",
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            "cannot be written there",
            where=f"--out {path}",
            remedy="give a file in a folder that exists and is writable",
        )


def text(prediction: Mapping[str, Any]) -> str:
    """A prediction as one line of JSON: tensors and arrays as lists, numbers that are not finite as null.

    Raises:
        UsageError: a value cannot be written as JSON.
    """
    return dumps(_plain(prediction), ensure_ascii=False)


def write(path: Path, predictions: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write predictions in the format that the suffix of `path` names. A kill leaves the whole file or none.

    In CSV, `{"a": {"b": 1}}` is a column `a/b`, and a list is JSON. For .npz and .safetensors see `arrays.stack`.

    Returns:
        names that are left out because the format cannot hold their values.

    Raises:
        UsageError: the file cannot be written, or a value is of a type that no format can hold.
    """
    with opened(path) as rows:
        for prediction in predictions:
            rows.add(prediction)
    return rows.left_out


class PredictionRows(Protocol):
    """Receives predictions one by one."""

    left_out: list[str]
    """At the end: names that are left out because the format cannot hold their values."""

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        """Write a prediction.

        Args:
            readable: whether there is a prediction. Otherwise the mapping says which sample could not be read, and
                why. Arrays have no place for it.

        Raises:
            UsageError: the disk is full, or a value is of a type that no format can hold.
        """


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[PredictionRows]:
    """Yield what writes predictions one by one, as `write` does. None: lines of JSON on stdout.

    If `path` is a folder, which is made if necessary, they are written to its `predictions.jsonl`.

    Predictions are not kept in memory, except for .npz and .safetensors. If the block raises, a file that was there
    stays as it was.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        yield _Printed()
        return
    with contextlib.ExitStack() as stack:
        with _naming(path):
            if is_folder(path):
                path.mkdir(exist_ok=True)
                (path / MARKER).touch()
            path = file_of(path)
            rows = _FORMATS.get(path.suffix, _Arrays)(path, stack.enter_context(atomic.staged_file(path)))
            stack.callback(rows.close)
        yield rows
        with _naming(path):
            rows.finish()
            stack.close()  # flushes the file to disk, and puts it into its place


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError of writing into a UsageError that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}",
            where=f"--out {path}",
            remedy="free disk space, or choose another place",
        ) from error


def _close(file: IO[str]) -> None:
    """Close a file after a fault. Closing writes the rest, which nobody needs, and fails again if the disk is full."""
    with contextlib.suppress(OSError):
        file.close()


class _Printed:
    """Lines of JSON on stdout."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        print(text(prediction))


class _Lines:
    """Lines of JSON in a file."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.left_out: list[str] = []
        self.path = path
        self.file = staging.open("w", encoding="utf-8", errors="backslashreplace", newline="")

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        line = text(prediction) + "\n"
        with _naming(self.path):
            self.file.write(line)

    def finish(self) -> None:
        self.file.close()

    def close(self) -> None:
        _close(self.file)


class _Array(_Lines):
    """An array of JSON in a file, with a line for each prediction. Samples that cannot be read are left out: a reader
    of such a file (of COCO results) expects the same names in every object."""

    separator = "[\n"

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        if readable:
            line = self.separator + text(prediction)
            self.separator = ",\n"
            with _naming(self.path):
                self.file.write(line)

    def finish(self) -> None:
        self.file.write("[]\n" if self.separator.startswith("[") else "\n]\n")
        super().finish()


class _Table:
    """A table in CSV. Its columns are known at the end, so the rows wait as lines of JSON in a file without a name."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.left_out: list[str] = []
        self.path, self.staging = path, staging
        self.columns: dict[str, None] = {}
        self.waiting = tempfile.TemporaryFile("w+", encoding="utf-8", dir=path.parent)

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        flat = _flat(_plain(prediction))
        self.columns |= dict.fromkeys(flat)
        with _naming(self.path):
            self.waiting.write(json.dumps(flat) + "\n")

    def finish(self) -> None:
        self.waiting.seek(0)
        with self.staging.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.DictWriter(file, list(self.columns))
            writer.writeheader()
            writer.writerows(json.loads(line) for line in self.waiting)

    def close(self) -> None:
        _close(self.waiting)


class _Arrays:
    """Arrays by name, which are stacked at the end."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.left_out: list[str] = []
        self.path, self.staging = path, staging
        self.rows: list[Mapping[str, Any]] = []

    def add(self, prediction: Mapping[str, Any], readable: bool = True) -> None:
        if readable:
            self.rows.append(prediction)

    def finish(self) -> None:
        self.left_out = arrays.write(self.staging, self.rows, final=self.path)

    def close(self) -> None:
        self.rows = []


_FORMATS: dict[str, type[_Lines | _Table | _Arrays]] = {".jsonl": _Lines, ".json": _Array, ".csv": _Table}


def _plain(prediction: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {str(name): plain(value) for name, value in prediction.items()}
    except TypeError as error:
        remedy = "return numbers, text, tensors, arrays, and lists or mappings of these"
        raise UsageError(
            f"a value of type {error} cannot be written", where="Presenter.describe", remedy=remedy
        ) from None


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping, with names joined by `/` and lists as JSON."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat


# ---- files of single predictions, such as masks: several ranks write into the folder at the same time


def check_free(folder: Path) -> None:
    """Check that `folder` has predictions, or nothing but hidden files, or is not there. Nothing is written.

    Raises:
        UsageError: it holds something else; names it.
    """
    if not folder.is_dir() or (folder / MARKER).exists():
        return
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if not path.name.startswith("."))
    if names:
        more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        raise UsageError(
            f"the folder contains more than predictions of Lockstep: {', '.join(names[:_SHOWN])}{more}. Predictions "
            "could replace files of the same name",
            where=f"--out {folder}",
            remedy=f"give a new or an empty folder, such as {folder / 'predictions'}",
        )


def distinct_names(places: Sequence[str]) -> list[str]:
    """A name for the files of each sample, made of the place that the sample comes from. No two names are equal, also
    if the file system does not distinguish capital letters from small letters.

    The name is the path below the folder that all places share, without suffix. If this would name two samples,
    their suffixes stay; if names are then still equal, a number is added. The names depend only on `places`.
    """
    if not places:
        return []
    paths = [os.path.abspath(place) for place in places]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    whole = [_cleaned(os.path.relpath(path, shared)) for path in paths]
    stems = [os.path.splitext(name)[0] for name in whole]
    count = Counter(stem.casefold() for stem in stems)
    taken = {Path(ROWS).stem}
    names = []
    for stem, with_suffix in zip(stems, whole, strict=True):
        name = first = stem if count[stem.casefold()] == 1 else with_suffix
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{first}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


def _cleaned(path: str) -> str:
    """A relative path with characters that every file system takes."""
    return "/".join(_NOT_IN_NAMES.sub("_", part)[-_LONGEST:] for part in Path(path).parts)


class PredictionFiles:
    """Writes the files of predictions below a folder, which is made if it is not there.

    Args:
        names: of the samples, as `distinct_names` gives them.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def write(self, index: int, files: Mapping[str, bytes]) -> None:
        """Write the files of one sample. A kill leaves whole files. Files of earlier predictions are replaced.

        Args:
            files: the contents by path, as `Presenter.files` gives them.

        Raises:
            UsageError: a path has no `*`, or leads out of the folder; a content is not bytes; a file cannot be written.
        """
        for pattern, content in files.items():
            path = PurePosixPath(pattern)
            if "*" not in pattern or path.is_absolute() or ".." in path.parts:
                remedy = "return a path below the folder with a * for the name of the sample, such as 'masks/*.png'"
                raise UsageError(f"the path {pattern!r}", where="Presenter.files", remedy=remedy)
            if not isinstance(content, bytes):
                what = f"the content of {pattern!r} is of type {type(content).__name__}"
                raise UsageError(what, where="Presenter.files", remedy="return bytes")
            self._write(self.folder / pattern.replace("*", self.names[index]), content)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.staged_file(path) as staging:
                staging.write_bytes(content)
        except OSError as error:
            remedy = "free disk space, or choose another folder with --out"
            raise UsageError(f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from error
