"""Whose a run directory is: one run at a time, one config, and what --fresh and --allow-change mean."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import yaml

from lockstep import LockstepError
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep.core.parallel.launched import RESTARTS
from lockstep.parts.writer_kinds import files_of_writers
from lockstep.trainer import run_directory, run_record
from tests import own_tasks, runs
from tests.core.checkpoint.cases import ALONE
from tests.processes import HANG_S

VARIABLES = (RESTARTS, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_directory, "_DYING_S", 0.0)


def config(**sections):
    return config_file.parse(runs.config(**sections), needs_task=False)


def claim(folder, settings=None, fresh=False, allow_change=()):
    return run_directory.claim(folder, settings or config(), ALONE, fresh, allow_change, written_by=files_of_writers)


def claimed(folder, settings=None, **options):
    """Claim and let go at once."""
    with claim(folder, settings, **options) as resolved:
        return resolved


def gone_on(folder, settings=None, **options):
    """Claim, and go on from the checkpoint."""
    with claim(folder, settings, **options) as resolved:
        run = SimpleNamespace(folder=folder, config=resolved, task=own_tasks.Plain(), world=ALONE, first_step=0)
        run_record.keep(run, git=None)
        return resolved


@pytest.fixture
def begun(tmp_path):
    """The directory of a run that has saved a checkpoint."""
    claimed(tmp_path)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    return tmp_path


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


# ---- one at a time


def test_another_claim_is_refused_and_names_who_holds_it(tmp_path):
    with claim(tmp_path):
        with pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on ") as caught, claim(tmp_path):
            pytest.fail("two runs in one directory")
        assert caught.value.where == str(tmp_path)
        assert caught.value.exit_code == 2
    claimed(tmp_path)  # free again


def test_a_refused_claim_touches_nothing(tmp_path):
    with claim(tmp_path):
        (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
        (tmp_path / "checkpoints" / ".staging-step-00000010").mkdir()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(UsageError, match="in use"):
            claimed(tmp_path, config(optim={"lr": 0.5}), fresh=True)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_claim_is_free_after_any_error(tmp_path):
    with pytest.raises(KeyError), claim(tmp_path):
        raise KeyError
    claimed(tmp_path)


def test_a_claim_waits_for_a_rank_that_is_dying(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_DYING_S", HANG_S)
    holder = (tmp_path / ".lock").open("a+")
    fcntl.flock(holder, fcntl.LOCK_EX)
    threading.Timer(0.3, holder.close).start()
    claimed(tmp_path)
    assert holder.closed


def test_a_killed_process_holds_nothing(tmp_path):
    code = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
    code += "sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    with pytest.raises(UsageError, match="in use by another process"):
        claimed(tmp_path)
    process.kill()
    process.communicate()
    claimed(tmp_path)


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(tmp_path) as first:
        assert claimed(tmp_path) == first
    assert config_file.read_run(tmp_path) == first


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_children_do_not_hold_it(tmp_path):
    reading, writing = os.pipe()
    with claim(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")
            time.sleep(900)
            os._exit(0)
        os.read(reading, 1)
    try:
        assert claimed(tmp_path) == config()
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it still lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


# ---- what is written


def test_config_and_environment_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    resolved = claimed(tmp_path / "new" / "run", config(batch={"global": None}))
    assert resolved.batch.global_ == 32
    assert yaml.safe_load((tmp_path / "new" / "run" / "config.yaml").read_text())["batch"]["global"] == 32
    assert config_file.read_run(tmp_path / "new" / "run") == resolved
    environment = json.loads((tmp_path / "new" / "run" / "environment.json").read_text())
    assert (environment["world"], environment["launch"]) == (1, "run-1")


def test_what_a_killed_process_left_is_cleared(begun):
    for name in (".staging-step-00000010", ".staging-deleted-step-00000001"):
        (begun / "checkpoints" / name).mkdir()
        (begun / "checkpoints" / name / "__0_0.distcp").write_text("half")
    claimed(begun)
    assert saved(begun) == ["step-00000005"]


def full_disk(folder, settings=None, limit=100, **options):
    """Claim where no file may grow beyond `limit` bytes, as on a disk that is full. (The lock needs less than 100.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        gone_on(folder, settings, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot write: File too large"):
        full_disk(tmp_path)


def test_full_disk_at_a_restart_leaves_the_recorded_config(begun):
    before = (begun / "config.yaml").read_text()
    with pytest.raises(UsageError, match="cannot write"):
        full_disk(begun, config(train={"steps": 50}))
    assert (begun / "config.yaml").read_text() == before
    claimed(begun)


def test_full_disk_at_a_restart_does_not_make_it_fresh_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    claimed(tmp_path, fresh=True)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    monkeypatch.setenv(RESTARTS, "1")
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "_environment", lambda _: {"launch": "run-1", "command": "x" * 10000})
        with pytest.raises(UsageError, match="cannot write"):
            full_disk(tmp_path, fresh=True, limit=5000)
    claimed(tmp_path, fresh=True)
    assert saved(tmp_path) == ["step-00000005"]


# ---- fresh


def test_fresh_deletes_what_a_run_wrote_and_nothing_else(begun):
    for name in ("metrics.jsonl", "train.log", "hang-20260304-050607.txt", "notes.txt"):
        (begun / name).write_text("x")
    (begun / "tensorboard").mkdir()
    claimed(begun, config(optim={"lr": 0.5}), fresh=True)
    assert sorted(path.name for path in begun.iterdir()) == [".lock", "config.yaml", "environment.json", "notes.txt"]


@pytest.mark.parametrize(
    ("environment", "deletes"),
    [
        ({"TORCHELASTIC_RUN_ID": "run-1"}, True),  # the command was given again
        ({"TORCHELASTIC_RUN_ID": "run-1", RESTARTS: "0"}, True),
        (
            {"TORCHELASTIC_RUN_ID": "run-1", RESTARTS: "1"},
            False,
        ),  # a rank was killed, and our launcher started all again
        ({"TORCHELASTIC_RUN_ID": "run-1", "TORCHELASTIC_RESTART_COUNT": "2"}, False),  # torchrun did
        ({"TORCHELASTIC_RUN_ID": "run-2", RESTARTS: "1"}, True),  # what is there is of another launch
        ({RESTARTS: "1"}, True),
    ],
)
def test_fresh_deletes_once_for_each_launch(tmp_path, monkeypatch, environment, deletes):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    claimed(tmp_path, fresh=True)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    claimed(tmp_path, fresh=True)
    assert saved(tmp_path) == ([] if deletes else ["step-00000005"])


@pytest.mark.parametrize("source", [".", "checkpoints", "checkpoints/step-00000005"])
def test_fresh_does_not_delete_the_weights_to_begin_with(begun, source):
    settings = config(train={"init_from": str(begun / source)})
    with pytest.raises(UsageError, match=r"train\.init_from: .* belongs to the run that --fresh would delete"):
        claimed(begun, settings, fresh=True)
    assert saved(begun)


def test_fresh_keeps_exported_weights_beside_the_run(begun):
    (begun / "weights").mkdir()
    claimed(begun, config(train={"init_from": str(begun / "weights")}), fresh=True)
    assert (begun / "weights").is_dir()
    assert saved(begun) == []


def test_fresh_with_a_damaged_record_deletes(begun, monkeypatch):
    monkeypatch.setenv(RESTARTS, "1")
    (begun / "environment.json").write_text("{}")
    claimed(begun, fresh=True)
    assert saved(begun) == []


# ---- one config


def test_what_does_not_change_the_weights_is_free(begun):
    other = config(
        name="other",
        batch={"micro": 3},
        train={"steps": None, "epochs": 9, "eval_every_steps": 4},
        data={"workers": 2},
        log={"every_steps": 1, "writers": ["text_log", "json_lines", "tensorboard"]},
        checkpoint={"every_steps": 7, "keep_last": 1},
        parallel={"timeout_s": 5.0},
    )
    assert gone_on(begun, other) == other
    assert config_file.read_run(begun) == other


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"seed": 1}, {"seed: 0 there, 1 here"}),
        ({"batch": {"global": 12}}, {"batch.global: 24 there, 12 here"}),
        (
            {"optim": {"lr": 0.5, "args": {"amsgrad": True}}},
            {"optim.lr: 0.01 there, 0.5 here", "optim.args.amsgrad: None there, True here"},
        ),
        ({"optim": {"name": "SGD"}}, {"optim.name: 'AdamW' there, 'SGD' here"}),
        ({"schedule": {"warmup_steps": 3}}, {"schedule.warmup_steps: 0 there, 3 here"}),
        ({"precision": "bf16"}, {"precision: 'fp32' there, 'bf16' here"}),
        ({"data": {"train": "x", "workers": 3}}, {"data.train: None there, 'x' here"}),
        (
            {"task": {"kind": "mine.py:Task", "hidden": 3}},
            {"task.kind: None there, 'mine.py:Task' here", "task.hidden: None there, 3 here"},
        ),
        ({"train": {"steps": 20, "ema_decay": 0.5}}, {"train.ema_decay: None there, 0.5 here"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changes_the_weights_is_refused_by_name(begun, sections, named):
    before = (begun / "config.yaml").read_text()
    with pytest.raises(UsageError) as caught:
        claimed(begun, config(**sections))
    message = str(caught.value)
    assert {line.strip() for line in message.splitlines() if " there, " in line} == named
    assert "--fresh" in message
    assert "--allow-change" in message
    assert (begun / "config.yaml").read_text() == before


def test_before_the_first_checkpoint_anything_may_change(tmp_path):
    claimed(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".staging-step-00000005").mkdir()
    other = config(seed=5)
    assert claimed(tmp_path, other) == other


def test_global_batch_of_the_first_launch_is_kept(tmp_path):
    first = claimed(tmp_path, config_file.parse({"batch": {"per_rank": 6, "accumulate": 4}}, needs_task=False))
    assert (first.batch.global_, first.batch.micro, first.batch.per_rank) == (24, 6, None)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    again = claimed(tmp_path, config_file.parse({"batch": {"per_rank": 3, "accumulate": 4}}, needs_task=False))
    assert (again.batch.global_, again.batch.micro) == (24, 3)


def test_a_lost_config_of_a_run_without_checkpoints_is_made_anew(tmp_path):
    claimed(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    claimed(tmp_path)
    assert config_file.read_run(tmp_path) == config()


# ---- allowed changes


@pytest.mark.parametrize(
    "allowed", [("optim.lr", "optim.args.betas"), ("optim",), ("optim.lr", "optim.args"), ("seed", "optim")]
)
def test_named_keys_and_whole_sections_may_be_changed(begun, allowed):
    other = config(optim={"lr": 0.5, "args": {"betas": [0.8, 0.9]}})
    before = {path.name: path.read_bytes() for path in begun.iterdir() if path.is_file()}
    assert claimed(begun, other, allow_change=allowed) == other  # and it fails before it goes on
    assert {path.name: path.read_bytes() for path in begun.iterdir() if path.is_file()} == before
    assert gone_on(begun, other, allow_change=allowed) == other
    assert config_file.read_run(begun) == other
    with pytest.raises(UsageError, match=r"optim\.lr: 0\.5 there, 0\.01 here"):
        claimed(begun)  # the run goes on with the new value


def test_only_what_is_named_may_be_changed(begun):
    other = config(optim={"lr": 0.5, "weight_decay": 0.7}, seed=1)
    with pytest.raises(UsageError) as caught:
        claimed(begun, other, allow_change=("optim.lr",))
    assert "optim.lr" not in str(caught.value)
    assert "optim.weight_decay: 0.1 there, 0.7 here" in str(caught.value)
    assert "seed: 0 there, 1 here" in str(caught.value)


@pytest.mark.parametrize(
    ("allowed", "hint"),
    [
        ("optim.lrr", "did you mean optim.lr? "),
        ("opt", ""),
        ("optim.l", ""),
        ("log", ""),
        ("sead", "did you mean seed? "),
    ],
)
def test_unknown_key_is_refused_with_a_hint(begun, allowed, hint):
    with pytest.raises(UsageError) as caught:
        claimed(begun, allow_change=(allowed,))
    assert caught.value.what == f"no key that determines the training is called '{allowed}'"
    assert caught.value.where == "--allow-change"
    assert caught.value.remedy.startswith(f"{hint}")
    assert "There are: batch.accumulate, " in caught.value.remedy


def test_data_may_be_changed_by_the_section(begun):
    other = config(data={"train": "x"})
    assert claimed(begun, other, allow_change=("data",)) == other


def test_a_tuple_is_the_list_that_it_was_written_as(tmp_path):
    settings = config()
    settings.optim.args = {"betas": (0.8, 0.9)}
    claimed(tmp_path, settings)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    claimed(tmp_path, settings)


def test_errors_are_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match="cannot write") as caught:
        claimed(tmp_path / "file" / "run")
    assert caught.value.remedy == "choose another place with --run-dir"
