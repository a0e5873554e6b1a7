"""Weights out and in, against plain torch and plain safetensors."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.core.errors import CheckpointError, UsageError
from lockstep.trainer.export import export_weights
from lockstep.weights.first_weights import load_weights


class Tied(nn.Module):
    """An output layer that is the embedding, buffers, and one buffer that is not saved."""

    def __init__(self, classes=7, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(classes, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, classes)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.randn(2), persistent=False)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.num_batches_tracked.fill_(seed)


def plain(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, classes))


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ---- export


def test_plain_torch_and_safetensors_load_what_was_exported(tmp_path):
    model = Tied(seed=1)
    path = export_weights(model.state_dict(keep_vars=True), tmp_path / "out", {"step": "12"})
    assert path == tmp_path / "out" / "model.safetensors"
    assert everything_under(tmp_path) == ["out", "out/model.safetensors"]
    other = Tied(seed=2)
    assert not same(state_of(other), state_of(model))
    other.load_state_dict(load_file(path), strict=True)
    assert same(state_of(other), state_of(model))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "12"}


def test_tensors_that_share_memory_or_are_not_contiguous_are_written_whole(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "row": base[1],
        "column": base[:, 2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "scalar": base[2, 2],
        "empty": base[:0],
        "parameter": nn.Parameter(base[2:4]),
        "bits": base.bool(),
        "half": base.bfloat16()[:, ::2],
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    found = load_file(export_weights(tensors, tmp_path / "out", {}))
    assert same(found, expected)
    assert same({name: tensor.detach() for name, tensor in tensors.items()}, expected)


def test_the_callers_tensors_are_not_copied_without_need(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(
        "safetensors.torch.save_file", lambda tensors, path, metadata: (written.update(tensors), Path(path).touch())
    )
    own = torch.ones(3)
    export_weights({"one": own, "two": torch.ones(4), "tied": own}, tmp_path / "out", {})
    assert written["one"].data_ptr() == own.data_ptr()
    assert written["tied"].data_ptr() != own.data_ptr()


def test_extras_are_written_beside_the_weights_and_moved_with_them(tmp_path):
    seen = []

    def extras(staging):
        seen.append(staging)
        assert not (tmp_path / "out").exists()
        (staging / "deep").mkdir()
        (staging / "deep" / "vocabulary.txt").write_text("a b")

    export_weights(plain().state_dict(), tmp_path / "out", {}, extras)
    assert everything_under(tmp_path) == ["out", "out/deep", "out/deep/vocabulary.txt", "out/model.safetensors"]
    assert (tmp_path / "out/deep/vocabulary.txt").read_text() == "a b"
    assert seen[0].parent == tmp_path
    assert seen[0].name.startswith(".staging-export-")


def test_extras_may_not_write_the_weights(tmp_path):
    with pytest.raises(UsageError, match=r"Presenter\.export: it writes model\.safetensors"):
        export_weights(
            {"a": torch.ones(2)}, tmp_path / "out", {}, lambda folder: (folder / "model.safetensors").touch()
        )
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))

    def watched_rename(self, target):
        assert sorted(synced) == sorted(
            path.stat().st_ino for path in (self, self / "b.txt", self / "model.safetensors")
        )
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched_rename)
    export_weights({"a": torch.ones(2)}, tmp_path / "out", {}, lambda staging: (staging / "b.txt").touch())
    assert synced[-1] == tmp_path.stat().st_ino
    assert len(synced) == 4


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        path = export_weights({"a": torch.ones(2)}, tmp_path / "out", {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.parent.stat().st_mode & 0o777 == 0o750


def test_an_empty_folder_a_missing_parent_and_a_relative_name_will_do(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "empty", tmp_path / "new" / "deep", Path("relative")):
        path = export_weights({"a": torch.ones(2)}, folder, {})
        assert path == folder.resolve() / "model.safetensors"
        assert list(load_file(path)) == ["a"]


def test_what_a_killed_export_left_is_not_in_the_way(tmp_path):
    staging = tmp_path / ".staging-export-out"
    staging.mkdir()
    (staging / "half.txt").touch()
    export_weights({"a": torch.ones(2)}, tmp_path / "out", {})
    assert everything_under(tmp_path) == ["out", "out/model.safetensors"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_nothing_is_overwritten(tmp_path, kind):
    folder = tmp_path / "out"
    if kind == "folder":
        folder.mkdir()
        (folder / "precious.txt").write_text("mine")
    else:
        folder.write_text("mine")
    before = everything_under(tmp_path)
    with pytest.raises(UsageError) as caught:
        export_weights({"a": torch.ones(2)}, folder, {}, lambda _: pytest.fail("too late"))
    assert str(folder) in str(caught.value)
    assert ("not empty" if kind == "folder" else "is a file") in str(caught.value)
    assert "give a new or empty folder" in str(caught.value)
    assert everything_under(tmp_path) == before
    assert (folder / "precious.txt" if kind == "folder" else folder).read_text() == "mine"


@pytest.mark.parametrize("kind", [ValueError, UsageError, KeyboardInterrupt])
def test_what_extras_raise_comes_through_and_nothing_is_left(tmp_path, kind):
    def extras(staging):
        (staging / "half.txt").touch()
        raise kind("no tokenizer")

    with pytest.raises(kind, match="no tokenizer"):
        export_weights({"a": torch.ones(2)}, tmp_path / "new" / "out", {}, extras)
    assert everything_under(tmp_path) == []


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "place", ["pathlib.Path.mkdir", "safetensors.torch.save_file", "os.fsync", "pathlib.Path.rename", "extras"]
)
def test_a_full_disk_is_said_with_the_space_there_is_and_nothing_is_left(tmp_path, monkeypatch, place):
    with monkeypatch.context() as patch:
        if place != "extras":
            patch.setattr(place, full_disk)
        with pytest.raises(CheckpointError) as caught:
            export_weights(
                {"a": torch.ones(2)}, tmp_path / "new" / "out", {}, full_disk if place == "extras" else lambda _: None
            )
    free = int(str(caught.value).split(" MiB free")[0].split()[-1])
    assert free > 0
    assert "No space left on device" in str(caught.value)
    assert str(tmp_path / "new" / "out") in str(caught.value)
    assert everything_under(tmp_path) == []


def test_when_the_system_stops_the_writing_half_way_nothing_is_left(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"MiB free.*File too large"):
            export_weights({"a": torch.ones(10_000)}, tmp_path / "out", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything_under(tmp_path) == []


def test_when_the_last_sync_fails_nothing_is_left(tmp_path, monkeypatch):
    fsync, parent = os.fsync, tmp_path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: full_disk() if os.fstat(handle).st_ino == parent else fsync(handle))
        with pytest.raises(CheckpointError):
            export_weights({"a": torch.ones(2)}, tmp_path / "out", {})
    assert everything_under(tmp_path) == []


def test_a_parent_that_is_no_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="Not a directory"):
        export_weights({"a": torch.ones(2)}, tmp_path / "file" / "out", {})
    assert everything_under(tmp_path) == ["file"]


# ---- load


def save(tensors, path):
    """As plain safetensors does."""
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


def save_in_parts(tensors, folder, parts=2):
    """As Hugging Face does."""
    names = list(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        save({name: tensors[name] for name in names[part::parts]}, folder / file)
        weight_map |= dict.fromkeys(names[part::parts], file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return folder


def refusal(model, source, skip=()):
    """What the user is told; nothing may have been loaded."""
    before, cache = state_of(model), {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(UsageError) as caught:
        load_weights(model, source, skip)
    assert same(state_of(model), before)
    assert all(torch.equal(buffer, cache[name]) for name, buffer in model.named_buffers())
    return caught.value


@pytest.mark.parametrize("kind", ["file", "folder", "parts", "export"])
def test_all_tensors_are_loaded_in_place(tmp_path, kind):
    source, model = Tied(seed=1), Tied(seed=2)
    state = source.state_dict()
    place = {
        "file": lambda: save(state, tmp_path / "any.safetensors"),
        "folder": lambda: save(state, tmp_path / "model.safetensors").parent,
        "parts": lambda: save_in_parts(state, tmp_path, 3),
        "export": lambda: export_weights(state, tmp_path / "out", {}).parent,
    }[kind]()
    cache, pointers = model.cache.clone(), [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()]
    assert not same(state_of(model), state_of(source))
    assert load_weights(model, place) == []
    assert same(state_of(model), state_of(source))
    assert torch.equal(model.cache, cache)
    assert [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()] == pointers
    assert model.head.weight is model.embedding.weight


def test_a_whole_file_goes_before_an_index(tmp_path):
    one, other, model = plain(seed=1), plain(seed=2), plain(seed=3)
    save_in_parts(other.state_dict(), tmp_path)
    save(one.state_dict(), tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    assert same(state_of(model), state_of(one))


@pytest.mark.parametrize(
    ("stored", "own"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)],
)
def test_the_models_dtype_stays(tmp_path, stored, own):
    source, model = plain(seed=1).to(stored), plain(seed=2).to(own)
    load_weights(model, save(source.state_dict(), tmp_path / "a.safetensors"))
    assert same(state_of(model), {name: tensor.to(own) for name, tensor in source.state_dict().items()})


def test_of_tied_parameters_one_name_is_enough(tmp_path):
    source = Tied(seed=1)
    for name in ("embedding.weight", "head.weight"):
        model = Tied(seed=2)
        state = {other: tensor for other, tensor in source.state_dict().items() if other != name}
        assert load_weights(model, save(state, tmp_path / f"{name}.safetensors")) == []
        assert same(state_of(model), state_of(source))


def test_without_either_name_of_tied_parameters_both_are_missing(tmp_path):
    state = {
        name: tensor
        for name, tensor in Tied(seed=1).state_dict().items()
        if name not in ("embedding.weight", "head.weight")
    }
    assert "2 missing in the file: embedding.weight, head.weight" in str(
        refusal(Tied(seed=2), save(state, tmp_path / "a.safetensors"))
    )


def test_views_of_one_storage_are_not_tied(tmp_path):
    model = nn.Module()
    flat = torch.zeros(8)
    model.register_buffer("one", flat[:4])
    model.register_buffer("two", flat[4:])
    assert "1 missing in the file: two" in str(refusal(model, save({"one": torch.ones(4)}, tmp_path / "a.safetensors")))


def test_tied_parameters_that_differ_in_the_file_are_refused(tmp_path):
    state = state_of(Tied(seed=1))
    state["head.weight"] += 1
    text = str(refusal(Tied(seed=2), save(state, tmp_path / "a.safetensors")))
    assert "head.weight (the same tensor as embedding.weight in the model, but not in the file)" in text


def test_a_name_tied_to_a_loaded_one_was_not_skipped(tmp_path):
    source, model = Tied(seed=1), Tied(seed=2)
    bias = model.head.bias.detach().clone()
    assert load_weights(model, save(source.state_dict(), tmp_path / "a.safetensors"), ["head.*"]) == ["head.bias"]
    assert torch.equal(model.head.weight, source.embedding.weight)
    assert torch.equal(model.head.bias, bias)


def test_all_that_differs_is_said_at_once_with_the_remedy(tmp_path):
    state = plain(classes=10, seed=1).state_dict()
    del state["1.bias"]
    state["pooler.weight"] = torch.ones(2)
    error = refusal(plain(classes=3), save(state, tmp_path / "a.safetensors"))
    text = str(error)
    assert error.where == "train.init_from"
    assert str(tmp_path / "a.safetensors") in text
    assert "1 missing in the file: 1.bias" in text
    assert "1 unknown to the model: pooler.weight" in text
    assert "2 differing: 2.weight (file [10, 6], model [3, 6]), 2.bias (file [10], model [3])" in text
    assert "train.init_skip" in text


def test_a_shape_that_would_broadcast_is_refused(tmp_path):
    state = plain(seed=1).state_dict() | {"0.bias": torch.ones(1)}
    assert "0.bias (file [1], model [6])" in str(refusal(plain(), save(state, tmp_path / "a.safetensors")))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_numbers_of_another_kind_are_refused(tmp_path, dtype):
    state = plain(seed=1).state_dict() | {"0.bias": torch.ones(6).to(dtype)}
    assert "model torch.float32)" in str(refusal(plain(), save(state, tmp_path / "a.safetensors")))


def test_eight_names_are_shown_of_many(tmp_path):
    state = {f"extra.{number:02d}": torch.ones(1) for number in range(11)}
    text = str(refusal(plain(), save(plain(seed=1).state_dict() | state, tmp_path / "a.safetensors")))
    assert "11 unknown to the model: extra.00, extra.01," in text
    assert "extra.07 and 3 more" in text
    assert "extra.08" not in text


def test_skipped_names_stay_as_the_model_made_them(tmp_path):
    state = plain(classes=10, seed=1).state_dict() | {"pooler.weight": torch.ones(2)}
    model = plain(classes=3, seed=2)
    before = state_of(model)
    assert load_weights(model, save(state, tmp_path / "a.safetensors"), ["2.*", "pooler.?eight"]) == [
        "2.bias",
        "2.weight",
    ]
    assert same(state_of(model), {name: before[name] if name.startswith("2.") else state[name] for name in before})


def test_a_name_that_is_skipped_is_not_loaded_though_it_would_fit(tmp_path):
    source, model = plain(seed=1), plain(seed=2)
    before = model[2].bias.detach().clone()
    assert load_weights(model, save(source.state_dict(), tmp_path / "a.safetensors"), ["2.bias"]) == ["2.bias"]
    assert torch.equal(model[2].bias, before)
    assert torch.equal(model[2].weight, source[2].weight)


@pytest.mark.parametrize("pattern", ["2", "HEAD.*", "head", "eight"])
def test_a_pattern_that_matches_nothing_is_refused(tmp_path, pattern):
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    error = refusal(model, save(model.state_dict(), tmp_path / "a.safetensors"), ["head.*", pattern])
    assert error.where == "train.init_skip"
    assert repr(pattern) in str(error)
    assert "head.weight" in error.remedy


def test_a_pattern_may_match_on_either_side_alone(tmp_path):
    state = plain(seed=1).state_dict()
    path = save(state | {"extra": torch.ones(1)}, tmp_path / "a.safetensors")
    assert load_weights(plain(seed=2), path, ["extra"]) == []
    path = save({name: state[name] for name in state if name != "2.bias"}, tmp_path / "b.safetensors")
    assert load_weights(plain(seed=2), path, ["2.bias"]) == ["2.bias"]


def test_patterns_that_leave_nothing_to_load_are_refused(tmp_path):
    error = refusal(plain(), save(plain(seed=1).state_dict(), tmp_path / "a.safetensors"), ["*"])
    assert error.where == "train.init_skip"


# ---- what is no weights


@pytest.mark.parametrize("name", ["bert-base-uncased", "folder/a.safetensors"])
def test_a_missing_path_is_said(tmp_path, name):
    error = refusal(plain(), tmp_path / name)
    assert error.where == "train.init_from"
    assert str(tmp_path / name) in str(error)
    assert "model.safetensors.index.json" in str(error)


def test_a_folder_without_weights_is_said_with_what_was_looked_for(tmp_path):
    torch.save(plain().state_dict(), tmp_path / "pytorch_model.bin")
    text = str(refusal(plain(), tmp_path))
    for part in (str(tmp_path), "neither model.safetensors nor model.safetensors.index.json"):
        assert part in text


def test_a_pickle_is_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"0.weight": Evil()}, tmp_path / "a.safetensors")
    assert "a.safetensors cannot be read as a safetensors file" in str(refusal(plain(), tmp_path / "a.safetensors"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1], lambda content: content[:20], lambda _: b"", lambda content: b"{" + content],
)
@pytest.mark.parametrize("kind", ["file", "part"])
def test_a_damaged_file_is_named(tmp_path, damage, kind):
    state = plain(seed=1).state_dict()
    if kind == "file":
        source = path = save(state, tmp_path / "a.safetensors")
    else:
        source, path = save_in_parts(state, tmp_path), tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    error = refusal(plain(), source)
    assert error.where == "train.init_from"
    assert f"{path} cannot be read" in str(error)


def test_a_missing_part_is_named(tmp_path):
    save_in_parts(plain(seed=1).state_dict(), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert str(tmp_path / "model-00002-of-00002.safetensors") in str(refusal(plain(), tmp_path))


def test_a_part_without_what_the_index_says_is_found(tmp_path):
    state = plain(seed=1).state_dict()
    save_in_parts(state, tmp_path)
    save({"0.weight": state["0.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    text = str(refusal(plain(), tmp_path))
    assert "model.safetensors.index.json" in text
    assert "1.weight, 2.weight" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"0.weight": 3}}', b"\xff\xfe"]
)
def test_a_damaged_index_is_named(tmp_path, content):
    save_in_parts(plain(seed=1).state_dict(), tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(path) in str(refusal(plain(), tmp_path))


def test_tensors_are_read_one_at_a_time_after_all_were_checked(tmp_path, monkeypatch):
    events = []

    class Watched:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework=framework)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            events.append("closed")

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            events.append("checked")
            return self.file.get_slice(name)

        def get_tensor(self, name):
            events.append("read")
            return self.file.get_tensor(name)

    monkeypatch.setattr("safetensors.safe_open", Watched)
    load_weights(plain(), save_in_parts(plain(seed=1).state_dict(), tmp_path))
    assert events == ["checked"] * 6 + ["read"] * 6 + ["closed"] * 2
