"""Predictions as a table: CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError

_SUFFIXES = (".csv", ".jsonl")


def check(path: Path) -> None:
    """Raises UsageError where `path` cannot be written, or has another suffix."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"unknown suffix {path.suffix!r}", where=f"--out {path}", remedy="end it with .csv or .jsonl")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError("cannot be written there", where=f"--out {path}", remedy="give a file in a folder that exists and is writable")


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows` so that a kill leaves the whole file or none. In CSV, `{"a": {"b": 1}}` is a column `a/b`, and a list is JSON.

    Raises:
        UsageError: the disk is full, or not writable.
    """
    staged = path.with_name(f".{path.name}.new")
    try:
        with staged.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            if path.suffix == ".jsonl":
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                flat = [_flat(row) for row in rows]
                writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)))
                writer.writeheader()
                writer.writerows(flat)
        staged.replace(path)
    except BaseException as error:
        staged.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"cannot be written: {error.strerror}", where=f"--out {path}", remedy="free disk space, or choose another place") from error


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat
