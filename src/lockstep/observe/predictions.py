"""Predictions as text, as a table (CSV or JSON lines), or as arrays (NumPy or safetensors)."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import atomic
from lockstep.errors import UsageError
from lockstep.observe import arrays
from lockstep.observe.plain import dumps, plain

_SUFFIXES = (".csv", ".jsonl", ".npz", ".safetensors")


def check(path: Path) -> None:
    """Raises UsageError where `path` cannot be written, or has another suffix."""
    if path.suffix not in _SUFFIXES:
        remedy = f"end it with {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        raise UsageError(f"unknown suffix {path.suffix!r}", where=f"--out {path}", remedy=remedy)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            "cannot be written there",
            where=f"--out {path}",
            remedy="give a file in a folder that exists and is writable",
        )


def text(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON, whole: tensors and arrays as lists, numbers that are not finite as null.

    Raises:
        UsageError: something in it cannot be written as JSON.
    """
    return dumps(_plain(row), ensure_ascii=False)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write `rows` so that a kill leaves the whole file or none.

    In CSV, `{"a": {"b": 1}}` is a column `a/b`, and a list is JSON. For .npz and .safetensors see `arrays.stack`.

    Returns:
        names that the format has no place for.

    Raises:
        UsageError: the disk is full, or not writable; values that the format cannot hold.
    """
    try:
        with atomic.staged_file(path) as staging:
            if path.suffix in (".npz", ".safetensors"):
                return arrays.write(staging, rows, path)
            _write_text(staging, rows, path.suffix)
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}",
            where=f"--out {path}",
            remedy="free disk space, or choose another place",
        ) from error
    return []


def _write_text(path: Path, rows: Sequence[Mapping[str, Any]], suffix: str) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if suffix == ".jsonl":
            file.writelines(text(row) + "\n" for row in rows)
        else:
            flat = [_flat(_plain(row)) for row in rows]
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)))
            writer.writeheader()
            writer.writerows(flat)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {str(name): plain(value) for name, value in row.items()}
    except TypeError as error:
        remedy = "return numbers, text, tensors, arrays, and lists or mappings of these"
        raise UsageError(f"a value of type {error} cannot be written", where="Task.describe", remedy=remedy) from None


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat
