"""How fast Shards reads, compared with hand-written readers of the same files, and with WebDataset if it is installed.

    python benchmarks/shards.py [--samples 20000] [--rounds 5]

Two kinds of samples: short texts (about 500 bytes, Parquet, JSON lines, tar), and pieces of 50 KB (tar). All readers
take the samples in the order of an epoch of Shards: by hand in Parquet from a table in memory, in JSON lines and tar by
the position of each sample in an open file. WebDataset reads its own order, with a buffer of 1,000 samples; MosaicML's
library, if installed, reads samples by index, in the order of Shards. The readers alternate. The result is the median
of the rounds, in samples per second, and its ratio to Shards.
"""

import argparse
import json
import statistics
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from harness import header, ratios, row, spread, take_turns

import lockstep_recipes
from lockstep_recipes.shards.write import write


def texts(count):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "comes", "back"]
    draw = np.random.default_rng(0)
    return [{"text": " ".join(draw.choice(words, 100)), "label": number % 10} for number in range(count)]


def pieces(count):
    draw = np.random.default_rng(0)
    return [{"jpg": draw.bytes(50_000), "label": number % 10} for number in range(count)]


def of_parquet(paths):
    tables = [pq.read_table(path) for path in paths]
    ends = np.cumsum([len(table) for table in tables])
    columns = [dict(zip(table.column_names, table.combine_chunks().columns, strict=True)) for table in tables]

    def read(index):
        shard = int(np.searchsorted(ends, index, side="right"))
        row = int(index - (ends[shard - 1] if shard else 0))
        return {name: column[row].as_py() for name, column in columns[shard].items()}

    return read


def of_lines(paths):
    files, places = [open(path, "rb") for path in paths], []
    for number, path in enumerate(paths):
        at = 0
        for line in path.read_bytes().splitlines(keepends=True):
            places.append((number, at))
            at += len(line)

    def read(index):
        number, at = places[index]
        files[number].seek(at)
        return json.loads(files[number].readline())

    return read


def of_tar(paths):
    files, places = [open(path, "rb") for path in paths], []
    for number, path in enumerate(paths):
        for member in tarfile.open(path):
            key, _, extension = member.name.partition(".")
            if not places or places[-1][0] != key:
                places.append((key, number, []))
            places[-1][2].append((extension, member.offset_data, member.size))

    def read(index):
        key, number, members = places[index]
        sample = {"__key__": key}
        for extension, at, size in members:
            files[number].seek(at)
            sample[extension] = files[number].read(size)
        return sample

    return read


def of_webdataset(paths):
    try:
        import webdataset
    except ImportError:
        return None

    def run():
        urls = list(map(str, paths))
        return sum(1 for _ in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).shuffle(1000))

    return run


def of_mds(folder, samples, order):
    """The samples of `order` with MosaicML's library, from MDS that it has written."""
    try:
        from streaming import MDSWriter, StreamingDataset
    except ImportError:
        return None
    columns = {name: {str: "str", bytes: "bytes", int: "int"}[type(value)] for name, value in samples[0].items()}
    with MDSWriter(out=str(folder), columns=columns, size_limit=16_000_000) as writer:
        for sample in samples:
            writer.write(sample)

    def run():
        data = StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
        for index in order:
            data[index]

    return run


def measured(run, count):
    begun = time.perf_counter()
    run()
    return count / (time.perf_counter() - begun)


def case(name, samples, kind, reader, folder, rounds):
    def shards():
        data = lockstep_recipes.Shards(folder)  # a new one, with an empty cache
        for index in order:
            data[index]

    def by_hand():
        for index in order:
            read(index)

    runs = {"Shards": shards}
    if kind == "mds":
        order = []
        if (other := of_mds(folder, samples, order)) is None:
            return
        order[:] = lockstep_recipes.Shards(folder).order(np.arange(len(samples)), seed=0, epoch=0).tolist()
        runs["MosaicML Streaming"] = other
    else:
        write(samples, str(folder), kind=kind, shard_bytes=16_000_000)
        paths = sorted(folder.glob(f"*.{kind}"))
        order = lockstep_recipes.Shards(folder).order(np.arange(len(samples)), seed=0, epoch=0).tolist()
        read, runs["by hand"] = reader(paths), by_hand
        if kind == "tar" and (other := of_webdataset(paths)):
            runs["WebDataset"] = other
    speeds = take_turns({who: partial(measured, run, len(samples)) for who, run in runs.items()}, rounds)
    for who, found in speeds.items():
        row(name, who, f"{statistics.median(found):,.0f}", spread(ratios(found, speeds["Shards"])))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    header("samples", "reader", "samples per second", "relative to Shards, round by round")
    short, long = texts(chosen.samples), pieces(chosen.samples // 10)
    cases = [
        ("texts in Parquet", short, "parquet", of_parquet),
        ("texts in JSON lines", short, "jsonl", of_lines),
        ("texts in tar", short, "tar", of_tar),
        ("50 KB in tar", long, "tar", of_tar),
        ("texts in MDS", short, "mds", None),
    ]
    for name, samples, kind, reader in cases:
        with tempfile.TemporaryDirectory() as folder:
            case(name, samples, kind, reader, Path(folder, "shards"), chosen.rounds)


if __name__ == "__main__":
    main()
