"""Shards that are not on this disk: HTTP with and without ranges, a file system of fsspec, S3, and what fails."""

import importlib.util
import json
import os
import uuid

import fsspec
import pytest
from torch.utils.data import DataLoader

import lockstep_recipes
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.shards import files
from lockstep_recipes.shards.formats import blocks
from tests import shard_cases
from tests.selection import mainly
from tests.shard_cases import SAMPLES

ALL = (*shard_cases.WRITERS, "mds")


def read(shards):
    return [shard_cases.plain(shards[index]) for index in range(len(shards))]


@pytest.mark.parametrize("suffix", mainly(["parquet", "tar", "jsonl"], ALL))
def test_http_is_read_by_ranges(tmp_path, monkeypatch, suffix):
    folder = shard_cases.write(tmp_path / "data", suffix)
    with shard_cases.Server(folder) as server:
        source = server.url if suffix == "mds" else f"{server.url}/part-{{0..3}}.{suffix}"
        shards = lockstep_recipes.Shards(source)
        assert read(shards) == SAMPLES
        server.http.sent.clear()
        assert read(lockstep_recipes.Shards(source)) == SAMPLES  # it is counted already
        if suffix in ("parquet", "tar", "jsonl"):
            whole = sum(path.stat().st_size for path in folder.iterdir())
            assert sum(size for _, size in server.http.sent) < 2.2 * whole  # footers are read, too
        workers = DataLoader(shards, batch_size=None, num_workers=1, multiprocessing_context="fork")
        assert [shard_cases.plain(sample) for sample in workers] == SAMPLES


def test_an_http_address_may_have_spaces_and_any_letter(tmp_path):
    (tmp_path / "a bé.jsonl").write_text('{"number": 1}\n')
    with shard_cases.Server(tmp_path) as server:
        assert lockstep_recipes.Shards(f"{server.url}/a bé.jsonl")[0] == {"number": 1}
        assert lockstep_recipes.Shards(f"{server.url}/a%20b%C3%A9.jsonl")[0] == {"number": 1}


def test_a_server_without_ranges_is_asked_once_for_each_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1)
    folder = shard_cases.write(tmp_path / "data", "tar")
    with shard_cases.Server(folder, has_ranges=False) as server:
        shards = lockstep_recipes.Shards(f"{server.url}/part-{{0..3}}.tar")
        server.http.sent.clear()
        assert read(shards) == SAMPLES
        assert len(server.http.sent) <= 3 * len(shard_cases.SIZES)  # of each shard: its size, no range, the whole
        with pytest.raises(UsageError, match="does not support range requests"):
            lockstep_recipes.Shards(f"{server.url}/part-{{0..3}}.tar", cache=20_000)[0]


def test_the_disk_keeps_parts_for_all_processes_up_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1)
    folder, parts = shard_cases.write(tmp_path / "data"), tmp_path / "cache" / "shards" / "parts"
    with shard_cases.Server(folder) as server:
        source = f"{server.url}/part-{{0..3}}.jsonl"
        assert read(lockstep_recipes.Shards(source, disk="1MB")) == SAMPLES
        server.http.sent.clear()
        assert read(lockstep_recipes.Shards(source, disk="1MB")) == SAMPLES
        assert max(size for _, size in server.http.sent) == 1  # the first byte, for size and tag
        other = [{"number": 0, "text": "SAMPLE 7\n"}]  # as many bytes
        (folder / "part-1.jsonl").write_bytes(shard_cases.json_lines(other))
        assert lockstep_recipes.Shards(source, disk="1MB")[shard_cases.SIZES[0]] == other[0]
        (folder / "part-1.jsonl").write_bytes(shard_cases.json_lines(shard_cases.by_shard()[1]))
        for _ in range(2):
            assert read(lockstep_recipes.Shards(source, disk=300)) == SAMPLES
            assert sum(path.stat().st_size for path in parts.iterdir() if path.name[0] != ".") < 400


def test_failures_of_a_server(tmp_path):
    folder = shard_cases.write(tmp_path / "data")
    with shard_cases.Server(folder) as server:
        source = f"{server.url}/part-{{0..3}}.jsonl"
        server.http.failures = 3
        shards = lockstep_recipes.Shards(source)
        server.http.failures = 3
        assert read(shards) == SAMPLES
        server.http.failures = 10**9
        fresh = lockstep_recipes.Shards.__new__(lockstep_recipes.Shards)
        fresh.__dict__.update(shards.__getstate__())
        with pytest.raises(
            files.Unreachable, match=r"http://.*part-0.jsonl: cannot be read after 4 attempts.*503"
        ) as caught:
            fresh[0]
        assert caught.value.retryable
        assert not isinstance(caught.value, DataError)  # so data.on_error=skip does not skip what a network loses
        server.http.failures = 0
        with pytest.raises(DataError, match=r"part-9.jsonl: cannot be read: .*404"):
            lockstep_recipes.Shards(f"{server.url}/part-9.jsonl")
        with pytest.raises(DataError, match=r"index.json: cannot be read: .*404"):
            lockstep_recipes.Shards(server.url)
        (folder / "part-2.jsonl").write_bytes(shard_cases.json_lines(SAMPLES))
        with pytest.raises(DataError, match=r"part-2.jsonl: the shard has changed since it was counted"):
            fresh[10]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "mds"])
def test_a_file_system_of_fsspec(tmp_path, suffix):
    folder, bucket = shard_cases.write(tmp_path / "data", suffix), f"memory://{uuid.uuid4().hex}"
    for path in folder.iterdir():
        fsspec.filesystem("memory").pipe_file(f"{bucket}/{path.name}", path.read_bytes())
    for source in (bucket, f"{bucket}/", f"{bucket}/{'index.json' if suffix == 'mds' else f'part-*.{suffix}'}"):
        assert read(lockstep_recipes.Shards(source)) == SAMPLES
    with pytest.raises(DataError, match="cannot be read"):
        lockstep_recipes.Shards(f"{bucket}/none.jsonl")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "s3fs", "flask"))), reason="pip install 'moto[server]' s3fs"
)
def test_s3(tmp_path, monkeypatch):
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    try:
        options = {"endpoint_url": "http://{}:{}".format(*server.get_host_and_port())}
        system = fsspec.filesystem("s3", **options)
        system.mkdir("bucket")
        for suffix in ALL:
            folder = shard_cases.write(tmp_path / suffix, suffix)
            for path in folder.iterdir():
                system.pipe_file(f"bucket/{suffix}/{path.name}", path.read_bytes())
            shards = lockstep_recipes.Shards(f"s3://bucket/{suffix}", storage_options=options)
            assert read(shards) == SAMPLES
            workers = DataLoader(shards, batch_size=None, num_workers=2, multiprocessing_context="fork")
            assert [shard_cases.plain(sample) for sample in workers] == SAMPLES
            for _ in range(2):
                assert (
                    read(lockstep_recipes.Shards(f"s3://bucket/{suffix}", disk="1MB", storage_options=options))
                    == SAMPLES
                )
        assert len(os.listdir(tmp_path / "cache" / "shards")) > 0
        assert json.dumps(shards.where(3)).startswith('"s3://bucket/mds/')
        server.stop()
        with pytest.raises(files.Unreachable, match=r"s3://bucket/mds/.*after 4 attempts"):
            lockstep_recipes.Shards("s3://bucket/mds", storage_options=options)
    finally:
        server.stop()
