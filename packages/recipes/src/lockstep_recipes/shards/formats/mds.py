"""MDS, the format of MosaicML's StreamingDataset, version 2.

A shard starts with the number of samples (uint32), then the byte offset of each sample and the end of the last one
(uint32 each). A sample starts with the size (uint32) of each column without a fixed size; the values follow.
`index.json` contains the columns and their encodings. The source of `mosaicml-streaming` defines the format.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, BinaryIO

import numpy as np

from lockstep.core.errors import DataError, number_of
from lockstep_recipes.shards.files import module
from lockstep_recipes.shards.formats.blocks import Counted, Offsets, Read, damaged
from lockstep_recipes.shards.places import ShardLocation

_SHAPES = ("uint8", "uint16", "uint32", "uint64")  # by the two low bits of the byte with the number of dimensions
_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_TYPES |= {64: "uint64", 65: "int64", 66: "float64"}
_SCALARS = {kind: np.dtype(kind) for kind in _TYPES.values()}


class Mds:
    """MDS. A sample is a dict of values by column, images as PIL images. A compressed shard is one block."""

    suffixes = (".mds",)

    def count(self, file: BinaryIO, place: ShardLocation) -> Counted:
        counted, about = Counted(), place.about
        if "compression" in about:
            counted.add_block(about["samples"], 0, place.size)
            return counted
        offsets = _offsets(file.read(4 * (about["samples"] + 2)), place)
        for begin, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            counted.add(1, begin, stop)
        return counted

    def head(self, read: Read, place: ShardLocation, counted: Counted) -> tuple[Any, int]:
        if "compression" in place.about:
            return None, 0
        data = read(0, 4 * (place.about["samples"] + 2))
        first = [0, *counted.ends[:-1]]
        return (_offsets(data, place), list(zip(first, counted.ends, counted.begins, strict=True))), 2 * len(data)

    def block(self, data: bytes, head: Any, place: ShardLocation, number: int) -> MdsSamples:
        if "compression" in place.about:
            data = _unpacked(data, place)
            return MdsSamples(data, _offsets(data[: 4 * (place.about["samples"] + 2)], place), place)
        offsets, blocks = head
        first, end, begin = blocks[number]
        return MdsSamples(data, offsets[first : end + 1] - begin, place)


def _offsets(data: bytes, place: ShardLocation) -> Offsets:
    numbers = np.frombuffer(data[: len(data) // 4 * 4], "<u4").astype(np.int64)
    expected = place.about["samples"]
    if len(numbers) != expected + 2 or numbers[0] != expected:
        found = int(numbers[0]) if len(numbers) else 0
        raise damaged(
            f"the shard has {number_of(found, 'sample')} according to its header, but {expected} according to "
            "index.json",
            place,
        )
    return numbers[1:]


def _unpacked(data: bytes, place: ShardLocation) -> bytes:
    kind = str(place.about["compression"]).partition(":")[0]
    if kind == "gz":
        return gzip.decompress(data)
    if kind == "bz2":
        return bz2.decompress(data)
    pyarrow = module("pyarrow", "pyarrow", where=place.url)
    if kind == "snappy":
        return bytes(pyarrow.decompress(data, decompressed_size=place.about["bytes"], codec="snappy", asbytes=True))
    names = {"br": "brotli", "zstd": "zstd"}
    if kind not in names:
        raise DataError(f"unknown compression {kind!r}", where=place.url, remedy="write the shards again")
    return bytes(pyarrow.CompressedInputStream(pyarrow.BufferReader(data), names[kind]).read())


class MdsSamples:
    """Samples of a shard that are decoded on request.

    Args:
        offsets: where each sample begins in `data`, and where the last one ends.
    """

    def __init__(self, data: bytes, offsets: Offsets, place: ShardLocation) -> None:
        self.data, self.offsets, self.nbytes = data, offsets, len(data) + offsets.nbytes
        columns = (place.about[name] for name in ("column_names", "column_encodings", "column_sizes"))
        self.columns = list(zip(*columns, strict=True))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        data = memoryview(self.data)[self.offsets[row] : self.offsets[row + 1]]
        own = sum(not size for _, _, size in self.columns)
        sizes, at, sample = iter(np.frombuffer(data[: 4 * own], "<u4").tolist()), 4 * own, {}
        for name, encoding, fixed in self.columns:
            size = fixed or next(sizes)
            sample[name] = decoded(encoding, bytes(data[at : at + size]))
            at += size
        return sample


def decoded(encoding: str, data: bytes) -> Any:
    """A value of a column.

    Raises:
        DataError: the encoding is unknown, or is `pkl`, which can run arbitrary code.
    """
    kind, _, details = encoding.partition(":")
    if kind in _SCALARS:
        return np.frombuffer(data, _SCALARS[kind])[0]
    if kind == "ndarray":
        return _array(details, data)
    if kind in ("list[pil]", "list[jpeg]", "list[png]", "jpeg_array", "jpegarray"):
        inner = "jpeg" if kind.startswith("jpeg") else kind[5:-1]
        return [decoded(inner, part) for part in _list(data[4:] if kind.startswith("list") else data)]
    if kind not in _DECODERS:
        remedy = (
            "write the shards again with a different encoding: `lockstep shards` accepts a function that makes samples"
        )
        raise DataError(f"columns with the encoding {encoding!r} are not supported", remedy=remedy)
    return _DECODERS[kind](data)


def _array(details: str, data: bytes) -> Any:
    """Type and shape are in the encoding, or precede the values."""
    given = details.split(":") if details else []
    at = 0
    if given:
        kind = given[0]
    else:
        kind, at = _TYPES[data[0]], 1
    if len(given) > 1:
        shape = [int(size) for size in given[1].split(",")]
    else:
        count, of_shape = data[at] >> 2, np.dtype(_SHAPES[data[at] % 4])
        shape = np.frombuffer(data, of_shape, count, at + 1).tolist()
        at += 1 + count * of_shape.itemsize
    return np.frombuffer(data, kind, offset=at).reshape(shape).copy()


def _list(data: bytes) -> list[bytes]:
    (count,) = np.frombuffer(data, "<u4", 1).tolist()
    ends = 4 + 4 * count + np.cumsum([0, *np.frombuffer(data, "<u4", count, 4).tolist()])
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def _picture(data: bytes) -> Any:
    return module("PIL.Image", "pillow", where="MDS").open(io.BytesIO(data))


def _raw_image(data: bytes) -> Any:
    width, height, letters = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + letters].decode()
    return module("PIL.Image", "pillow", where="MDS").frombytes(mode, (width, height), data[12 + letters :])


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "jpeg": _picture,
    "png": _picture,
    "pil": _raw_image,
}
