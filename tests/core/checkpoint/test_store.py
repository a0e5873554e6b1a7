"""A checkpoint is complete, or it does not exist."""

import errno
import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core import atomic
from lockstep.core.checkpoint import files, store
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.errors import CheckpointError
from tests.core.checkpoint import cases
from tests.core.checkpoint.cases import ALONE, commit, steps

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=30)


class Killed(BaseException):
    """Stands for the end of the process at this place."""


@pytest.fixture
def folder(tmp_path):
    """With one checkpoint, of step 1."""
    commit(tmp_path, 1)
    return tmp_path


def fake(step, **metrics):
    return Checkpoint(Path(f"step-{step:08d}"), {"step": step, "metrics": metrics})


# ---- what counts


def test_what_was_committed_is_listed_newest_first(tmp_path):
    made = [commit(tmp_path, step, metrics={"eval/loss": float(step)}) for step in (3, 10, 7)]
    found = store.listed(tmp_path)
    assert [one.step for one in found] == [10, 7, 3]
    assert found[1] == made[2]
    assert found[1].metrics == {"eval/loss": 7.0}
    assert {name: entry["shape"] for name, entry in found[1].index.items()} == {"weight": [10], "bias": [3]}
    assert found[1].size == sum(path.stat().st_size for path in found[1].path.iterdir() if path.name != "manifest.json")
    assert found[1].manifest["files"].keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata", "index.json"}
    assert found[1].manifest["saved_at"][:2] == "20"
    assert cases.read(found[1])["weight"].tolist() == list(range(7, 17))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000007", "step-00000010"]


def test_steps_of_more_than_eight_digits_are_in_order(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        commit(tmp_path, step)
    assert steps(tmp_path) == [100_000_000, 99_999_999, 5]
    assert store.newest(tmp_path, ALONE)[0].step == 100_000_000


def test_other_names_are_no_checkpoints(folder):
    for name in ("step-1", "step-abcdefgh", "step-00000002.bak", ".staging-step-00000003", "copy-step-00000004"):
        shutil.copytree(folder / "step-00000001", folder / name)
    assert steps(folder) == [1]
    assert store.unreadable(folder) == []


def test_folder_without_a_manifest_never_was_a_checkpoint(folder):
    commit(folder, 2)
    (folder / "step-00000002" / "manifest.json").unlink()
    assert steps(folder) == [1]
    assert store.unreadable(folder) == []
    found, complaints = store.newest(folder, ALONE)
    assert (found.step, complaints) == (1, [])


def test_nothing_at_all_is_no_error(tmp_path):
    assert store.newest(tmp_path, ALONE) == (None, [])
    assert store.newest(tmp_path / "nowhere", ALONE) == (None, [])
    assert store.listed(tmp_path / "nowhere") == []


def test_plain_values_come_back_as_they_were(tmp_path):
    values = {"float": 0.1 + 0.2, "int": 2**60 + 1, "none": None, "bool": True, "text": 'with "quotes", ü and \n'}
    commit(tmp_path, 1, values=values, metrics={"eval/auroc": float("nan")})
    (found,) = store.listed(tmp_path)
    assert found.values == values
    assert type(found.values["bool"]) is bool
    assert found.metrics["eval/auroc"] != found.metrics["eval/auroc"]


# ---- damage


def test_flipped_byte_anywhere_in_any_file_is_found(folder):
    checkpoint = commit(folder, 2)
    assert store.check(checkpoint) == []
    for name in checkpoint.manifest["files"]:
        path = checkpoint.path / name
        whole = path.read_bytes()
        for at in {*range(0, len(whole), max(1, len(whole) // 25)), len(whole) - 1}:
            cases.flip(path, at)
            assert store.check(checkpoint) == [f"{name} differs from its checksum"], at
            path.write_bytes(whole)
        cases.flip(path, len(whole) // 2)
        found, complaints = store.newest(folder, ALONE)
        assert found.step == 1
        assert complaints == [f"passed over a damaged checkpoint: step-00000002: {name} differs from its checksum"]
        path.write_bytes(whole)
    assert store.newest(folder, ALONE)[0].step == 2


def test_every_flipped_byte_of_a_manifest_is_found(folder):
    path = folder / "step-00000001" / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        cases.flip(path, at)
        (complaint,) = store.unreadable(folder)
        assert complaint.startswith("step-00000001: manifest.json "), at
        assert at % 50 or steps(folder) == []
        path.write_bytes(whole)
    assert steps(folder) == [1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"checkpoint": {}}',
        b'{"checkpoint": {"step": 2}, "crc32": 1}',
        b"\xff\xfe",
        b"{",
    ],
)
def test_other_text_in_a_manifest_is_found(folder, content):
    (commit(folder, 2).path / "manifest.json").write_bytes(content)
    found, complaints = store.newest(folder, ALONE)
    assert found.step == 1
    assert len(complaints) == 1
    assert complaints[0].startswith("passed over a damaged checkpoint: step-00000002: manifest.json ")


def test_truncated_manifest_is_found(folder):
    path = commit(folder, 2).path / "manifest.json"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert steps(folder) == [1]


def test_unreadable_manifest_is_named(folder):
    path = commit(folder, 2).path / "manifest.json"
    path.unlink()
    path.mkdir()
    assert steps(folder) == [1]
    assert store.unreadable(folder) == ["step-00000002: manifest.json cannot be read: Is a directory"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json"])
def test_missing_file_and_file_of_other_size_are_named(folder, name):
    checkpoint = commit(folder, 2)
    path = checkpoint.path / name
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x")
    assert store.check(checkpoint) == [f"{name} has {size + 1} bytes, not {size}"]
    path.unlink()
    assert store.check(checkpoint) == [f"{name} cannot be read: No such file or directory"]
    assert store.newest(folder, ALONE)[0].step == 1


def test_parts_of_a_check_are_the_whole(folder):
    (checkpoint,) = store.listed(folder)
    for path in checkpoint.path.iterdir():
        path.write_bytes(b"")
    whole = store.check(checkpoint)
    assert len(whole) == 4
    for parts in (1, 2, 3, 5):
        found = [store.check(checkpoint, part, parts) for part in range(parts)]
        assert sorted(itertools.chain(*found)) == sorted(whole)
        assert max(map(len, found)) <= -(-4 // parts)


def test_only_damage_to_newer_checkpoints_is_told(folder):
    for step in (2, 3, 4):
        commit(folder, step)
    cases.flip(folder / "step-00000004" / "__0_0.distcp", 50)
    (folder / "step-00000003" / "manifest.json").write_text("")
    (folder / "step-00000001" / "manifest.json").write_text("")
    found, complaints = store.newest(folder, ALONE)
    assert found.step == 2
    assert [complaint.split(": ")[1] for complaint in complaints] == ["step-00000004", "step-00000003"]


def test_no_valid_checkpoint_at_all_is_an_error_not_a_fresh_start(folder):
    commit(folder, 2)
    (folder / "step-00000001" / "__0_0.distcp").write_bytes(b"")
    (folder / "step-00000002" / "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no valid checkpoint is left") as caught:
        store.newest(folder, ALONE)
    assert "step-00000001: __0_0.distcp has 0 bytes" in str(caught.value)
    assert "step-00000002: manifest.json is damaged" in str(caught.value)


# ---- commit


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda handle: (done.append(Path(f"/proc/self/fd/{handle}").resolve().name), fsync(handle))[1]
    )
    monkeypatch.setattr(
        Path, "rename", lambda self, target: (done.append(f"rename to {target.name}"), rename(self, target))[1]
    )
    commit(tmp_path, 5)
    named = done.index("rename to step-00000005")
    staged = ".staging-step-00000005"
    assert done[:named] == ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", "manifest.json", staged]
    assert done[named + 1 :] == [tmp_path.name]


@pytest.mark.parametrize("place", ["before-manifest", "in-manifest", "before-rename", "after-rename"])
def test_end_of_the_process_at_any_place_leaves_a_whole_checkpoint_or_none(folder, monkeypatch, place):
    def fail_at(here, step):
        if here == place:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "fail_at", fail_at)
        with pytest.raises(Killed):
            commit(folder, 2)
    expected = 2 if place == "after-rename" else 1
    found, complaints = store.newest(folder, ALONE)
    assert (found.step, complaints) == (expected, [])
    assert [path.name for path in store.clear_leftovers(folder)] == (
        [] if expected == 2 else [".staging-step-00000002"]
    )
    commit(folder, 2)
    assert steps(folder) == [2, 1]
    assert [store.check(one) for one in store.listed(folder)] == [[], []]


@pytest.mark.parametrize("how", ["share", "manifest", "no manifest"])
def test_damaged_checkpoint_of_the_same_step_is_replaced(folder, how):
    path = commit(folder, 2, [{"weight": torch.zeros(10)}, {"bias": torch.zeros(3)}]).path
    if how == "share":
        cases.flip(path / "__1_0.distcp", 100)
    elif how == "manifest":
        (path / "manifest.json").write_text("")
    else:
        (path / "manifest.json").unlink()
    (path / "__7_0.distcp").write_text("of a larger world")
    commit(folder, 2)
    found = store.listed(folder)[0]
    assert (found.step, store.check(found)) == (2, [])
    assert not (found.path / "__7_0.distcp").exists()
    assert cases.read(found)["bias"].tolist() == [1, 1, 1]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_listing_reads_no_index(folder):
    commit(folder, 2)
    for step in (1, 2):
        (folder / f"step-{step:08d}" / "index.json").unlink()
    assert steps(folder) == [2, 1]


@pytest.mark.parametrize("how", ["lost", "other"])
def test_share_that_rank_0_cannot_see_is_an_error_when_it_is_saved(folder, how):
    staged = store.staging(folder, 2)
    staged.mkdir()
    manifest, index = cases.stage(staged, 2)
    if how == "lost":
        (staged / "__1_0.distcp").unlink()  # it is on the disk of another machine
    else:
        (staged / "__1_0.distcp").write_bytes(b"of an older run")
    with pytest.raises(OSError, match=r"__1_0\.distcp"):
        store.commit(folder, 2, manifest, index=index, values={})
    assert steps(folder) == [1]


# ---- metrics, which come later


def test_metrics_are_added_and_nothing_else_changes(folder):
    commit(folder, 2, values={"eval/a": 1})
    before = store.listed(folder)[0]
    assert store.add_metrics(folder, 2, {"eval/loss": 0.5, "eval/accuracy": math.nan})
    after = store.listed(folder)[0]
    assert after.metrics["eval/loss"] == 0.5
    assert math.isnan(after.metrics["eval/accuracy"])
    assert after.manifest | {"metrics": {}} == before.manifest
    assert (after.values, store.check(after)) == ({"eval/a": 1}, [])
    assert store.unreadable(folder) == []
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002"}
    assert store.add_metrics(folder, 2, {"eval/loss": 0.4})
    assert store.listed(folder)[0].metrics == {"eval/loss": 0.4}


@pytest.mark.parametrize("place", ["before-metrics", "in-metrics"])
def test_end_of_the_process_while_metrics_are_added_leaves_the_checkpoint_without_them(folder, monkeypatch, place):
    def fail_at(here, step):
        if here == place:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(store, "fail_at", fail_at)
        with pytest.raises(Killed):
            store.add_metrics(folder, 1, {"eval/loss": 1.0})
    found, complaints = store.newest(folder, ALONE)
    assert (found.step, found.metrics, complaints) == (1, {}, [])
    store.clear_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert store.add_metrics(folder, 1, {"eval/loss": 1.0})
    assert store.newest(folder, ALONE)[0].metrics == {"eval/loss": 1.0}


def test_manifest_with_metrics_is_on_the_disk_before_it_takes_the_place_of_the_other(folder, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (done.append(Path(f"/proc/self/fd/{handle}").resolve().name), fsync(handle))[1]
    )
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (done.append(f"replaces {target.name}"), replace(self, target))[1]
    )
    store.add_metrics(folder, 1, {"eval/loss": 1.0})
    assert done == [".staging-manifest.json-00000001", "replaces manifest.json", "step-00000001"]


@pytest.mark.parametrize("how", ["absent", "damaged", "no manifest"])
def test_metrics_are_added_to_no_checkpoint_that_is_none(folder, how):
    if how == "damaged":
        cases.flip(folder / "step-00000001" / "manifest.json", 30)
    elif how == "no manifest":
        (folder / "step-00000001" / "manifest.json").unlink()
    assert not store.add_metrics(folder, 2 if how == "absent" else 1, {"eval/loss": 1.0})
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


# ---- removal


def test_removed_checkpoint_is_gone(folder):
    commit(folder, 2)
    store.remove(folder / "step-00000002")
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("rest", [0, 1, 3])
def test_interrupted_removal_leaves_no_half_of_a_checkpoint(folder, monkeypatch, rest):
    path = commit(folder, 2).path

    def rmtree(doomed, **_):
        for name in sorted(os.listdir(doomed) if doomed.exists() else [])[rest:]:
            (doomed / name).unlink()
        if doomed.exists():
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(atomic.shutil, "rmtree", rmtree)
        with pytest.raises(Killed):
            store.remove(path)
    assert steps(folder) == [1]
    assert store.unreadable(folder) == []
    commit(folder, 2)
    store.remove(path)  # over what the first left
    assert steps(folder) == [1]
    store.clear_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_leftovers_are_cleared_and_nothing_else(folder):
    (folder / ".staging-step-00000002").mkdir()
    (folder / ".staging-step-00000002" / "__0_0.distcp").write_text("half")
    (folder / ".staging-deleted-step-00000003").mkdir()
    (folder / "notes").mkdir()
    (folder / "step-00000009").mkdir()
    assert [path.name for path in store.clear_leftovers(folder)] == [
        ".staging-deleted-step-00000003",
        ".staging-step-00000002",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step-00000001", "step-00000009"]
    assert store.clear_leftovers(folder / "nowhere") == []


def test_prune_deletes_what_is_not_kept_and_says_so(tmp_path):
    for step in range(1, 7):
        commit(tmp_path, step)
    gone = store.prune(tmp_path, CheckpointConfig(keep_last=2, keep_every_steps=3))
    assert sorted(path.name for path in gone) == ["step-00000001", "step-00000002", "step-00000004"]
    assert steps(tmp_path) == [6, 5, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (3, 5, 6)]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_prune_never_deletes_the_last_valid_one(monkeypatch, last):
    found = [fake(step, **{"eval/a": float(step % 3)}) for step in range(5, 0, -1)]
    monkeypatch.setattr(store, "listed", lambda _: found)
    monkeypatch.setattr(store, "remove", lambda _: None)
    for count in range(6):
        for valid in itertools.combinations(range(1, 6), count):
            for best in (None, "max eval/a"):
                retention = CheckpointConfig(keep_last=last, keep_best=best)
                gone = {
                    int(path.name[-1])
                    for path in store.prune(Path(), retention, valid=lambda one, valid=valid: one.step in valid)
                }
                kept = set(range(1, 6)) - gone
                if not valid:
                    assert gone == set()
                else:
                    assert kept == set(retention.reasons(found)) | {max(valid)}


def test_prune_without_checking_reads_no_share(folder, monkeypatch):
    commit(folder, 2)
    monkeypatch.setattr(files, "checksum", lambda _: pytest.fail("read a share"))
    store.prune(folder, CheckpointConfig(keep_last=1))
    assert steps(folder) == [2]


def test_failing_removal_is_an_error_of_the_system(folder, monkeypatch):
    def rename(*_):
        raise OSError(errno.EACCES, "Permission denied")

    commit(folder, 2)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Permission denied"):
        store.prune(folder, CheckpointConfig(keep_last=1))
    assert steps(folder) == [2, 1]


# ---- which stay


def test_reasons_are_named():
    found = [
        fake(step, **metrics)
        for step, metrics in [
            (10, {"eval/a": 0.3}),
            (20, {"eval/a": 0.9}),
            (30, {}),
            (40, {"eval/a": 0.1}),
            (50, {"eval/b": 5.0}),
        ]
    ]
    assert CheckpointConfig(keep_last=2).reasons(found) == {40: ["last"], 50: ["last"]}
    assert CheckpointConfig(keep_last=1, keep_best="max eval/a").reasons(found) == {50: ["last"], 20: ["best"]}
    assert CheckpointConfig(keep_last=1, keep_best="min eval/a").reasons(found) == {50: ["last"], 40: ["best"]}
    assert CheckpointConfig(keep_last=1, keep_best="min eval/c").reasons(found) == {50: ["last"]}
    assert CheckpointConfig(keep_last=1, keep_every_steps=20).reasons(found) == {
        50: ["last"],
        20: ["every 20"],
        40: ["every 20"],
    }
    assert CheckpointConfig(keep_last=3, keep_best="min eval/a", keep_every_steps=40).reasons(reversed(found)) == {
        30: ["last"],
        40: ["last", "best", "every 40"],
        50: ["last"],
    }
    assert CheckpointConfig(keep_last=9).reasons(found) == {step: ["last"] for step in (10, 20, 30, 40, 50)}
    assert CheckpointConfig().reasons([]) == {}


def test_of_equally_good_ones_the_newer_stays():
    found = [fake(1, **{"eval/a": 0.5}), fake(2, **{"eval/a": 0.5}), fake(3, **{"eval/a": 0.1})]
    assert CheckpointConfig(keep_last=1, keep_best="max eval/a").reasons(found) == {3: ["last"], 2: ["best"]}


def test_a_metric_that_is_no_number_is_never_the_best():
    for best, at in itertools.product(("min", "max"), (1, 2, 3)):
        values = {1: 0.1, 2: 0.5, 3: 0.9} | {at: float("nan")}
        kept = CheckpointConfig(keep_last=1, keep_best=f"{best} eval/a").reasons(
            [*(fake(step, **{"eval/a": value}) for step, value in values.items()), fake(4)]
        )
        rated = {step: value for step, value in values.items() if step != at}
        assert kept == {4: ["last"], {"min": min, "max": max}[best](rated, key=rated.get): ["best"]}


@FIXED
@given(
    st.dictionaries(st.integers(1, 60), st.none() | st.integers(-5, 5), max_size=12),
    st.integers(1, 5),
    st.sampled_from([None, "min", "max"]),
    st.none() | st.integers(1, 20),
)
def test_what_stays_is_what_was_asked_for(metrics, last, best, every):
    found = [fake(step, **({} if value is None else {"eval/a": float(value)})) for step, value in metrics.items()]
    reasons = CheckpointConfig(
        keep_last=last, keep_best=f"{best} eval/a" if best else None, keep_every_steps=every
    ).reasons(found)
    ordered = sorted(metrics)
    assert set(ordered[-last:]) == {step for step, why in reasons.items() if "last" in why}
    assert len(reasons) >= min(last, len(metrics))
    assert not ordered or ordered[-1] in reasons
    rated = [value for value in metrics.values() if value is not None]
    chosen = [metrics[step] for step, why in reasons.items() if "best" in why]
    assert chosen == ([min(rated) if best == "min" else max(rated)] if best and rated else [])
    assert {step for step, why in reasons.items() if f"every {every}" in why} == {
        step for step in metrics if every and step % every == 0
    }
    assert all(reasons.values())


def test_a_manifest_is_plain_json(folder):
    content = json.loads((folder / "step-00000001" / "manifest.json").read_text())
    assert content["checkpoint"]["step"] == 1
    index = json.loads((folder / "step-00000001" / "index.json").read_text())
    assert index["tensors"]["bias"]["dtype"] == "float32"
