"""`lockstep shards`: what is written is what comes back, once each, also after a kill at any file."""

import io
import json
import os
import uuid

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset
from typer.testing import CliRunner

import lockstep_recipes
from lockstep.cli.application import app
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.shards import write as write_module
from lockstep_recipes.shards.write import write
from tests.shard_cases import SAMPLES

LONG = [{"number": number, "text": f"{number} " * 50, "values": [number, 0.5]} for number in range(60)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(LONG)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def command(*arguments):
    done = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize(("kind", "samples"), [("parquet", LONG), ("tar", LONG), ("jsonl", Stream())])
def test_samples_come_back_after_a_kill_at_any_file(tmp_path, monkeypatch, kind, samples):
    put, count = write_module._Folder.put, 0
    options = {"kind": kind, "shard_bytes": 60_000 if kind == "tar" else 4000}
    write(samples, str(tmp_path / "whole"), **options)
    while True:
        count += 1
        folder, calls = tmp_path / f"killed-{count}", []

        def killed(self, name, data, calls=calls, last=count):
            calls.append(name)
            if len(calls) == last:
                raise KeyboardInterrupt
            put(self, name, data)

        with monkeypatch.context() as patch:
            patch.setattr(write_module._Folder, "put", killed)
            try:
                write(samples, str(folder), **options)
                break
            except KeyboardInterrupt:
                pass
        write(samples, str(folder), **options)
        assert files(folder) == files(tmp_path / "whole")
    assert count > 6
    shards = lockstep_recipes.Shards(tmp_path / "whole")
    assert len(shards.shards) > 2
    found = [shards[index] for index in range(len(shards))]
    if kind == "tar":
        found = [
            {"number": int(one["number.cls"]), "text": one["text"].decode(), "values": json.loads(one["values.json"])}
            for one in found
        ]
    assert found == LONG
    assert write(samples, str(tmp_path / "whole"), **options).resumed == 60  # nothing is left to do


def test_another_writing_is_not_mixed_in(tmp_path):
    out = str(tmp_path / "out")
    write(LONG, out, kind=None, shard_bytes=6000, source="a")
    shard = tmp_path / "out" / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"shard-00000.parquet: the shard has changed since it was counted"):
        lockstep_recipes.Shards(out)
    shard.unlink()
    with pytest.raises(
        DataError, match=r"shard-00000.parquet: index.json lists this shard, but the file does not exist"
    ):
        lockstep_recipes.Shards(out)
    with pytest.raises(UsageError, match="written with different settings"):
        write(LONG, out, kind=None, shard_bytes=6001, source="a")
    with pytest.raises(UsageError, match="written with different settings"):
        write(LONG, out, kind="jsonl", shard_bytes=6000, source="a")
    (tmp_path / "foreign").mkdir()
    for content in ("[1]", "{}", '{"shards": [], "version": 2}'):
        (tmp_path / "foreign" / "index.json").write_text(content)
        with pytest.raises(UsageError, match=r"its index.json was not written by `lockstep shards`"):
            write(LONG, str(tmp_path / "foreign"), kind=None, shard_bytes=6000, source="a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(UsageError, match="the folder already contains files, such as x"):
        write(LONG, str(tmp_path / "other"), kind=None, shard_bytes=6000)
    with pytest.raises(DataError, match="there are no samples"):
        write([], str(tmp_path / "none"), kind=None, shard_bytes=6000)
    with pytest.raises(UsageError, match="no length and no index"):
        write(Stream(), str(tmp_path / "stream"), kind=None, shard_bytes=6000, shuffle=0)

    def broken():
        yield from LONG[:50]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(broken(), str(tmp_path / "half"), kind=None, shard_bytes=6000)
    with pytest.raises(DataError, match="the source has changed"):
        write(LONG[::-1], str(tmp_path / "half"), kind=None, shard_bytes=6000)
    with pytest.raises(DataError, match=r"(?s)sample 0: JSON cannot hold it.*--format"):
        write([{"a": b"x"}], str(tmp_path / "bytes"), kind="jsonl", shard_bytes=6000)
    with pytest.raises(DataError, match=r"(?s)do not fit into columns.*--format"):
        write([{"a": 1}, {"a": "x"}], str(tmp_path / "mixed"), kind="parquet", shard_bytes=6000)
    with pytest.raises(DataError, match="is not a valid member name"):
        write([{"__key__": "a.b", "jpg": b""}], str(tmp_path / "key"), kind=None, shard_bytes=6000)


def test_arrays_pictures_and_chats_have_formats_that_fit(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    pairs = TensorDataset(torch.arange(12.0).reshape(4, 3), torch.arange(4))
    cases = {
        "pairs": (pairs, "tar"),
        "pictures": ([{"image": picture, "caption": "a cat"}], "tar"),
        "chats": ([{"messages": [{"role": "user", "content": "hello"}]}], "jsonl"),
        "texts": (["one", "two"], "parquet"),
        "bytes": ([{"image": {"bytes": b"x", "path": None}, "label": 3}], "parquet"),
    }
    read = {}
    for name, (samples, kind) in cases.items():
        assert write(samples, str(tmp_path / name), kind=None, shard_bytes=10**6).index["format"] == kind, name
        read[name] = lockstep_recipes.Shards(tmp_path / name)[0]
    assert np.load(io.BytesIO(read["pairs"]["0.npy"])).tolist() == [0, 1, 2]
    assert np.load(io.BytesIO(read["pairs"]["1.npy"])) == 0
    assert read["pictures"]["caption.txt"] == b"a cat"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(read["pictures"]["image.png"]))), np.asarray(picture))
    assert read["chats"] == cases["chats"][0][0]
    assert read["texts"] == {"text": "one"}
    assert read["bytes"] == cases["bytes"][0][0]


def test_shuffled_shards_have_all_samples_in_another_order(tmp_path):
    write(LONG, str(tmp_path / "out"), kind=None, shard_bytes=6000, shuffle=1)
    shards = lockstep_recipes.Shards(tmp_path / "out")
    found = [shards[index]["number"] for index in range(len(shards))]
    assert sorted(found) == list(range(60))
    assert found != sorted(found)


def test_a_bucket(tmp_path):
    bucket = f"memory://{uuid.uuid4().hex}"
    write(SAMPLES, bucket, kind=None, shard_bytes=200)
    shards = lockstep_recipes.Shards(bucket)
    assert [shards[index] for index in range(len(shards))] == SAMPLES
    names = {os.path.basename(name) for name in fsspec.filesystem("memory").ls(bucket, detail=False)}
    assert names == {"index.json", *(f"shard-{number:05d}.parquet" for number in range(len(shards.shards)))}
    assert write(SAMPLES, bucket, kind=None, shard_bytes=200).resumed == len(SAMPLES)


def test_the_command_reads_what_people_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("text,label\nhello,1\nworld,2\n")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    (tmp_path / "own.py").write_text("def samples():\n    for number in range(5):\n        yield {'number': number}\n")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.v1.PNG")
    assert command("table.csv", "a")[0] == 0
    assert lockstep_recipes.Shards("a")[1] == {"text": "world", "label": "2"}
    code, output = command("lines.jsonl", "b", "--shard-size", "200", "--format", "jsonl", "--shuffle", "0")
    assert (code, output.splitlines()[-1]) == (0, "        return lockstep_recipes.Shards('b')")
    assert f"b: {len(SAMPLES)} samples in" in output
    shards = lockstep_recipes.Shards("b")
    assert sorted(shards[index]["number"] for index in range(len(shards))) == list(range(len(SAMPLES)))
    assert command("own.py:samples", "c")[0] == 0
    assert [lockstep_recipes.Shards("c")[index]["number"] for index in range(5)] == list(range(5))
    code, output = command("photos", "d")
    assert "lockstep train image_folder data.train=d" in output
    sample = lockstep_recipes.Shards("d")[4]
    assert sample["cls"] == b"dog"
    assert sample["png"] == (tmp_path / "photos" / "dog" / "1.v1.PNG").read_bytes()
    code, output = command("photos/cat", "e")
    assert code == 0
    assert sorted(lockstep_recipes.Shards("e")[0]) == ["__key__", "png"]
    for arguments, message in (
        (("own.py:nothing", "f"), "there is no such function"),
        (("table.csv", "a", "--shard-size", "big"), "--shard-size"),
        (("table.csv", "http://127.0.0.1/x"), "cannot write to HTTP addresses"),
    ):
        code, output = command(*arguments)
        assert code == 2
        assert message in output


def test_a_folder_of_datasets_keeps_its_pictures_as_they_are_stored(tmp_path):
    import datasets

    Image.new("RGB", (8, 8), (9, 0, 0)).save(tmp_path / "a.png")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [str(tmp_path / "a.png")] * 3, "label": [0, 1, 1]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, kinds)}).save_to_disk(tmp_path / "saved")
    code, output = command(f"{tmp_path / 'saved'}:train", tmp_path / "out")
    assert code == 0, output
    sample = lockstep_recipes.Shards(tmp_path / "out")[2]
    assert (sample["image"]["bytes"], sample["label"]) == ((tmp_path / "a.png").read_bytes(), 1)
    stored = lockstep_recipes.Shards(tmp_path / "saved" / "train")  # its own files of Arrow
    assert [stored[index]["label"] for index in range(3)] == [0, 1, 1]


def test_pictures_in_written_shards_are_data_of_the_recipe(tmp_path):
    from lockstep_recipes.tasks.vision.readers.image_shards import read_shards

    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "a.jpg")
    assert command(tmp_path / "photos", tmp_path / "out")[0] == 0
    pictures, codes, names, _ = read_shards(str(tmp_path / "out"), label="label")
    assert (len(pictures), codes.tolist(), names) == (2, [0, 1], ["cat", "dog"])


def test_a_shard_that_is_gone_and_a_folder_that_is_a_file_are_told(tmp_path):
    samples = [{"number": number, "text": "a" * 50} for number in range(30)]
    write(samples, str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    shards = sorted((tmp_path / "out").glob("shard-*"))
    assert len(shards) > 2
    with pytest.raises(DataError, match="it has 30 samples, but the source now has 29"):
        write(samples[1:], str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    with pytest.raises(DataError, match="the samples of the source have changed"):
        write([*samples[:-1], samples[0]], str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    shards[1].unlink()
    with pytest.raises(DataError, match=f"1 of the shards that were written are missing, such as {shards[1].name}"):
        write(samples, str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    with pytest.raises(UsageError, match="cannot create the folder"):
        write(samples, str(shards[0]), kind="jsonl", shard_bytes=500)


def test_shards_that_are_not_all_written_are_refused(tmp_path):
    def ending():
        yield from ({"number": number, "text": "a" * 50} for number in range(30))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(ending(), str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    assert list((tmp_path / "out").glob("shard-*"))
    with pytest.raises(DataError, match="these shards are incomplete: writing them was interrupted"):
        lockstep_recipes.Shards(tmp_path / "out")


def test_a_full_disk_is_told_and_the_same_command_goes_on(tmp_path, monkeypatch):
    samples = [{"number": number, "text": "a" * 50} for number in range(30)]

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write_module.atomic, "staged_file", full)
        with pytest.raises(DataError, match="cannot be written: No space left on device"):
            write(samples, str(tmp_path / "out"), kind="jsonl", shard_bytes=500)
    assert write(samples, str(tmp_path / "out"), kind="jsonl", shard_bytes=500).index["samples"] == 30
