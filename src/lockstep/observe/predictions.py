"""Writes predictions as text, as CSV or JSON lines, or as arrays (NumPy or safetensors)."""

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
    """Check, before predicting, that predictions can be written to `path`.

    Raises:
        UsageError: the suffix is unknown, or the folder does not exist or is not writable.
    """
    if path.suffix not in _SUFFIXES:
        remedy = f"end it with {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        raise UsageError(f"unknown suffix {path.suffix!r}", where=f"--out {path}", remedy=remedy)
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


def write(path: Path, predictions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write predictions in the format that the suffix of `path` names. A kill leaves the whole file or none.

    In CSV, `{"a": {"b": 1}}` is a column `a/b`, and a list is JSON. For .npz and .safetensors see `arrays.stack`.

    Returns:
        names that are left out because the format cannot hold their values.

    Raises:
        UsageError: the file cannot be written, or a value is of a type that no format can hold.
    """
    try:
        with atomic.staged_file(path) as staging:
            if path.suffix in (".npz", ".safetensors"):
                return arrays.write(staging, predictions, final=path)
            _write_text(staging, predictions, path.suffix)
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}",
            where=f"--out {path}",
            remedy="free disk space, or choose another place",
        ) from error
    return []


def _write_text(path: Path, predictions: Sequence[Mapping[str, Any]], suffix: str) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        if suffix == ".jsonl":
            file.writelines(text(prediction) + "\n" for prediction in predictions)
        else:
            flat = [_flat(_plain(prediction)) for prediction in predictions]
            writer = csv.DictWriter(file, list(dict.fromkeys(name for values in flat for name in values)))
            writer.writeheader()
            writer.writerows(flat)


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
