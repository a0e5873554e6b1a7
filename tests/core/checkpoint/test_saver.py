"""Saving beside the training: what is saved, what the training waits for, and what a failure does."""

import errno
import itertools
import resource
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from lockstep.core.checkpoint import files, store
from lockstep.core.checkpoint.host_buffers import MemoryBlock, pack
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel import faults
from tests.core.checkpoint import cases
from tests.core.checkpoint.cases import ALONE, about, read, steps
from tests.processes import HANG_S
from tests.ranks import run_ranks
from tests.selection import mainly


def state(value=0.0):
    return {
        "weight": torch.full((50,), float(value)),
        "bias": torch.full((3,), int(value)),
        "step": torch.tensor(float(value)),
    }


@pytest.fixture
def told():
    return []


@pytest.fixture
def make(tmp_path, told):
    return lambda **options: Saver(
        tmp_path, ALONE, options.pop("retention", CheckpointConfig()), tell=told.append, **options
    )


@pytest.fixture
def saver(make):
    return make()


@pytest.fixture
def gate(monkeypatch):
    """Writes of shares wait until it is opened; `begun` says that one waits."""

    class Gate(threading.Event):
        begun = threading.Event()

        def write(self, *arguments):
            self.begun.set()
            assert self.wait(HANG_S)
            return written(*arguments)

    written, found = files.write_share, Gate()
    found.begun.clear()
    monkeypatch.setattr(files, "write_share", found.write)
    return found


def fail(monkeypatch, *places, action="full"):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(faults, "_WANTED", [f"0:{step}:{place}:{action}" for step, place in places])


def overfill(saver, tmp_path, told):
    """What is told of a checkpoint that the system does not let grow to its size, as if the disk were full."""
    saver.save(1, state(1), {}, about(1))
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))  # of every file of this process
        saver.save(2, {"large": torch.zeros(2**20)}, {}, about(2))
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (saver.saved, len(saver.failures), len(told)) == (1, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    return told[0]


# ---- what is saved, and when


def test_saved_state_is_read_back(saver, tmp_path):
    tensors = state(3) | {"half": torch.randn(4, 5).bfloat16().t(), "empty": torch.empty(0)}
    saver.save(7, tensors, {"a": 1}, about(7, skipped=2))
    saver.finish()
    (found,) = store.listed(tmp_path)
    assert store.check(found) == []
    assert cases.same(read(found), tensors)
    assert (found.step, found.manifest["skipped"], found.values, saver.saved, saver.failures) == (7, 2, {"a": 1}, 7, [])


def test_training_goes_on_while_a_checkpoint_is_written(saver, tmp_path, gate):
    saver.save(1, state(), {}, about(1))  # returns, although nothing can be written
    assert gate.begun.wait(HANG_S)
    assert steps(tmp_path) == []
    assert saver.saved is None
    gate.set()
    saver.wait()
    assert steps(tmp_path) == [1]


def test_what_is_saved_is_the_state_of_the_call(saver, tmp_path, gate):
    tensors = state(1)
    saver.save(1, tensors, {}, about(1))
    for tensor in tensors.values():
        tensor.fill_(9)
    gate.set()
    saver.wait()
    assert cases.same(read(store.listed(tmp_path)[0]), state(1))


def test_what_is_said_of_it_is_of_the_call_too(saver, tmp_path, gate):
    values, manifest = {"count": 1}, about(1)
    saver.save(1, state(), values, manifest)
    values["count"] = manifest["step"] = 2
    gate.set()
    saver.wait()
    (found,) = store.listed(tmp_path)
    assert (found.step, found.values) == (1, {"count": 1})
    assert (values, manifest) == ({"count": 2}, about(2))  # nor does saving write into them


def test_in_step_mode_a_save_is_done_when_it_returns(make, tmp_path):
    saver = make(in_background=False)
    saver.save(1, state(), {}, about(1))
    assert saver.thread is None
    assert steps(tmp_path) == [1]


def test_next_save_waits_for_the_last(saver, tmp_path, gate, monkeypatch):
    order = []
    stage, commit = saver._stage, store.commit
    monkeypatch.setattr(saver, "_stage", lambda tensors: (order.append("copied"), stage(tensors))[1])
    monkeypatch.setattr(
        store,
        "commit",
        lambda folder, step, *rest, **more: (order.append(f"written {step}"), commit(folder, step, *rest, **more))[1],
    )
    saver.save(1, state(1), {}, about(1))
    threading.Timer(0.1, gate.set).start()
    saver.save(2, state(2), {}, about(2))
    saver.wait()
    assert order == ["copied", "written 1", "copied", "written 2"]
    assert [read(one)["bias"].tolist() for one in store.listed(tmp_path)] == [[2] * 3, [1] * 3]


def test_buffers_are_used_again(saver, tmp_path):
    saver.save(1, state(1), {}, about(1))
    saver.wait()
    before = {name: buffer.data_ptr() for name, buffer in saver.buffers.items()}
    saver.save(2, state(2), {}, about(2))
    saver.wait()
    assert {name: buffer.data_ptr() for name, buffer in saver.buffers.items()} == before
    assert cases.same(read(store.listed(tmp_path)[0]), state(2))


def test_each_buffer_is_a_storage_of_its_own_in_common_memory(saver):
    """`torch.save` writes the whole storage of a tensor."""
    saver.save(1, state(1), {}, about(1))
    saver.wait()
    buffers = saver.buffers.values()
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [buffer.nbytes for buffer in buffers]
    ends = [buffer.data_ptr() + buffer.nbytes for buffer in buffers]
    assert max(ends) - min(buffer.data_ptr() for buffer in buffers) < 512


# A transformer of 125 million parameters with AdamW's moments, and a state of which one tensor is more than half.
_TRANSFORMER = {
    f"{part}/{block}/{name}": 4 * size
    for part in "mvw"
    for block in range(12)
    for name, size in (
        ("qkv", 3 * 768 * 768),
        ("out", 768 * 768),
        ("up", 768 * 3072),
        ("down", 768 * 3072),
        ("norm", 768),
        ("bias", 3072),
    )
} | {f"{part}/embedding": 4 * 50257 * 768 for part in "mvw"}


@pytest.mark.parametrize(
    ("sizes", "is_spread"),
    [
        (_TRANSFORMER, True),
        ({"large": 4 * 1200 * 1000, "small": 1000, "scalar": 4}, False),
        ({f"{number}": 2**20 for number in range(13)}, True),
        ({"one": 1, "none": 0}, False),
        ({}, True),
    ],
    ids=["transformer", "large", "equal", "tiny", "nothing"],
)
def test_page_locked_memory_is_hardly_more_than_a_state_of_many_tensors(sizes, is_spread):
    blocks = pack(sizes, powers_of_two=True)
    assert sorted(name for block in blocks for name in block.offsets) == sorted(name for name in sizes if sizes[name])
    for block in blocks:
        assert block.size.bit_count() == 1
        ends = sorted((offset, offset + sizes[name]) for name, offset in block.offsets.items())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert not ends or ends[-1][1] <= block.size
    total, taken = sum(sizes.values()), sum(block.size for block in blocks)
    each = sum(2 ** (size - 1).bit_length() for size in sizes.values() if size)  # a buffer for each tensor
    assert taken <= max(each, 64)
    assert taken <= 1.01 * total or not is_spread
    (whole,) = pack(sizes, powers_of_two=False) or [MemoryBlock(0, {})]
    assert total <= whole.size <= total + 64 * len(sizes)


def test_buffers_are_no_training_tensors(saver):
    tensors = state()
    saver.save(1, tensors, {}, about(1))
    saver.wait()
    mine = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert not mine & {buffer.untyped_storage().data_ptr() for buffer in saver.buffers.values()}


def test_tensors_may_change_their_shape_and_number(saver, tmp_path):
    for step, tensors in enumerate(
        [state(), {"weight": torch.ones(7), "new": torch.ones(2)}, {"weight": torch.ones(7, dtype=torch.int8)}, {}], 1
    ):
        saver.save(step, tensors, {}, about(step))
        saver.wait()
        assert cases.same(read(store.listed(tmp_path)[0]), tensors)
    assert saver.failures == []


def test_a_view_is_saved_without_what_it_is_a_view_of(saver, tmp_path):
    saver.save(1, {"row": torch.randn(1000, 1000)[3]}, {}, about(1))
    saver.wait()
    assert store.listed(tmp_path)[0].size < 20_000


def test_old_checkpoints_go_by_the_retention(make, tmp_path):
    saver = make(retention=CheckpointConfig(keep_last=2, keep_best="max eval/accuracy"))
    for step, accuracy in enumerate([0.1, 0.9, 0.2, 0.3, 0.4], 1):
        saver.save(step, state(), {}, about(step) | {"metrics": {"eval/accuracy": accuracy}})
    saver.finish()
    assert steps(tmp_path) == [5, 4, 2]


def test_writing_is_a_sign_of_life(saver, gate):
    saver.save(1, state(), {}, about(1))
    assert gate.begun.wait(HANG_S)
    before = ALONE.heartbeat.beats
    gate.set()
    saver.wait()
    assert ALONE.heartbeat.beats > before


def test_close_gives_the_last_one_a_chance(saver, tmp_path, gate):
    saver.save(1, state(), {}, about(1))
    threading.Timer(0.1, gate.set).start()
    saver.close()
    assert steps(tmp_path) == [1]


def test_close_without_a_save_is_nothing(saver):
    saver.close()
    saver.finish()
    assert saver.saved is None


# ---- metrics, which come later


@pytest.mark.parametrize("in_background", [True, False])
def test_metrics_are_added_when_the_checkpoint_is_written_and_decide_what_stays(make, tmp_path, in_background):
    saver = make(in_background=in_background, retention=CheckpointConfig(keep_last=1, keep_best="max eval/accuracy"))
    for step, accuracy in enumerate([0.1, 0.9, 0.2, 0.3], 1):
        saver.save(step, state(step), {}, about(step))
        saver.add_metrics(step, {"eval/accuracy": accuracy})
    saver.finish()
    assert [(one.step, one.metrics["eval/accuracy"], store.check(one)) for one in store.listed(tmp_path)] == [
        (4, 0.3, []),
        (2, 0.9, []),
    ]


def test_adding_metrics_does_not_wait_for_the_disk(saver, tmp_path, gate):
    saver.save(1, state(), {}, about(1))
    saver.add_metrics(1, {"eval/loss": 1.0})  # returns, although nothing can be written
    assert steps(tmp_path) == []
    gate.set()
    saver.wait()
    assert store.listed(tmp_path)[0].metrics == {"eval/loss": 1.0}


def test_best_until_now_stays_while_the_newest_has_no_metrics_yet(make, tmp_path):
    saver = make(retention=CheckpointConfig(keep_last=1, keep_best="min eval/loss"))
    for step, loss in ((1, 0.5), (2, 0.9)):
        saver.save(step, state(), {}, about(step))
        saver.add_metrics(step, {"eval/loss": loss})
    saver.save(3, state(), {}, about(3))
    saver.wait()  # a kill here
    assert steps(tmp_path) == [3, 1]


def test_metrics_of_a_checkpoint_from_before_this_process_are_added(saver, tmp_path):
    cases.commit(tmp_path, 4)
    saver.add_metrics(4, {"eval/loss": 1.0})
    saver.finish()
    assert store.listed(tmp_path)[0].metrics == {"eval/loss": 1.0}


def test_metrics_without_a_checkpoint_are_let_go(saver, tmp_path, monkeypatch, told):
    fail(monkeypatch, (1, "before-share"))
    saver.save(1, state(), {}, about(1))
    saver.add_metrics(1, {"eval/loss": 1.0})
    saver.wait()
    assert (steps(tmp_path), len(told)) == ([], 1)


@pytest.mark.parametrize("place", ["before-metrics", "in-metrics"])
def test_metrics_that_cannot_be_written_are_told_and_the_checkpoint_stays_as_it_was(
    saver, tmp_path, monkeypatch, told, place
):
    fail(monkeypatch, (1, place))
    saver.save(1, state(), {}, about(1))
    saver.add_metrics(1, {"eval/loss": 1.0})
    saver.finish()  # the weights are saved
    (found,) = store.listed(tmp_path)
    assert (found.metrics, store.check(found)) == ({}, [])
    assert not list(tmp_path.glob(".staging*"))
    (message,) = told
    assert "the checkpoint of step 1 stays without the metrics of its evaluation" in message
    assert "No space left on device" in message


def test_what_is_kept_is_said_when_it_is_on_the_disk(saver, gate):
    assert saver.kept() == "No checkpoint is saved"
    saver.save(7, state(), {}, about(7))
    threading.Timer(0.1, gate.set).start()
    assert saver.kept().startswith("The checkpoint of step 7 is saved")


# ---- failures that the training survives


PLACES = ["before-share", "in-share", "before-fsync", "after-share", "before-manifest", "in-manifest", "before-rename"]


@pytest.mark.parametrize("in_background", mainly([True], [True, False]))
@pytest.mark.parametrize("place", PLACES)
def test_full_disk_at_any_stage_is_told_once_and_leaves_what_was_there(
    make, tmp_path, told, monkeypatch, place, in_background
):
    saver = make(in_background=in_background)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=123 * 2**20 + 5))
    fail(monkeypatch, (2, place))
    saver.save(1, state(1), {}, about(1))
    saver.save(2, state(2), {}, about(2))
    saver.wait()
    assert (saver.saved, len(saver.failures)) == (1, 1)
    (message,) = told
    assert message.startswith("warning: the checkpoint of step 2 could not be written with 123 MiB free: rank 0: ")
    assert "No space left on device" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (found,) = store.listed(tmp_path)
    assert store.check(found) == []
    assert cases.same(read(found), state(1))
    with pytest.raises(
        CheckpointError,
        match="1 checkpoint could not be written, the newest is of step 1; the first: the checkpoint of step 2",
    ) as caught:
        saver.finish()
    assert caught.value.exit_code == 1
    assert caught.value.where == str(tmp_path)
    saver.save(3, state(3), {}, about(3))
    saver.wait()
    assert steps(tmp_path) == [3, 1]
    assert (saver.saved, len(saver.failures), len(told)) == (3, 1, 1)
    with pytest.raises(CheckpointError, match="the newest is of step 3"):
        saver.finish()  # the exit code tells, also of a hole


def test_disk_that_is_really_too_small_is_survived(saver, tmp_path, told):
    assert overfill(saver, tmp_path, told).startswith("warning: the checkpoint of step 2 could not be written with ")
    (found,) = store.listed(tmp_path)
    assert cases.same(read(found), state(1))
    saver.save(3, state(3), {}, about(3))
    saver.wait()
    assert steps(tmp_path) == [3, 1]


def test_full_disk_is_called_by_its_name(saver, tmp_path, told):
    assert "File too large" in overfill(saver, tmp_path, told)


def test_free_space_is_that_of_the_moment(saver, told, monkeypatch, tmp_path):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(free=(0 if list(tmp_path.glob(".staging-*")) else 9) * 2**20)
    )
    fail(monkeypatch, (1, "before-rename"))
    saver.save(1, state(), {}, about(1))
    saver.wait()
    assert "with 0 MiB free" in told[0]


@pytest.mark.parametrize(
    "where",
    [
        "lockstep.core.checkpoint.files.write_share",
        "lockstep.core.checkpoint.store.commit",
        "pathlib.Path.mkdir",
        "pathlib.Path.rename",
    ],
)
def test_missing_permission_is_told_like_a_full_disk(saver, tmp_path, told, monkeypatch, where):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    saver.save(1, state(1), {}, about(1))
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(where, refuse)
        saver.save(2, state(2), {}, about(2))
        saver.wait()
    assert (saver.saved, len(saver.failures), len(told)) == (1, 1, 1)
    assert "Permission denied" in told[0]
    assert "training continues, and earlier checkpoints stay" in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_folder_that_cannot_be_made_is_told(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    saver = Saver(tmp_path / "file" / "checkpoints", ALONE, CheckpointConfig(), tell=told.append)
    saver.save(1, state(), {}, about(1))
    with pytest.raises(CheckpointError, match="this process wrote none"):
        saver.finish()
    assert len(told) == 1
    assert "Not a directory" in told[0]


def test_old_checkpoints_that_cannot_be_deleted_are_told_and_harm_nothing(make, tmp_path, told, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "remove", refuse)
    saver = make(retention=CheckpointConfig(keep_last=1))
    for step in (1, 2):
        saver.save(step, state(), {}, about(step))
    saver.finish()
    assert steps(tmp_path) == [2, 1]
    assert (saver.saved, saver.failures) == (2, [])
    (message,) = told
    assert "old checkpoints could not be deleted: [Errno 13] Permission denied" in message


@pytest.mark.parametrize("last", [1, 2])
def test_after_a_fall_back_what_is_saved_stays(make, tmp_path, last):
    saver = make(retention=CheckpointConfig(keep_last=last))
    for step in (10, 20, 30):
        cases.commit(tmp_path, step)
    for step in (20, 30):
        cases.flip(tmp_path / f"step-{step:08d}" / "__0_0.distcp", 50)
    assert store.newest(tmp_path, ALONE)[0].step == 10
    for step in (12, 14):
        saver.save(step, state(), {}, about(step))
        saver.wait()
        assert store.newest(tmp_path, ALONE)[0].step == step


# ---- failures that end it


def test_unexpected_failure_reaches_whoever_waits(saver, monkeypatch, told):
    def broken(*_):
        raise KeyError("a fault of this code")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_share", broken)
        saver.save(1, state(), {}, about(1))
        with pytest.raises(KeyError, match="a fault of this code"):
            saver.wait()
    for act in (saver.finish, saver.wait, lambda: saver.save(2, state(), {}, about(2))):
        with pytest.raises(KeyError, match="a fault of this code"):
            act()
    assert told == []


def test_close_after_a_failure_raises_nothing(saver, monkeypatch):
    def broken(*_, **__):
        raise KeyError("a fault of this code")

    monkeypatch.setattr(store, "commit", broken)
    saver.save(1, state(), {}, about(1))
    saver.close()
    with pytest.raises(KeyError):
        saver.wait()


# ---- on ranks


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    tensors = {f"t{number}": torch.randn(50 * number, 7) for number in range(12)}
    return folder, tensors, run_ranks(2, cases.save_on_ranks, folder, tensors)


def test_each_rank_writes_its_share(on_two):
    folder, tensors, ranks = on_two
    found = store.listed(folder)[0]
    assert cases.same(read(found), tensors)
    by_file = {}
    for name, entry in found.index.items():
        by_file.setdefault(entry["parts"][0]["file"], []).append(name)
    assert [sorted(by_file[files.share_name(rank)]) for rank in (0, 1)] == [answer["mine"] for answer in ranks]
    loads = [sum(tensors[name].nbytes for name in names) for names in by_file.values()]
    assert max(loads) - min(loads) <= max(tensor.nbytes for tensor in tensors.values())
    assert {name: (found.path / name).stat().st_size for name in by_file} == {
        name: found.manifest["files"][name]["bytes"] for name in by_file
    }


def test_disk_that_is_full_on_one_rank_is_a_failure_on_all(on_two):
    folder, _, (first, second) = on_two
    assert first["seen"][1][:2] == second["seen"][1][:2] == (1, [])
    for answer in (first, second):
        saved, failures, names = answer["seen"][2]
        assert saved == 1
        assert names == ["step-00000001"]
        assert len(failures) == 1
        assert "MiB free: rank 1: [Errno 28] No space left on device" in failures[0]
        assert answer["seen"][3][:2] == (3, failures)
    assert first["seen"][2][1] == second["seen"][2][1]
    assert [len(first["told"]), len(second["told"])] == [1, 0]
    assert steps(folder) == [3, 1]


def test_ranks_agree_on_the_newest_whichever_file_is_damaged(on_two, tmp_path):
    names = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    for name in ("whole", "lost", *names):
        shutil.copytree(on_two[0], tmp_path / name)
    for name in names:
        cases.flip(tmp_path / name / "step-00000003" / name, 100)
    (tmp_path / "lost" / "step-00000003" / "__1_0.distcp").unlink()
    (tmp_path / "lost" / "step-00000001" / "__0_0.distcp").unlink()
    first, second = run_ranks(
        2, cases.newest_on_ranks, [tmp_path / name for name in (*names, "whole", "nowhere", "lost")]
    )
    assert first == second
    for name, answer in zip(names, first, strict=False):
        assert answer == (1, [f"passed over a damaged checkpoint: step-00000003: {name} differs from its checksum"])
    assert first[3:5] == [(3, []), (None, [])]
    assert "no valid checkpoint is left" in first[5]
    assert "step-00000003: __1_0.distcp cannot be read" in first[5]


def test_a_rank_may_delete_the_folder_as_soon_as_the_training_has_ended(tmp_path):
    for slow in (0, 1):
        folder = tmp_path / str(slow)
        folder.mkdir()
        assert run_ranks(2, cases.delete_when_finished, folder, slow) == ["finished", "finished"]
        assert not folder.exists()
