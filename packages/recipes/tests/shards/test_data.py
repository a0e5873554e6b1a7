"""Samples of shards by index: every format against what was written, and what is damaged."""

import bz2
import gzip
import io
import json
import os
import pickle
import tarfile
import threading

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import lockstep_recipes
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.shards import data as data_module
from lockstep_recipes.shards.formats import blocks, mds, tar
from lockstep_recipes.shards.lru_cache import LruCache
from lockstep_recipes.tasks.readers.table import Source
from tests import shard_cases
from tests.shard_cases import SAMPLES, SIZES

ALL = (*shard_cases.WRITERS, "mds")


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("block", [1, 200, 1 << 20])
def test_every_sample_is_the_one_that_was_written(tmp_path, monkeypatch, suffix, block):
    monkeypatch.setattr(blocks, "BLOCK", block)
    shards = lockstep_recipes.Shards(shard_cases.write(tmp_path / "data", suffix))
    assert len(shards) == len(SAMPLES)
    assert [shard_cases.plain(shards[index]) for index in range(len(shards))] == SAMPLES
    mixed = np.random.default_rng(0).permutation(len(shards)).tolist()
    assert [shard_cases.plain(shards[index])["number"] for index in mixed] == mixed
    assert shard_cases.plain(shards[-1]) == SAMPLES[-1]
    with pytest.raises(IndexError):
        shards[len(shards)]
    again = pickle.loads(pickle.dumps(shards))  # for workers that are not forked
    assert shard_cases.plain(again[9]) == SAMPLES[9]
    assert os.path.basename(again.where(9)).startswith("shard.00002.mds" if suffix == "mds" else "part-2.")
    assert again.where(9).endswith(", sample 1")


@pytest.mark.parametrize(
    ("pack", "name"),
    [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lambda data: _packed(data, "zstd"), "zstd:7")],
)
def test_packed_shards_of_mds(tmp_path, pack, name):
    shards = lockstep_recipes.Shards(shard_cases.mds_folder(tmp_path, pack, name))
    assert [shards[index] for index in range(len(shards))] == SAMPLES


def _packed(data, kind):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_values_of_mds():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert mds.decoded("int", np.int64(-5).tobytes()) == -5
    assert mds.decoded("float32", np.float32(0.5).tobytes()) == 0.5
    assert mds.decoded("str_float", b"1.5") == 1.5
    assert mds.decoded("json", b'{"a": [1]}') == {"a": [1]}
    for encoding, head in (
        ("ndarray:int16:2,3", b""),
        ("ndarray:int16", bytes([2 << 2, 2, 3])),
        ("ndarray", bytes([17, 2 << 2, 2, 3])),
    ):
        found = mds.decoded(encoding, head + array.tobytes())
        assert found.dtype == np.int16
        assert np.array_equal(found, array)
        found += 1  # belongs to the caller
    with pytest.raises(DataError, match="'pkl' are not supported"):
        mds.decoded("pkl", b"")


def test_a_sample_may_be_changed_and_the_next_reading_is_as_before(tmp_path):
    shards = lockstep_recipes.Shards(shard_cases.write(tmp_path / "data", "tar"))
    shards[3].clear()
    assert shard_cases.plain(shards[3]) == SAMPLES[3]


def test_sources(tmp_path):
    folder = shard_cases.write(tmp_path / "data")
    for source in (
        f"{folder}/part-{{0..3}}.jsonl",
        f"{folder}/part-*.jsonl",
        [folder / f"part-{number}.jsonl" for number in range(4)],
    ):
        assert len(lockstep_recipes.Shards(source)) == len(SAMPLES)
    odd = shard_cases.write(tmp_path / "data [v2] {0..3}")  # a path, though it looks like a pattern
    assert len(lockstep_recipes.Shards(odd)) == len(lockstep_recipes.Shards(odd / "part-0.jsonl")) + sum(SIZES[1:])
    one = lockstep_recipes.Shards(folder / "part-2.jsonl")
    assert one[0] == SAMPLES[SIZES[0] + SIZES[1]]
    for source, message in (
        (folder / "part-9.jsonl", r"did you mean part-\d.jsonl"),
        ([folder, folder / "part-0.jsonl"], "named twice"),
        (f"{folder}/part-{{3..0}}.jsonl", "not expand to a list of names"),
        (f"{folder}/*.tar", "no shards"),
        ("nosuch://bucket/a.jsonl", "no file system for nosuch"),
        (f"{folder}/a.tar.gz", "compressed"),
    ):
        with pytest.raises(DataError, match=message):
            lockstep_recipes.Shards(source)
    (folder / "other.parquet").write_bytes(shard_cases.parquet(SAMPLES))
    with pytest.raises(DataError, match=r"several formats: 1 of parquet, 4 of jsonl|4 of jsonl, 1 of parquet"):
        lockstep_recipes.Shards(folder)
    for options in ({"window": 0}, {"cache": "much"}, {"cache": 0}):
        with pytest.raises(UsageError, match=str(next(iter(options)))):
            lockstep_recipes.Shards(folder / "part-0.jsonl", **options)


def test_a_folder_of_datasets_has_the_shards_that_its_state_lists(tmp_path):
    folder = tmp_path / "saved"
    data = datasets.Dataset.from_list(SAMPLES)
    data.save_to_disk(folder, num_shards=3)
    loaded = datasets.load_from_disk(folder)
    loaded.map(lambda sample: {"text": "other"})
    assert list(folder.glob("cache-*.arrow"))
    assert list(lockstep_recipes.Shards(folder)) == list(loaded) == SAMPLES
    with pytest.raises(DataError, match=r"cache-.*\.arrow: state.json does not list this file(?s:.*)give the folder"):
        lockstep_recipes.Shards(f"{folder}/*.arrow")
    assert len(lockstep_recipes.Shards(f"{folder}/data-*.arrow")) == len(SAMPLES)
    (folder / "data-00001-of-00003.arrow").rename(tmp_path / "elsewhere.arrow")
    with pytest.raises(
        DataError, match=r"data-00001-of-00003.arrow: state.json lists this shard, but the file does not exist"
    ):
        lockstep_recipes.Shards(folder)
    (folder / "state.json").write_text('{"anything": []}')
    with pytest.raises(DataError, match=r"state.json: not a file that `datasets` wrote: KeyError"):
        lockstep_recipes.Shards(folder)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=f"the data set has splits(?s:.*){tmp_path}/splits/train or .*/splits/test"):
        lockstep_recipes.Shards(tmp_path / "splits")


def test_folders_whose_files_do_not_all_count_are_refused(tmp_path):
    for name, kind in (("_delta_log", "Delta"), (".hoodie", "Hudi"), ("metadata", "Iceberg")):
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / "part-0.parquet").write_bytes(shard_cases.parquet(SAMPLES))
        with pytest.raises(DataError, match=f"a {kind} table: {name} determines which of its files count"):
            lockstep_recipes.Shards(tmp_path / kind)
    cached = tmp_path / "cached"
    cached.mkdir()
    (cached / "dataset_info.json").write_text("{}")
    for name in ("mine-train.arrow", "cache-1a2b.arrow"):
        (cached / name).write_bytes(shard_cases.arrow_stream(SAMPLES))
    with pytest.raises(DataError, match=r"among the files of this data set: cache-1a2b.arrow"):
        lockstep_recipes.Shards(cached)
    assert len(lockstep_recipes.Shards(f"{cached}/mine-train*.arrow")) == len(SAMPLES)


def test_an_index_of_somebody_else_is_named(tmp_path):
    folder = shard_cases.write(tmp_path / "data")
    shard = {"name": "part-0.jsonl", "bytes": (folder / "part-0.jsonl").stat().st_size}
    counts = {"ends": [7], "begins": [0], "stops": [10]}
    for index in (
        [],
        7,
        "lockstep shards",
        {"shards": None},
        {"shards": {"a": 1}},
        {"shards": [1]},
        {"shards": ["part-0.jsonl"]},
        {"shardlist": [{"url": "part-0.jsonl", "nsamples": 7}]},
        {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 7}], "config": {}},
        {"shards": [{"format": "mds", "version": 2, "raw_data": 3, "zip_data": None}]},
        {"shards": [{"format": ["mds"], "version": 2}]},
        {"lockstep": 1, "format": "webdataset", "shards": [shard | counts]},
        {"lockstep": 1, "format": ["jsonl"], "shards": [shard | counts]},
        {"lockstep": 1, "format": "jsonl", "shards": [shard | counts | {"ends": 7}]},
        {"lockstep": 1, "format": "jsonl", "shards": [shard | counts | {"ends": [7, 9]}]},
        {"lockstep": 1, "format": "jsonl", "shards": [shard | counts | {"begins": ["0"]}]},
        {"lockstep": 1, "format": "jsonl", "shards": [shard | counts | {"bytes": "many"}]},
        {"lockstep": 1, "format": "jsonl", "shards": [shard | counts | {"name": 3}]},
    ):
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match=r"index.json: not an index of shards(?s:.*)remove this file"):
            lockstep_recipes.Shards(folder)[0]
    (folder / "index.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match=r"index.json: not an index of shards"):
        lockstep_recipes.Shards(folder)


def test_addresses_and_files_that_cannot_be_read_say_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=r"a web server does not list files(?s:.*)\{000..012\}"):
        lockstep_recipes.Shards("https://host/part-*.tar")
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(60))
    with pytest.raises(DataError, match=r"old.feather: it is a Feather file of version 1"):
        lockstep_recipes.Shards(str(tmp_path / "old.feather"))


def test_shards_are_counted_once_and_anew_when_they_change(tmp_path, monkeypatch):
    folder = shard_cases.write(tmp_path / "data")
    lockstep_recipes.Shards(folder)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep_recipes.shards.counts.count", lambda *_: pytest.fail("it was counted again"))
        shards = lockstep_recipes.Shards(folder)
    assert shards[8] == SAMPLES[8]
    path = folder / "part-2.jsonl"
    path.write_bytes(path.read_bytes() + b'{"number": -1}\n')
    with pytest.raises(DataError, match=r"part-2.jsonl: the shard has changed since it was counted: \d+ bytes"):
        pickle.loads(pickle.dumps(shards))[8]
    assert len(lockstep_recipes.Shards(folder)) == len(SAMPLES) + 1


@pytest.mark.parametrize("suffix", ALL)
def test_a_damaged_shard_is_named(tmp_path, suffix):
    """Cut off before it is counted, and after."""
    folder = shard_cases.write(tmp_path / "data", suffix)
    shards = lockstep_recipes.Shards(folder)
    path = next(path for path in sorted(folder.iterdir()) if "2." in path.name)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 7])
    with pytest.raises(DataError, match=f"(?s){path.name}.*remedy") as caught:
        shards[SIZES[0] + SIZES[1] + SIZES[2] - 1]
    assert "remedy" in str(caught.value)
    if suffix != "jsonl":  # a shard of lines that ends earlier is a shard of fewer lines
        with pytest.raises(DataError, match=path.name):
            lockstep_recipes.Shards(folder)[SIZES[0] + SIZES[1] + SIZES[2] - 1]


def test_a_shard_that_is_damaged_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1)  # each line is a block
    path = shard_cases.write(tmp_path / "data") / "part-2.jsonl"
    shards = lockstep_recipes.Shards(path)
    assert shards[0]["number"] == 8
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], b"\n" * len(lines[-1]), last[:-5]]))
    with pytest.raises(DataError, match=r"part-2.jsonl, samples 10 to 10: the block has 0 samples instead of the 1"):
        shards[10]
    with pytest.raises(DataError, match=r"part-2.jsonl: bytes \d+ to \d+ are incomplete"):
        shards[11]
    assert shards[1]["number"] == 9


def test_a_tar_whose_tail_is_zeros_is_refused(tmp_path):
    """As a copy that was cut off, in a file that had its full size from the beginning."""
    path, file = tmp_path / "a.tar", io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(128):
            member = tarfile.TarInfo(f"{number // 2}.{'ab'[number % 2]}")
            member.size = 700
            archive.addfile(member, io.BytesIO(b"x" * 700))
    data, places = file.getvalue(), range(0, 128 * 1536, 1536)
    path.write_bytes(data)
    assert len(lockstep_recipes.Shards(path)) == 64
    for kept in (50, 63, 1, 0):
        for start in (places[2 * kept], places[2 * kept] - 512 if kept else 0):  # also in the middle of a member
            path.write_bytes(data[:start] + bytes(len(data) + 10240 - start))
            with pytest.raises(DataError, match=r"a.tar(?s:.*)zeros follow(?s:.*)truncate -s \d+ a.tar"):
                lockstep_recipes.Shards(path)
    path.write_bytes(data[: places[-1] + 1536] + bytes(1024))  # tools other than tar fill no record
    assert len(lockstep_recipes.Shards(path)) == 64


def test_pages_of_parquet_are_compared_with_their_checksums(tmp_path):
    table = pa.Table.from_pylist([{"number": number, "text": f"{number}" * 50} for number in range(200)])
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="none", write_page_checksum=True, use_dictionary=False)
    assert lockstep_recipes.Shards(path)[5]["text"] == "5" * 50
    data = path.read_bytes()
    place = data.index(b"5" * 50) + 7
    path.write_bytes(data[:place] + b"6" + data[place + 1 :])
    with pytest.raises(DataError, match=r"a.parquet, samples 0 to 199: the block is damaged: .*CRC"):
        lockstep_recipes.Shards(path)[5]
    with pytest.raises(DataError, match=r"a.parquet: not readable as Parquet: .*CRC"):
        Source(str(path)).read()


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_with_dictionaries(tmp_path, monkeypatch, new):
    monkeypatch.setattr(blocks, "BLOCK", 1)
    table = pa.table({"word": pa.array(["a", "b", "a", "c", "b"] * 3).dictionary_encode()})
    with new(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    shards = lockstep_recipes.Shards(tmp_path / "a.arrow")
    assert [shards[index]["word"] for index in range(len(shards))] == table["word"].to_pylist()


def test_what_was_not_used_for_the_longest_time_leaves_the_memory():
    loaded, memory = [], LruCache(10)

    def get(key, size=4):
        return memory.get(key, lambda: (loaded.append(key) or key, size))

    assert [get(key) for key in "abacabd"] == list("abacabd")
    assert loaded == ["a", "b", "c", "b", "d"]  # `a` stayed, because it was used before each of the others came
    assert get("e", size=100) == "e"  # alone, though it is too large
    assert memory.bytes == 100


def test_a_bad_line_is_one_bad_sample(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": \n{"a": 3}\n')
    shards = lockstep_recipes.Shards(tmp_path / "a.jsonl")
    assert len(shards) == 3
    assert (shards[0], shards[2]) == ({"a": 1}, {"a": 3})
    with pytest.raises(DataError, match=r"a.jsonl, sample 1: not JSON"):
        shards[1]


def test_members_of_a_tar_that_are_no_samples(tmp_path):
    def pack(*names):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        (tmp_path / "a.tar").write_bytes(file.getvalue())
        return lockstep_recipes.Shards(tmp_path / "a.tar")

    shards = pack("README", "a.jpg", "a.cls", "__info__.json", ".hidden", "d/a.jpg")
    assert [sorted(shards[index]) for index in range(2)] == [["__key__", "cls", "jpg"], ["__key__", "jpg"]]
    assert len(shards) == 2
    with pytest.raises(DataError, match="KEY a occurs twice"):
        pack("a.jpg", "b.jpg", "a.cls")
    with pytest.raises(DataError, match="a second member of KEY a with the extension jpg"):
        pack("a.jpg", "a.JPG")
    with pytest.raises(DataError, match="no samples"):
        pack("README")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("name", ["a.txt", "d/" * 60 + "a.txt", "n" * 98 + ".txt", "n" * 120 + ".txt", "\u00e4.txt"])
def test_names_and_places_of_members_are_those_of_tarfile(form, name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for number, content in enumerate((b"", b"x" * 511, b"x" * 512, b"x" * 513)):
            member = tarfile.TarInfo(f"{number}{name}")
            member.size, member.mtime = len(content), 1.5  # of which PAX makes a header of its own
            try:
                archive.addfile(member, io.BytesIO(content))
            except ValueError:
                assert form == tarfile.USTAR_FORMAT  # the name is too long for it
    archive = tarfile.open(fileobj=io.BytesIO(file.getvalue()))
    plain = [(member.name, member.offset_data, member.size) for member in archive]
    if not plain:
        return
    end = tar.behind(archive.getmembers()[-1])
    found = tar.quickly(file.getvalue()[:end])
    assert found == plain or (found is None and (len(name) > 100 or not name.isascii()))
    members = tar.Members(file.getvalue()[:end])
    assert [members[row]["txt"] for row in range(len(members))] == [b"x" * size for _, _, size in plain]


def test_the_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1)  # each line is a block
    shards = lockstep_recipes.Shards(shard_cases.write(tmp_path / "data"), cache=5000)
    for index in (*range(len(shards)), *range(len(shards))):
        assert shards[index] == SAMPLES[index]
        assert shards._here()[1].bytes <= 5000
    with pytest.raises(
        UsageError, match=r"part-0.jsonl, samples 0 to 0: the block has \d+ bytes, but the cache holds only 50"
    ):
        lockstep_recipes.Shards(tmp_path / "data", cache=50)[0]


def test_threads_and_forked_processes_read_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1)
    shards = lockstep_recipes.Shards(shard_cases.write(tmp_path / "data"), cache=5000)
    wrong = []

    def read():
        wrong.extend(index for index in range(len(shards)) if shards[index] != SAMPLES[index])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with shards._here()[1]._lock:  # as another thread may hold it at the instant of a fork
        workers = DataLoader(shards, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert [sample["number"] for sample in workers] == list(range(len(shards)))


def test_the_window_follows_from_the_bytes_of_a_sample(tmp_path, monkeypatch):
    folder = shard_cases.write(tmp_path / "data")
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(data_module, "_WINDOW", 10 * size // len(SAMPLES))
    assert lockstep_recipes.Shards(folder).order.window in (9, 10)
    assert lockstep_recipes.Shards(folder, window=3).order.window == 3


def test_two_columns_of_one_name_and_a_source_that_is_no_path_are_refused(tmp_path):
    table = pa.table([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="several columns are named 'a'"):
        lockstep_recipes.Shards(tmp_path / "a.arrow")[0]
    with pytest.raises(UsageError, match="the source is None"):
        lockstep_recipes.Shards(None)
    with pytest.raises(UsageError, match="the window is True"):
        lockstep_recipes.Shards(tmp_path / "a.arrow", window=True)
