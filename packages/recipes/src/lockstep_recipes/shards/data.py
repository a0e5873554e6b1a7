"""`Shards`: a map-style data set over local or remote shards."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lockstep.core.errors import DataError, LockstepError, UsageError
from lockstep.sizes import bytes_of
from lockstep_recipes.shards.counts import counted
from lockstep_recipes.shards.disk import Disk
from lockstep_recipes.shards.files import Files
from lockstep_recipes.shards.find import FORMATS, changed, find
from lockstep_recipes.shards.formats.blocks import SampleBlock
from lockstep_recipes.shards.lru_cache import LruCache
from lockstep_recipes.shards.order import ShardOrder
from lockstep_recipes.shards.places import scheme

_WINDOW = 1 << 27  # bytes of a window, if its number of samples is not given


class Shards(Dataset[Any]):
    """Samples in shards: JSON lines, Parquet, Arrow (Feather), tar (WebDataset) or MDS (MosaicML Streaming).

    A sample is the value of a JSON line; a dict of Python values by column (Parquet, Arrow, MDS); or a dict of bytes by
    extension with `__key__` (tar). Samples have an index, so any number of ranks and workers read the same data, and a
    run resumes at any step. An epoch reads the shards one after another: see `ShardOrder`.

    Example:
        lockstep_recipes.Shards("s3://bucket/folder", window=100_000, cache="2GB")

    Args:
        source: a shard; a folder of shards; a pattern with `*` or `{000..012}`; or a list of these. Local paths,
            http(s) addresses, and addresses of any file system that fsspec knows (`s3://`, `gs://`, `hf://`,
            `memory://`).
        window: samples are shuffled within windows of this many positions of the epoch. A different window gives a
            different order. None: as many samples as 128 MiB of the shards contain on average.
        cache: how many bytes of blocks each process keeps in memory, as a number or a text such as `2GB`. It should
            hold the samples of two windows; otherwise blocks are read repeatedly.
        disk: how many bytes of remote shards this machine keeps in Lockstep's cache folder, such as `100GB`, for all
            processes and all runs. None: nothing is kept on disk, and each process reads from the network.
        storage_options: options of fsspec for the file system, such as `{"endpoint_url": ...}` for S3. For HTTP:
            `{"headers": ...}`.

    Raises:
        DataError: there is no such shard, or one is damaged.
        Unreachable: a server does not answer after several attempts.
        UsageError: the source is not a path, or the window or the cache is not a positive number.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        window: int | None = None,
        cache: int | str = "1GB",
        disk: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        named = [source] if isinstance(source, str | Path) else source
        if not isinstance(named, list | tuple) or not all(isinstance(one, str | Path) for one in named):
            raise UsageError(f"the source is {source!r}", where="Shards(...)", remedy="give a path, or a list of paths")
        sources = [str(one) if scheme(str(one)) else os.path.abspath(os.path.expanduser(one)) for one in named]
        self.cache_bytes, self.options = bytes_of(cache, where="Shards(cache=...)"), dict(storage_options or {})
        self.disk_bytes = None if disk is None else bytes_of(disk, where="Shards(disk=...)")
        self._process: tuple[int, Files, LruCache] | None = None
        self.shards = find(self._here()[0], sources)
        self.counted = counted(self._here()[0], self.shards)
        counts = [one.samples for one in self.counted]
        self.ends = list(itertools.accumulate(counts))
        if not len(self):
            raise DataError("the shards have no samples", where=sources[0], remedy="give other shards")
        if window is None:
            window = max(1, _WINDOW * len(self) // max(1, sum(shard.place.size for shard in self.shards)))
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            remedy = "give a positive number of samples; with 1, samples are not shuffled within shards"
            raise UsageError(f"the window is {window!r}", where="Shards(window=...)", remedy=remedy)
        self.order = ShardOrder(counts, window)
        """The order in which a run reads the samples."""

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        """A sample.

        Raises:
            IndexError: there is no such index.
            DataError: the sample or its block is damaged. The error names the shard and the sample.
            Unreachable: the shard cannot be read.
        """
        index = range(len(self))[index]
        shard, row = self._place(index)
        ends = self.counted[shard].ends
        number = bisect_right(ends, row)
        block = self._block(shard, number)
        try:
            return block[row - (ends[number - 1] if number else 0)]
        except DataError as error:
            raise DataError(error.what, where=self.where(index), remedy=error.remedy) from error

    def where(self, index: int) -> str:
        """The shard of a sample, and its number in the shard from 0, for messages."""
        shard, row = self._place(index)
        return f"{self.shards[shard].place.url}, sample {row}"

    def __repr__(self) -> str:
        return f"<Shards: {len(self):,} samples in {len(self.shards):,} shards, {self.shards[0].place.url} ...>"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None}  # connections and cached blocks stay in this process

    def _place(self, index: int) -> tuple[int, int]:
        shard = bisect_right(self.ends, index)
        return shard, index - (self.ends[shard - 1] if shard else 0)

    def _here(self) -> tuple[Files, LruCache]:
        """Files and cached blocks of this process: a forked loader worker does not share connections with its
        parent."""
        if self._process is None or self._process[0] != os.getpid():
            kept = LruCache(self.cache_bytes)
            disk = None if self.disk_bytes is None else Disk(self.disk_bytes)
            self._process = (os.getpid(), Files(self.options, kept, disk), kept)
        return self._process[1:]

    def _block(self, shard: int, number: int) -> SampleBlock:
        files, kept = self._here()
        (place, kind, _), of_shard = self.shards[shard], self.counted[shard]
        form = FORMATS[kind]

        def read(start: int, stop: int) -> bytes:
            return files.read(place, start, stop)

        def load_head() -> tuple[Any, int]:
            now = files.look(place.url)  # once per shard, and again after its head was dropped from memory
            if now.size != place.size or (place.tag and now.tag and now.tag != place.tag):
                raise changed(place, now)
            value, size = form.head(read, place, of_shard)
            return value, size + 1024

        def load() -> tuple[SampleBlock, int]:
            first, end = of_shard.ends[number - 1] if number else 0, of_shard.ends[number]
            at = f"{place.url}, samples {first} to {end - 1}"
            data = read(of_shard.begins[number], of_shard.stops[number])
            try:
                block = form.block(data, kept.get((shard, "head"), load_head), place, number)
            except LockstepError:
                raise
            except Exception as error:  # pyarrow, tarfile, gzip and others have their own errors
                what = f"the block is damaged: {type(error).__name__}: {error}"
                raise DataError(what, where=at, remedy="copy or write the shard again") from error
            if len(block) != end - first:
                what = (
                    f"the block has {len(block)} samples instead of the {end - first} that were counted: the "
                    "shard has changed"
                )
                raise DataError(what, where=at, remedy="start again, or write the shards again")
            if block.nbytes > kept.limit:
                raise _too_large(block.nbytes, kept.limit, at)
            return block, block.nbytes

        found: SampleBlock = kept.get((shard, number), load)
        return found


def _too_large(size: int, limit: int, where: str) -> UsageError:
    return UsageError(
        f"the block has {size:,} bytes, but the cache holds only {limit:,}",
        where=where,
        remedy=f"set Shards(cache='{-(-3 * size // 10**9)}GB'), or write smaller blocks with `lockstep shards`",
    )
