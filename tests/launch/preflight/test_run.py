"""The checks on ranks: what is wrong on one node is named with its remedy, before anything is computed."""

import os
import re
import sys

import pytest
import torch
from torch.distributed import HashStore

from lockstep.cli import application as cli
from lockstep.core.errors import UsageError
from lockstep.core.parallel import world
from lockstep.core.parallel.world import World
from lockstep.launch.preflight import run as preflight
from lockstep.launch.preflight import shared_folder
from tests import own_tasks, runs
from tests.launch.preflight import cases
from tests.ranks import run_ranks

SETTINGS = runs.config(train={"steps": 2})
TORCH = torch.__version__.rpartition(".")[0]  # 2.13


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "torch",
            [f"versions: torch {TORCH}", "2.12.1 on rank 1 (node b, cpu)", f"on node b: pip install 'torch=={TORCH}"],
        ),
        ("lockstep", ["versions: lockstep", "(other co) on rank 1 (node b, cpu)"]),
        ("read-only", ["rank 1 (node b, cpu) cannot write there: Read-only file system", "run_dir"]),
        pytest.param(
            "full",
            ["rank 1 (node b, cpu) cannot write there: No space left on device"],
            marks=pytest.mark.exhaustive,
        ),
        ("folder", ["rank 1 (node b, cpu)", "run_dir"]),
        ("memory", ["0.2 of 80.0 GiB are free on rank 1 (node b, cpu): process 4711 (python) holds 60000 MiB"]),
        ("device", ["rank 0 (node a, cpu), rank 1 (node b, cpu) share the device GPU-1234"]),
    ],
)
def test_a_fault_of_one_node_is_named_before_anything_is_computed(fault, says, tmp_path):
    for message in run_ranks(2, cases.train, SETTINGS, tmp_path / "run", [fault]):
        for part in says:
            assert part in message
    assert not list(tmp_path.rglob("train.log"))
    assert not list(tmp_path.rglob(".preflight-*"))


def test_all_faults_are_named_at_once(tmp_path):
    other = {"optim": {"name": "AdamW", "lr": 0.02, "weight_decay": 0.1}, "seed": 7}
    faults = ["torch", "read-only", "memory", "clock"]
    for message in run_ranks(2, cases.train, SETTINGS, tmp_path, faults, other):
        assert "4 faults before the training" in message
        for part in (
            "2.12.1",
            "optim.lr is 0.02 on rank 1 (node b, cpu), but 0.01",
            "seed is 7",
            "optim.lr=0.01 seed=0",
        ):
            assert part in message
        for part in ("cannot write there", "0.2 of 80.0 GiB"):
            assert part in message


def test_data_that_one_node_lacks_is_named(tmp_path):
    (tmp_path / "there.csv").write_text("a\n1\n")
    (tmp_path / "shorter.csv").write_text("a\n")
    here = {"data": {"train": str(tmp_path / "there.csv")}}
    for message in run_ranks(2, cases.data_faults, SETTINGS | here, tmp_path):
        assert "data.train is nothing on rank 1 (node b, cpu), but a file of 4 bytes on most ranks" in message
    for message in run_ranks(2, cases.data_faults, SETTINGS | here, tmp_path, str(tmp_path / "shorter.csv")):
        assert "data.train is a file of 2 bytes on rank 1 (node b, cpu)" in message


def test_other_samples_on_another_node_are_named(tmp_path):
    for message in run_ranks(2, cases.train_with_lengths, SETTINGS, tmp_path, (96, 72)):
        assert "the nodes have different training data: 96 samples on node a, 72 samples on node b" in message


def test_a_file_system_without_an_answer_is_a_fault_and_no_hang(tmp_path):
    settings = SETTINGS | {"data": {"train": str(tmp_path)}}
    (found, _) = run_ranks(2, cases.check, settings, tmp_path, ["silent"])
    assert ("data", "fault", "the data cannot be read on rank 1 (node b, cpu): no answer within 0.2 s") in found


def test_what_is_only_suspicious_is_a_warning_in_the_log(tmp_path):
    assert run_ranks(2, cases.train, SETTINGS, tmp_path, ["clock", "crowded"]) == [None, None]
    log = (tmp_path / "train.log").read_text()
    assert "warning: the clock of node b is 90 s behind" in log
    assert "warning: 20.0 of 80.0 GiB are free on rank 1 (node b, cpu): process 4711" in log
    assert "network: a sum over 2 ranks" in log


def test_the_log_and_each_rank_name_its_process(tmp_path):
    own = run_ranks(2, cases.own_lines, SETTINGS, tmp_path)
    processes = [
        re.fullmatch(rf"\[rank {r}\] process (\d+) on node a, local rank {r}, cpu\n", own[r])[1] for r in (0, 1)
    ]
    first, second = processes
    assert f"  processes: rank 0 is {first}, rank 1 is {second} on node a\n" in (tmp_path / "train.log").read_text()


def test_the_connection_that_is_slow_is_named():
    (lines, _) = run_ranks(2, cases.lines_of_slow_links)
    assert any(line.startswith("warning: the connection is slow (a to b: ") for line in lines)


def test_two_processes_with_the_same_rank_are_named():
    store, alone = HashStore(), World(3, 4, 3, torch.device("cpu"))
    world._check_own_rank(alone, store)
    store.set("3", "process 1 on b")
    with pytest.raises(UsageError, match=r"RANK=3: two processes are rank 3: process 1 on b, and process \d+ on "):
        world._check_own_rank(alone, store)


def test_ranks_of_one_node_write_no_file_and_measure_no_link(tmp_path):
    assert run_ranks(2, cases.collectives_and_files, SETTINGS, tmp_path) == [[], []]


def test_ranks_of_one_node_with_different_folders(tmp_path):
    for message in run_ranks(2, cases.train, SETTINGS, tmp_path, ["folder"], None, 2):
        assert f"it is {tmp_path}/1 on rank 1 (node a, cpu), but {tmp_path}/0 on rank 0" in message


def test_everything_is_checked_on_request(tmp_path):
    found, other = run_ranks(2, cases.check, SETTINGS, tmp_path / "new" / "run", [], 2)
    assert found == other
    assert {check: level for check, level, _ in found} == {
        "versions": "ok",
        "config": "ok",
        "task": "ok",
        "devices": "ok",
        "processes": "ok",
        "device memory": "skipped",
        "clocks": "skipped",
        "data": "ok",
        "free disk": "ok",
        "run directory": "ok",
        "network": "ok",
        "rendezvous": "ok",
    }
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_too_small_for_two_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 10_000)
    with pytest.raises(UsageError, match=r"9.31e-06 GiB are free, but two checkpoints take"):
        runs.fit(own_tasks.Plain(), SETTINGS, tmp_path / "new")
    assert not (tmp_path / "new" / "metrics.jsonl").exists()
    monkeypatch.undo()
    runs.fit(own_tasks.Plain(), SETTINGS, tmp_path / "old")
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 100)
    with pytest.raises(UsageError, match="preflight, free disk"):
        runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path / "old")
    runs.fit(own_tasks.Plain(), SETTINGS, tmp_path / "old")  # it is complete


def test_command_prints_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor", "preflight", "toy"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "ok       versions       lockstep " in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_command_ends_with_3_after_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared_folder, "_write", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor", "preflight", "toy", "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    captured = capsys.readouterr()
    assert "FAULT    run directory" in captured.out
    assert "remedy: mount the folder for writing" in captured.out
    assert "preflight found 1 fault" in captured.err
