"""The files of a checkpoint. Each rank writes its share, in the format of torch.distributed.checkpoint (DCP).

DCP itself is not used to save or load, for two reasons. The share of each rank is known here before the copy to host
memory, so a rank copies only its share. And the index is JSON: DCP's `.metadata` is a pickle, and importing DCP takes
1.4 s (torch 2.13), for which a restarted run would wait. `.metadata` is written too, because DCP's own tools read it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lockstep.distributed.sharded_tensor import LocalShard
from lockstep.errors import CheckpointError

# By tensor name: shape, dtype and parts. Each part has its first row (start), number of rows, and place: file, offset
# and length in bytes.
Index = dict[str, dict[str, Any]]
DCP_METADATA = ".metadata"
_READ_BYTES = 1 << 22
_FLUSH_BYTES = 1 << 28


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """The rank that writes each replicated tensor: the largest first, to the rank that has the fewest bytes so far.

    Every rank computes the same result, without communication.

    Args:
        sizes: bytes of each tensor.
        world: number of ranks.
    """
    load = [0] * world
    owner_of = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        rank = load.index(min(load))
        owner_of[number] = rank
        load[rank] += sizes[number]
    return owner_of


def share_name(rank: int) -> str:
    """DCP's name for the file of a rank."""
    return f"__{rank}_0.distcp"


def write_share(path: Path, share: Mapping[str, LocalShard], at: Callable[[str], None]) -> tuple[dict[str, Any], Index]:
    """Write shards of tensors into a file, and flush it to the disk.

    Args:
        share: shards on the CPU, by tensor name.
        at: called with the name of each place in this function that is reached.

    Returns:
        the file's `bytes` and checksum (`crc32`), and the index of the parts in this file.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    index: Index = {}
    with path.open("wb") as file, _without_zip_checksums():
        stream = _ChecksumStream(file, partial(at, "in-share"))
        for name, shard in share.items():
            offset = stream.size
            try:
                torch.save(shard.local, cast(IO[bytes], stream))
            except RuntimeError as error:  # torch does not say why the stream could not be written
                raise stream.fault or error from error
            count = len(shard.local) if shard.shape else 0
            part = {
                "start": shard.start,
                "rows": count,
                "file": path.name,
                "offset": offset,
                "length": stream.size - offset,
            }
            index[name] = {
                "shape": list(shard.shape),
                "dtype": str(shard.local.dtype).removeprefix("torch."),
                "parts": [part],
            }
        file.flush()
        at("before-fsync")
        os.fsync(file.fileno())
    return {"bytes": stream.size, "crc32": stream.crc}, index


def merge(shares: Iterable[Index]) -> Index:
    """The index of all files, the parts of each tensor in the order of their rows."""
    merged: Index = {}
    for share in shares:
        for name, entry in share.items():
            merged.setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
    for entry in merged.values():
        entry["parts"].sort(key=lambda part: part["start"])
    return merged


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Keep torch.save from computing checksums of its own, which take half of its time."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ChecksumStream(io.RawIOBase):
    """Passes bytes on to a file and computes their checksum, which is not affected by errors of the disk."""

    def __init__(self, file: IO[bytes], beat: Callable[[], None]) -> None:
        self.file, self.beat, self.size, self.crc = file, beat, 0, 0
        self.fault: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.fault = error
            raise
        self.crc = zlib.crc32(data, self.crc)
        size = memoryview(data).nbytes
        # Flushing the whole file at its end could take longer than the watchdog waits.
        if self.size // _FLUSH_BYTES != (self.size + size) // _FLUSH_BYTES:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.size += size
        self.beat()
        return size


def checksum(path: Path) -> dict[str, Any]:
    """Size (`bytes`) and CRC-32 (`crc32`) of a file, as `write_share` returns them. They show damage, not forgery."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return {"bytes": size, "crc32": crc}


class _Part(io.RawIOBase):
    """A part of a file as a file of its own, from which torch.load reads a tensor."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        self.file.seek(self.offset + self.at)
        count: int = self.file.readinto(view)  # type: ignore[attr-defined]
        self.at += count
        return count


def read(
    folder: Path, index: Index, wanted: Mapping[str, tuple[int, int] | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint, one tensor at a time, on the CPU. No code is unpickled.

    Args:
        wanted: by tensor name the first row and the end (exclusive) of the rows to read, or None for the whole tensor.
            None: all tensors.

    Raises:
        CheckpointError: a file is damaged, or lacks rows.
    """
    wanted = dict.fromkeys(index) if wanted is None else wanted
    with contextlib.ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}

        def load(name: str, part: Mapping[str, Any]) -> Tensor:
            try:
                if part["file"] not in files:
                    files[part["file"]] = stack.enter_context((folder / part["file"]).open("rb"))
                place = _Part(files[part["file"]], part["offset"], part["length"])
                tensor: Tensor = torch.load(cast(IO[bytes], place), map_location="cpu", weights_only=True)
                return tensor
            except Exception as error:  # a damaged zip file or pickle may raise any exception
                raise CheckpointError(
                    f"tensor {name} cannot be read: {error}", where=str(folder / part["file"])
                ) from error

        first = {name: index[name]["parts"][0] for name in wanted}
        for name in sorted(wanted, key=lambda name: (first[name]["file"], first[name]["offset"])):
            entry, row_range = index[name], wanted[name]
            if row_range is None and len(entry["parts"]) == 1:
                yield name, load(name, first[name])
                continue
            begin, end = row_range if row_range is not None else (0, entry["shape"][0])
            overlapping = [
                part for part in entry["parts"] if part["start"] < end and begin < part["start"] + part["rows"]
            ]
            pieces = [load(name, part)[max(0, begin - part["start"]) : end - part["start"]] for part in overlapping]
            if sum(len(piece) for piece in pieces) != end - begin:
                raise CheckpointError(f"tensor {name} lacks some of the rows {begin} to {end}", where=str(folder))
            empty = torch.empty((0, *entry["shape"][1:]), dtype=getattr(torch, entry["dtype"]))
            yield name, torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else empty


def write_dcp_metadata(folder: Path, index: Index) -> None:
    """Write `.metadata`, so that torch.distributed.checkpoint.load and its converters read this checkpoint."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # private: the type that DCP's reader looks for

    tensors, places, paths = {}, {}, {}
    for name, entry in index.items():
        chunks = []
        for number, part in enumerate(entry["parts"]):
            start = torch.Size([part["start"], *[0] * len(entry["shape"][1:])] if entry["shape"] else [])
            size = torch.Size([part["rows"], *entry["shape"][1:]] if entry["shape"] else [])
            chunks.append(dcp.ChunkStorageMetadata(start, size))
            places[dcp.MetadataIndex(name, start, number)] = _StorageInfo(part["file"], part["offset"], part["length"])
        properties = dcp.TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        paths[name] = (name,)
    content = dcp.Metadata(
        tensors,  # type: ignore[arg-type]
        planner_data=paths,
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
    )
    with (folder / DCP_METADATA).open("wb") as file:
        pickle.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
