"""The files of a checkpoint. Each rank writes its share, in the format of torch.distributed.checkpoint (DCP).

DCP itself is not used to save or load, for two reasons. The share of each rank is known here before the copy to host
memory, so a rank copies only its share. And the index is JSON: DCP's `.metadata` is a pickle, and importing DCP takes
1.4 s (torch 2.13), and a restarted run would wait for it. `.metadata` is written too, because DCP's own tools read it.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lockstep.core.checkpoint.shared_parts import FilePart, SharedParts, place
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel.nodes import NodeGroup
from lockstep.core.parallel.sharded_tensor import LocalShard

# By tensor name: shape, dtype and parts. Each part has its first row (start), number of rows, and place: file, offset
# and length in bytes.
Index = dict[str, dict[str, Any]]
Rows = tuple[int, int] | None
"""The first row and the end (exclusive) of the rows of a tensor; None: the whole tensor."""
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
    least = [(0, rank) for rank in range(world)]  # a heap of the bytes so far, and the ranks that have them
    owner_of = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        load, owner_of[number] = least[0]
        heapq.heapreplace(least, (load + sizes[number], owner_of[number]))
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
    """The index of all files, by name of the tensor; the parts of each tensor in the order of their rows."""
    merged: Index = {}
    for share in shares:
        for name, entry in share.items():
            merged.setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
    for entry in merged.values():
        entry["parts"].sort(key=lambda part: part["start"])
    return dict(sorted(merged.items()))  # the same file, whichever rank wrote a tensor


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Keep torch.save from computing its own checksums, which take half of its time."""
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
        # Flushing the whole file after the last write could take longer than the watchdog waits.
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
    """A part of a file as its own file, from which torch.load reads a tensor."""

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
    folder: Path, index: Index, wanted: Mapping[str, Rows] | None = None, node: NodeGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint, one tensor at a time, on the CPU. No code is unpickled.

    Args:
        wanted: by tensor name the rows to read. None: all tensors.
        node: the ranks of this node, if there are several. Of what several of them want, one rank reads the bytes
            for all. All of them read at the same time, and to the end.

    Raises:
        CheckpointError: a file is damaged, is not there, or lacks rows.
    """
    wanted = dict.fromkeys(index) if wanted is None else wanted
    parts = {name: _parts(index[name], rows) for name, rows in wanted.items()}
    with _Files(folder) as files:
        files.open_all({part["file"] for of_tensor in parts.values() for part in of_tensor}, node)
        shared = SharedParts(files.read, index, parts, node)
        first = {name: entry["parts"][0] for name, entry in index.items()}
        for name in sorted(wanted, key=lambda name: place(first[name])):
            loaded = [(part["start"], files.load(name, part, shared.take(part))) for part in parts[name]]
            yield name, _assembled(name, index[name], wanted[name], loaded, folder)
        shared.finish()


def _parts(entry: Mapping[str, Any], rows: Rows) -> list[FilePart]:
    """The parts of a tensor in which the rows are."""
    if rows is None:
        return list(entry["parts"])
    begin, end = rows
    return [part for part in entry["parts"] if part["start"] < end and begin < part["start"] + part["rows"]]


def _assembled(
    name: str, entry: Mapping[str, Any], rows: Rows, loaded: list[tuple[int, Tensor]], folder: Path
) -> Tensor:
    """The wanted rows of a tensor.

    Args:
        loaded: the first row and the rows of each part, in the order of the rows.
    """
    if rows is None and len(entry["parts"]) == 1:
        return loaded[0][1]
    begin, end = rows if rows is not None else (0, entry["shape"][0])
    pieces = [tensor[max(0, begin - start) : end - start] for start, tensor in loaded]
    if sum(len(piece) for piece in pieces) != end - begin:
        raise CheckpointError(f"tensor {name} lacks some of the rows {begin} to {end}", where=str(folder))
    empty = torch.empty((0, *entry["shape"][1:]), dtype=getattr(torch, entry["dtype"]))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else empty


class _Files(contextlib.ExitStack):
    """The files of a checkpoint. Each is opened when it is first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.opened: dict[str, IO[bytes]] = {}

    def open(self, name: str) -> IO[bytes]:
        """The open file `name`."""
        if name not in self.opened:
            self.opened[name] = self.enter_context((self.folder / name).open("rb"))
        return self.opened[name]

    def open_all(self, names: Iterable[str], node: NodeGroup | None) -> None:
        """Open the files that this rank reads, before ranks wait for each other. Opened files outlive their deletion.

        Raises:
            CheckpointError: on all ranks of the node, if one of them cannot open a file.
        """
        fault: tuple[str, str] | None = None
        for name in sorted(names):
            try:
                self.open(name)
            except OSError as error:
                fault = fault or (name, str(error))
        for found in [fault] if node is None else node.gather(fault):
            if found is not None:
                raise CheckpointError(f"cannot be read: {found[1]}", where=str(self.folder / found[0]))

    def read(self, part: FilePart, buffer: memoryview) -> None:
        """Read the bytes of a part into `buffer`, which has their length.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        try:
            file = self.open(part["file"])
            file.seek(part["offset"])
            count: int = file.readinto(buffer)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(self.folder / part["file"])) from error
        if count != len(buffer):
            raise CheckpointError("is shorter than it was", where=str(self.folder / part["file"]))

    def load(self, name: str, part: FilePart, content: memoryview | None) -> Tensor:
        """A part of the tensor `name`, from the bytes `content`, or from its file if this is None."""
        try:
            if content is None:
                place = _Part(self.open(part["file"]), part["offset"], part["length"])
            else:
                place = _Part(cast(IO[bytes], _Memory(content)), 0, part["length"])
            tensor: Tensor = torch.load(cast(IO[bytes], place), map_location="cpu", weights_only=True)
            return tensor
        except Exception as error:  # a damaged zip file or pickle may raise any exception
            where = str(self.folder / part["file"])
            raise CheckpointError(f"tensor {name} cannot be read: {error}", where=where) from error


class _Memory(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them; for `_Part`."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        found = self.content[self.at : self.at + len(buffer)]
        buffer[: len(found)] = found
        return len(found)


def write_dcp_metadata(folder: Path, index: Index) -> None:
    """Write `.metadata`, so that torch.distributed.checkpoint.load and its converters read this checkpoint."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # private: the type that DCP's reader looks for

    tensors, places, paths = {}, {}, {}
    size_of = cache(torch.Size)  # most sizes occur in many tensors: each is made and pickled once
    for name, entry in index.items():
        chunks = []
        for number, part in enumerate(entry["parts"]):
            start = size_of((part["start"], *[0] * len(entry["shape"][1:])) if entry["shape"] else ())
            size = size_of((part["rows"], *entry["shape"][1:]) if entry["shape"] else ())
            chunks.append(dcp.ChunkStorageMetadata(start, size))
            places[dcp.MetadataIndex(name, start, number)] = _StorageInfo(part["file"], part["offset"], part["length"])
        properties = dcp.TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = dcp.TensorStorageMetadata(properties, size_of(tuple(entry["shape"])), chunks)
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
