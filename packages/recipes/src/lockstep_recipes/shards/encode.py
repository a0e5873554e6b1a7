"""Encode samples of any kind as a shard: Parquet, tar in the WebDataset layout, or JSON lines."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.shards.files import module
from lockstep_recipes.shards.formats.blocks import BLOCK

SUFFIXES = {"parquet": ".parquet", "tar": ".tar", "jsonl": ".jsonl"}
"""The formats for writing, and the suffix of their shards."""


def columns(sample: Any) -> dict[str, Any]:
    """A sample as values by name. A tuple has the names 0, 1, ...; a text is named text, and any other value is named
    value."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    if isinstance(sample, tuple | list):
        return {str(number): value for number, value in enumerate(sample)}
    return {"text" if isinstance(sample, str) else "value": sample}


def fitting(sample: Any) -> str:
    """The best format for samples like this: tar for arrays, images and members; JSON lines for nested values that JSON
    supports; otherwise Parquet."""
    values = columns(sample)
    if "__key__" in values or any(map(_is_array, values.values())) or any(map(_is_image, values.values())):
        return "tar"
    nested = any(isinstance(value, Mapping) or _has_mapping(value) for value in values.values())
    try:
        json.dumps(values)
    except (TypeError, ValueError):
        return "parquet"
    return "jsonl" if nested else "parquet"


class Encoder:
    """Collects the samples of one shard.

    Args:
        kind: a format, a name of `SUFFIXES`.
        first: the number of the first sample, from which the KEYs of a tar are made if samples have none.
    """

    def __init__(self, kind: str, first: int) -> None:
        self.kind, self.first = kind, first
        self.rows: list[Any] = []
        self.bytes = 0
        """The approximate size of the shard in bytes."""

    def add(self, sample: Any) -> None:
        """Add a sample.

        Raises:
            DataError: the format cannot hold it.
        """
        if self.kind == "jsonl":
            try:
                line = json.dumps(_plain(sample), ensure_ascii=False).encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise DataError(f"JSON cannot hold it: {error}", remedy="give --format parquet or tar") from error
            self.rows.append(line)
            self.bytes += len(line)
        elif self.kind == "tar":
            found = dict(_member(name, value) for name, value in columns(sample).items())
            self.rows.append(found)
            self.bytes += sum(len(data) + 1024 for name, data in found.items() if name != "__key__")
        else:
            row = {name: _plain(value) for name, value in columns(sample).items()}
            self.rows.append(row)
            self.bytes += sum(map(_size, row.values()))

    def encoded(self) -> bytes:
        """The encoded shard.

        Raises:
            DataError: columns of Parquet hold values of different kinds.
        """
        if self.kind == "jsonl":
            return b"".join(self.rows)
        return self._tar() if self.kind == "tar" else self._parquet()

    def _tar(self) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for number, members in enumerate(self.rows):
                key = members.pop("__key__", b"").decode() or f"{self.first + number:09d}"
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        return file.getvalue()

    def _parquet(self) -> bytes:
        parquet = module("pyarrow.parquet", "pyarrow", where="lockstep shards")
        import pyarrow

        names = dict.fromkeys(name for row in self.rows for name in row)
        try:
            table = pyarrow.table({name: [row.get(name) for row in self.rows] for name in names})
        except (pyarrow.ArrowException, OverflowError, TypeError) as error:
            what = f"the samples from {self.first} do not fit into columns: {error}"
            raise DataError(what, where="--format parquet", remedy="give --format jsonl or tar") from error
        sink = io.BytesIO()
        rows = max(1, len(self.rows) * BLOCK // max(1, self.bytes))
        parquet.write_table(table, sink, row_group_size=rows, write_page_checksum=True)
        return sink.getvalue()


def _member(name: str, value: Any) -> tuple[str, bytes]:
    """A value as a member of a tar. The extension names its encoding, as WebDataset's decoders expect."""
    if name == "__key__" and "." not in str(value).rpartition("/")[2]:
        return name, str(value).encode()
    if "/" in name or name == "__key__":
        remedy = "name values without a slash, and KEYs without a dot"
        raise DataError(f"{name!r}: {value!r:.80} is not a valid member name", where="--format tar", remedy=remedy)
    if isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        return _ending(name, "txt", "cls", "text"), value.encode()
    if _is_image(value):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return _ending(name, "png"), file.getvalue()
    if _is_array(value):
        file = io.BytesIO()
        np.save(file, np.asarray(value), allow_pickle=False)
        return _ending(name, "npy"), file.getvalue()
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return _ending(name, "cls"), str(int(value)).encode()
    try:
        return _ending(name, "json"), json.dumps(_plain(value)).encode()
    except (TypeError, ValueError) as error:
        remedy = "give bytes, a text, a number, an array, a PIL image, or what JSON can hold"
        raise DataError(
            f"{name!r} is a {type(value).__name__}: {error}", where="--format tar", remedy=remedy
        ) from error


def _ending(name: str, *endings: str) -> str:
    return name if name.rpartition(".")[2].lower() in endings else f"{name}.{endings[0]}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, np.generic)


def _is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "save")


def _has_mapping(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str | bytes) and isinstance(next(iter(value), 0), Mapping)
    )


def _plain(value: Any) -> Any:
    """A value with its arrays converted to numbers and lists."""
    if isinstance(value, np.generic) or _is_array(value):
        return np.asarray(value).tolist()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _size(value: Any) -> int:
    """The approximate size of a value in a column, in bytes."""
    if isinstance(value, str | bytes):
        return len(value) + 4
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8
