"""JSON lines: a line is a sample. A .gz file can only be read from its start, so it is one block."""

from __future__ import annotations

import gzip
import json
from typing import Any, BinaryIO

from lockstep.core.errors import DataError
from lockstep_recipes.shards.formats.blocks import Counted, no_head
from lockstep_recipes.shards.places import ShardLocation


class JsonLinesFormat:
    """JSON lines. Blank lines are not samples."""

    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    head = staticmethod(no_head)

    def count(self, file: BinaryIO, place: ShardLocation) -> Counted:
        counted, at = Counted(), 0
        if place.url.endswith(".gz"):
            with gzip.open(file) as lines:
                counted.add_block(sum(bool(line.strip()) for line in lines), 0, place.size)
            return counted
        for line in file:
            counted.add(bool(line.strip()), at, at + len(line))
            at += len(line)
        return counted

    def block(self, data: bytes, head: Any, place: ShardLocation, number: int) -> Lines:
        return Lines(gzip.decompress(data) if place.url.endswith(".gz") else data)


class Lines:
    """Lines that are parsed when a sample is requested."""

    def __init__(self, data: bytes) -> None:
        self.lines = [line for line in data.split(b"\n") if line.strip()]
        self.nbytes = len(data) + 64 * len(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> Any:
        try:
            return json.loads(self.lines[row])
        except ValueError as error:
            raise DataError(f"not JSON: {error}", remedy="write one JSON value per line") from error
