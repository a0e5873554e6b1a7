"""Shares: who writes what, what is written is read bit for bit, damage is named, and plain torch reads it too."""

import pickle
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import LockstepError
from lockstep.core.checkpoint import files
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel.sharded_tensor import LocalShard
from tests.core.checkpoint import cases

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def write(folder, tensors, rank=0):
    return files.write_share(folder / files.share_name(rank), cases.whole(tensors), cases.ignore)


def of_dtype(dtype, shape):
    """All kinds of bit patterns, for floats also nan, infinity and minus zero."""
    count = torch.empty(shape).numel()
    if dtype == torch.bool:
        return torch.arange(count).reshape(shape) % 3 == 0
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(size)
    random = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point and count >= 4:
        random[:4] = torch.tensor([float("nan"), 1e-8, -0.0, 2.0]).to(dtype)
    return random.reshape(shape)


# ---- who writes what


@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 9))
def test_every_tensor_has_one_owner_and_loads_differ_by_at_most_the_largest(sizes, world):
    found = files.owners(sizes, world)
    assert len(found) == len(sizes)
    assert set(found) <= set(range(world))
    load = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(world)]
    assert max(load) - min(load) <= max(sizes, default=0)
    assert files.owners(tuple(sizes), world) == found


def test_owners_are_the_same_in_every_process():
    # Written out: an order that hangs on hashes or on object identities would differ between ranks.
    assert files.owners([5, 1, 5, 3, 0, 3, 1], 2) == [0, 0, 1, 0, 0, 1, 1]
    assert files.owners([1, 1, 2], 2) == [1, 1, 0]  # the largest first, or loads would be 3 and 1
    assert files.owners([1, 1, 1], 5) == [0, 1, 2]
    assert files.owners([], 3) == []


def test_many_equal_tensors_are_spread_evenly():
    found = files.owners([8] * 100, 8)
    assert {found.count(rank) for rank in range(8)} == {12, 13}


class Counted(int):
    """A number of bytes that counts how often it is compared."""

    compared = 0

    def __add__(self, other):
        return Counted(int(self) + int(other))

    __radd__ = __add__

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_the_search_for_owners_hardly_grows_with_the_number_of_ranks():
    sizes = [Counted(8 + number % 7) for number in range(1200)]
    files.owners(sizes, 512)
    assert Counted.compared < 100 * len(sizes)  # and not the bytes of 512 ranks for each tensor


# ---- round trip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    tensors = {
        f"t{number}": of_dtype(dtype, shape)
        for number, shape in enumerate([(), (0,), (3, 0, 2), (7,), (3, 4), (2, 3, 4)])
    }
    _, index = write(tmp_path, tensors)
    assert cases.same(dict(files.read(tmp_path, index)), tensors)
    assert {name: entry["dtype"] for name, entry in index.items()} == dict.fromkeys(
        tensors, str(dtype).removeprefix("torch.")
    )
    assert index["t5"]["shape"] == [2, 3, 4]


def test_views_come_back_as_what_they_show(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar of": base[2, 3],
    }
    _, index = write(tmp_path, tensors)
    assert cases.same(dict(files.read(tmp_path, index)), tensors)


def test_what_is_read_has_memory_of_its_own(tmp_path):
    _, index = write(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(3)})
    found = dict(files.read(tmp_path, index))
    found["a"] += 1
    assert found["b"].tolist() == [0, 0, 0]
    assert dict(files.read(tmp_path, index))["a"].tolist() == [0, 0, 0]


def test_checksum_is_that_of_the_file(tmp_path):
    told, _ = write(tmp_path, {"a": torch.randn(1000), "b": torch.ones(())})
    content = (tmp_path / "__0_0.distcp").read_bytes()
    assert told == {"bytes": len(content), "crc32": zlib.crc32(content)}
    assert files.checksum(tmp_path / "__0_0.distcp") == told


def test_checksum_of_a_file_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_READ_BYTES", 7)
    (tmp_path / "file").write_bytes(bytes(range(100)))
    assert files.checksum(tmp_path / "file") == {"bytes": 100, "crc32": zlib.crc32(bytes(range(100)))}


def test_index_covers_the_file_without_gap(tmp_path):
    told, index = write(tmp_path, {"a": torch.randn(9), "b": torch.ones(()), "c": torch.empty(0)})
    at = 0
    for entry in index.values():
        (part,) = entry["parts"]
        assert part["file"] == "__0_0.distcp"
        assert part["offset"] == at
        at += part["length"]
    assert at == told["bytes"]


def test_places_are_reached_in_order_and_the_file_is_flushed(tmp_path, monkeypatch):
    places, synced = [], []
    monkeypatch.setattr(
        files.os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").resolve().stat().st_size)
    )
    told, _ = files.write_share(tmp_path / "__0_0.distcp", cases.whole({"a": torch.ones(3)}), places.append)
    assert places[0] == "in-share"
    assert places[-1] == "before-fsync"
    assert synced == [told["bytes"]]


def test_only_what_is_asked_for_is_read(tmp_path):
    first, second = {"a": torch.ones(2), "b": torch.ones(3)}, {"c": torch.ones(4)}
    index = write(tmp_path, first)[1] | write(tmp_path, second, rank=1)[1]
    assert [name for name, _ in files.read(tmp_path, index, {"c": None, "b": None})] == ["b", "c"]
    assert list(files.read(tmp_path, index, {})) == []
    (tmp_path / "__1_0.distcp").unlink()
    assert cases.same(dict(files.read(tmp_path, index, {"b": None, "a": None})), first)


def test_tensors_are_read_one_at_a_time(tmp_path):
    _, index = write(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    (tmp_path / "__0_0.distcp").write_bytes(
        (tmp_path / "__0_0.distcp").read_bytes()[: index["b"]["parts"][0]["offset"]]
    )
    reading = files.read(tmp_path, index)
    assert next(reading)[0] == "a"
    with pytest.raises(CheckpointError):
        next(reading)


# ---- damage


def test_truncated_file_is_named_with_the_tensor(tmp_path):
    told, index = write(tmp_path, {"layer.weight": torch.randn(100)})
    path = tmp_path / "__0_0.distcp"
    content = path.read_bytes()
    for length in (0, 1, 10, told["bytes"] // 2, told["bytes"] - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"tensor layer\.weight cannot be read") as caught:
            list(files.read(tmp_path, index))
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "content", [bytes(2000), b"\xff" * 2000, b"PK\x03\x04" + bytes(2000)], ids=["zeros", "ones", "zip"]
)
def test_garbage_is_named_with_the_tensor(tmp_path, content):
    _, index = write(tmp_path, {"layer.weight": torch.randn(100)})
    (tmp_path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: tensor layer\.weight cannot be read"):
        list(files.read(tmp_path, index))


def test_no_flipped_byte_gives_another_error(tmp_path):
    told, index = write(tmp_path, {"a": torch.ones(2)})
    path = tmp_path / "__0_0.distcp"
    content = path.read_bytes()
    others = set()
    for at in range(0, told["bytes"], 17):
        cases.flip(path, at)
        try:
            list(files.read(tmp_path, index))
        except Exception as error:
            others |= {type(error)} - {CheckpointError}
        path.write_bytes(content)
    assert others == set()


def test_missing_share_is_named(tmp_path):
    _, index = write(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(LockstepError, match=r"__0_0\.distcp"):
        list(files.read(tmp_path, index))


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_code_in_a_share_is_not_run(tmp_path, form):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "__0_0.distcp"
    if form == "torch":
        torch.save(Evil(), path)
    else:
        path.write_bytes(pickle.dumps(Evil(), protocol=2))  # torch warns of others
    part = {"start": 0, "rows": 0, "file": path.name, "offset": 0, "length": path.stat().st_size}
    index = {"a": {"shape": [], "dtype": "float32", "parts": [part]}}
    with pytest.raises(CheckpointError, match="tensor a cannot be read"):
        list(files.read(tmp_path, index))
    assert not (tmp_path / "ran").exists()


# ---- tensors in parts


CUTS = ([3, 0, 2, 2], [7], [1, 1, 1, 1, 1, 1, 1], [0, 0, 7, 0])


def write_parts(folder, tensor, counts, name="weight"):
    """Write a tensor by ranks, `counts[rank]` rows each after a small tensor of the rank's own; returns the index."""
    shares, start = [], 0
    for rank, count in enumerate(counts):
        share = cases.whole({f"own{rank}": torch.full((2,), rank)})
        if count or not start:
            share[name] = LocalShard(tensor[start : start + count], start, tuple(tensor.shape))
        shares.append(files.write_share(folder / files.share_name(rank), share, cases.ignore)[1])
        start += count
    return files.merge(reversed(shares))  # in whatever order they come


@pytest.mark.parametrize("counts", CUTS, ids=str)
def test_any_rows_are_read_across_parts(tmp_path, counts):
    tensor = torch.randn(7, 2, 3).bfloat16()
    index = write_parts(tmp_path, tensor, counts)
    assert [part["start"] for part in index["weight"]["parts"]] == sorted(
        part["start"] for part in index["weight"]["parts"]
    )
    for begin in range(8):
        for end in range(begin, 8):
            ((name, found),) = files.read(tmp_path, index, {"weight": (begin, end)})
            assert name == "weight"
            assert cases.bits(found) == cases.bits(tensor[begin:end])
    assert cases.same(
        dict(files.read(tmp_path, index)),
        {"weight": tensor} | {f"own{rank}": torch.full((2,), rank) for rank in range(len(counts))},
    )


def test_only_files_with_wanted_rows_are_opened(tmp_path):
    tensor = torch.randn(7, 2)
    index = write_parts(tmp_path, tensor, [3, 2, 2])
    for rank in (0, 2):
        (tmp_path / files.share_name(rank)).unlink()
    assert cases.same(
        dict(files.read(tmp_path, index, {"weight": (3, 5), "own1": None})),
        {"weight": tensor[3:5], "own1": torch.ones(2).long()},
    )
    assert cases.bits(dict(files.read(tmp_path, index, {"weight": (7, 7)}))["weight"]) == cases.bits(tensor[7:])
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp: cannot be read: .*No such file"):
        list(files.read(tmp_path, index, {"weight": (3, 6)}))


def test_damage_in_one_part_names_its_file_and_the_tensor(tmp_path):
    index = write_parts(tmp_path, torch.randn(7, 2), [3, 2, 2])
    path = tmp_path / files.share_name(1)
    path.write_bytes(path.read_bytes()[: index["weight"]["parts"][1]["offset"] + 9])
    assert len(dict(files.read(tmp_path, index, {"weight": (0, 3)}))["weight"]) == 3
    with pytest.raises(CheckpointError, match="tensor weight cannot be read") as caught:
        list(files.read(tmp_path, index, {"weight": None}))
    assert caught.value.where == str(path)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named_with_its_tensor_where_its_rows_are_wanted(tmp_path, missing):
    index = write_parts(tmp_path, torch.randn(6, 2), [2, 2, 2])
    del index["weight"]["parts"][missing]
    for part in range(3):
        wanted = {"weight": (2 * part, 2 * part + 2)}
        if part != missing:
            assert len(dict(files.read(tmp_path, index, wanted))["weight"]) == 2
            continue
        with pytest.raises(CheckpointError, match="tensor weight lacks some of the rows"):
            list(files.read(tmp_path, index, wanted))
    with pytest.raises(CheckpointError, match="tensor weight lacks some of the rows 0 to 6"):
        list(files.read(tmp_path, index))


def test_merge_leaves_the_shares_as_they_are_and_joins_names_of_all(tmp_path):
    one = {
        "a": {"shape": [3], "dtype": "float32", "parts": [{"start": 2, "rows": 1}]},
        "b": {"shape": [], "dtype": "bool", "parts": [{"start": 0, "rows": 0}]},
    }
    two = {"a": {"shape": [3], "dtype": "float32", "parts": [{"start": 0, "rows": 2}]}}
    merged = files.merge([one, two])
    assert [part["start"] for part in merged["a"]["parts"]] == [0, 2]
    assert merged["b"] == one["b"]
    assert [len(share["a"]["parts"]) for share in (one, two)] == [1, 1]
    assert files.merge([two, one]) == merged
    assert files.merge([]) == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("counts", CUTS[:3], ids=str)
def test_torch_distributed_checkpoint_joins_the_parts(tmp_path, counts):
    import torch.distributed.checkpoint as dcp

    tensor = torch.randn(7, 2, 3)
    files.write_dcp_metadata(tmp_path, write_parts(tmp_path, tensor, counts))
    found = {"weight": torch.zeros(7, 2, 3), "own0": torch.ones(2).long()}
    dcp.load(found, checkpoint_id=str(tmp_path), no_dist=True)
    assert cases.same(found, {"weight": tensor, "own0": torch.zeros(2).long()})


def test_metadata_has_each_size_once_however_many_tensors_have_it(tmp_path):
    parts = [
        {"start": 2 * rank, "rows": 2, "file": f"__{rank}_0.distcp", "offset": 0, "length": 9} for rank in range(3)
    ]
    index = {name: {"shape": [6, 4], "dtype": "float32", "parts": parts} for name in ("one", "other")}
    files.write_dcp_metadata(tmp_path, index)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    one, other = (metadata.state_dict_metadata[name] for name in ("one", "other"))
    assert [tuple(chunk.offsets) for chunk in one.chunks] == [(0, 0), (2, 0), (4, 0)]
    assert all(mine.offsets is its.offsets for mine, its in zip(one.chunks, other.chunks, strict=True))
    assert len({id(chunk.sizes) for chunk in one.chunks + other.chunks}) == 1
    assert one.size is other.size


# ---- plain torch


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    shares = [
        {"model.weight": torch.randn(4, 5).t(), "model.count": torch.tensor(7), "model.empty": torch.empty(0, 3)},
        {
            "model.half": torch.randn(6).bfloat16(),
            "optimizer.weight.exp_avg": torch.randn(5, 4, dtype=torch.float64),
            "model.mask": torch.tensor([True, False]),
        },
    ]
    return cases.commit(tmp_path_factory.mktemp("run"), 3, shares), shares[0] | shares[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_distributed_checkpoint_loads_it(committed):
    import torch.distributed.checkpoint as dcp

    checkpoint, tensors = committed
    found = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    dcp.load(found, checkpoint_id=str(checkpoint.path), no_dist=True)
    assert cases.same(found, tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_converter_reads_it(committed, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint, tensors = committed
    dcp_to_torch_save(checkpoint.path, tmp_path / "plain.pt")
    assert cases.same(torch.load(tmp_path / "plain.pt", weights_only=True), tensors)


def test_metadata_names_nothing_of_lockstep(committed):
    checkpoint, _ = committed
    assert b"lockstep" not in (checkpoint.path / ".metadata").read_bytes()
    assert {path.name for path in checkpoint.path.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "index.json",
        "manifest.json",
    }
