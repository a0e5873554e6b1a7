"""Shards with columns: Parquet, by row group, and Arrow (Feather, the files of `datasets`), by record batch."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from lockstep.core.errors import DataError
from lockstep_recipes.shards.files import module
from lockstep_recipes.shards.formats.blocks import Counted, Read, damaged
from lockstep_recipes.shards.places import ShardLocation

_PIP = "pyarrow"
_TAIL = 1 << 16  # bytes at the end of a Parquet file that pyarrow reads first
_MAGIC = b"ARROW1\0\0"  # a file starts with it, a stream does not; after it, the file is a stream


class TableRows:
    """The rows of a table. A sample is a dict of Python values by column."""

    def __init__(self, table: Any, place: ShardLocation) -> None:
        whole = table.combine_chunks()
        if len({*whole.column_names}) < len(whole.column_names):
            twice = next(name for name in whole.column_names if whole.column_names.count(name) > 1)
            raise DataError(f"several columns are named {twice!r}", where=place.url, remedy="write different names")
        self.nbytes, self.rows = whole.nbytes, whole.num_rows
        self.columns = list(zip(whole.column_names, whole.columns, strict=True))

    def __len__(self) -> int:
        return int(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: column[row].as_py() for name, column in self.columns}


class Parquet:
    """Parquet. A block is a row group, and the head is the footer of the file."""

    suffixes = (".parquet",)

    def count(self, file: BinaryIO, place: ShardLocation) -> Counted:
        counted, about = Counted(), module("pyarrow.parquet", _PIP, where=place.url).read_metadata(file)
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            columns = [group.column(column) for column in range(group.num_columns)]
            begins = [
                min(at for at in (column.dictionary_page_offset, column.data_page_offset) if at) for column in columns
            ]
            sizes = [column.total_compressed_size for column in columns]
            stops = [begin + size for begin, size in zip(begins, sizes, strict=True)]
            if group.num_rows:
                counted.add_block(group.num_rows, min(begins), max(stops))
        return counted

    def head(self, read: Read, place: ShardLocation, counted: Counted) -> tuple[Any, int]:
        footer = read(max(0, place.size - _TAIL), place.size)
        size = int.from_bytes(footer[-8:-4], "little") + 8
        if size > len(footer):
            footer = read(max(0, place.size - size), place.size)
        parquet = module("pyarrow.parquet", _PIP, where=place.url)
        about = parquet.read_metadata(_Part(footer, place.size - len(footer), place.size))
        groups = [number for number in range(about.num_row_groups) if about.row_group(number).num_rows]
        begins = dict(zip(groups, counted.begins, strict=True))
        return (about, groups, begins), 4 * len(footer)  # parsed, it takes more than its bytes

    def block(self, data: bytes, head: Any, place: ShardLocation, number: int) -> TableRows:
        about, groups, begins = head
        group = groups[number]
        part = _Part(data, begins[group], place.size)
        parquet = module("pyarrow.parquet", _PIP, where=place.url)
        file = parquet.ParquetFile(part, metadata=about, page_checksum_verification=True)
        return TableRows(file.read_row_group(group, use_threads=False), place)


class Arrow:
    """Arrow's IPC format, as a file (Feather) or as a stream (`datasets`). A block is one or more record batches, and
    the head is the schema. A file with dictionaries is one block, because they may be anywhere."""

    suffixes = (".arrow", ".feather", ".ipc")

    def count(self, file: BinaryIO, place: ShardLocation) -> Counted:
        pyarrow, counted = module("pyarrow", _PIP, where=place.url), Counted()
        start = file.read(len(_MAGIC))
        if start.startswith(b"FEA1"):
            remedy = "write it again with pyarrow.feather.write_feather, whose version is 2"
            raise DataError("it is a Feather file of version 1, which has no batches", where=place.url, remedy=remedy)
        begin = len(_MAGIC) if start == _MAGIC else 0
        file.seek(begin)
        source = pyarrow.PythonFile(file, mode="r")
        try:
            stream = pyarrow.ipc.open_stream(source)
            at = source.tell()
            while True:
                try:
                    rows = stream.read_next_batch().num_rows
                except StopIteration:
                    break
                counted.add(rows, at, source.tell())
                at = source.tell()
            if any(pyarrow.types.is_dictionary(field.type) for field in stream.schema) and counted.ends:
                merged = Counted()
                merged.add_block(counted.samples, counted.begins[0], counted.stops[-1])
                return merged
        except (pyarrow.ArrowException, OSError) as error:
            raise damaged(f"not readable as Arrow: {error}", place) from error
        return counted

    def head(self, read: Read, place: ShardLocation, counted: Counted) -> tuple[bytes, int]:
        data = read(0, counted.begins[0]).removeprefix(_MAGIC)
        return data, len(data)

    def block(self, data: bytes, head: bytes, place: ShardLocation, number: int) -> TableRows:
        pyarrow = module("pyarrow", _PIP, where=place.url)
        return TableRows(pyarrow.ipc.open_stream(head + data).read_all(), place)


class _Part(io.RawIOBase):
    """A range of a file in memory, at its offset in the whole file."""

    def __init__(self, data: bytes, begin: int, size: int) -> None:
        self.data, self.begin, self.size, self.at = data, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        first = self.at - self.begin
        stop = len(self.data) if size < 0 else first + size
        if not 0 <= first <= stop <= len(self.data):
            raise OSError(f"{size} bytes at {self.at} are outside the range that was read")
        self.at += stop - first
        return self.data[first:stop]
