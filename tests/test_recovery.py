"""Runs that are killed, crash, hang or are asked to stop: in processes of their own."""

import os
import re
import signal
import time

import pytest
import torch

from lockstep.checkpoint import files, store
from tests import processes, rank_cases
from tests.processes import children, has_logged, is_running, launched, start, wait_for
from tests.ranks import run_ranks

SETTINGS = ["log.tensorboard=false", "optim.clip_norm=0.5", "train.steps=60", "train.eval_every_steps=20", "checkpoint.every_steps=10", "log.every_steps=10"]
ENDLESS = ["log.tensorboard=false", "train.steps=1000000", "train.eval_every_steps=0", "log.every_steps=10"]

TASKS = """
import os, time
from tests.own_tasks import Plain

class SlowEvaluation(Plain):
    def loss(self, model, batch):
        if not model.training:
            time.sleep(0.2)
        return super().loss(model, batch)

class SlowSteps(Plain):
    def loss(self, model, batch):
        time.sleep(0.01)
        return super().loss(model, batch)

class SlowStart(SlowEvaluation):
    def model(self):
        begun = time.monotonic()
        while time.monotonic() - begun < 4:  # as a first compile does
            sum(range(10000))
        return super().model()

class HangsThenCrashes(Plain):
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        first = os.environ["LOCKSTEP_RESTARTS"] == "0"
        if first and self.calls == 25 and os.environ["RANK"] == "0":
            time.sleep(1000)
        if not first and self.calls == 7 and os.environ["RANK"] == "1":
            raise RuntimeError("always here")
        return super().loss(model, batch)
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    return path


def state(run):
    newest = store.listed(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


def same(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", run)
    return state(run)


FAULTS = [("1", 20, "in-share"), ("0", 30, "before-rename"), ("1", 40, "evaluating")]


@launched(
    ("train", "toy", *SETTINGS, "--nproc", 2, "--run-dir", "{folder}/run"),
    LOCKSTEP_FAIL_AT=" ".join(f"{rank}:{step}:{place}:kill:{{folder}}/{place}" for rank, step, place in FAULTS),
)
def test_killed_ranks_are_started_again_and_end_with_the_weights_of_an_undisturbed_run(launch, undisturbed):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    assert all((launch.folder / place).exists() for _, _, place in FAULTS)
    assert re.findall(r"rank (\d) was killed by signal 9", done.stderr) == [rank for rank, _, _ in FAULTS]
    assert "restart 3 of 3" in done.stderr
    assert same(state(launch.folder / "run"), undisturbed)
    assert not list((launch.folder / "run" / "checkpoints").glob(".staging*"))


def test_ranks_end_when_their_launcher_is_killed_and_another_start_goes_on(tmp_path, undisturbed):
    run = tmp_path / "run"
    first = start("train", "toy", *SETTINGS, "--nproc", 2, "--run-dir", run, LOCKSTEP_FAIL_AT=f"0:40:staged:hang:{tmp_path / 'once'}")
    wait_for((tmp_path / "once").exists)
    ranks = children(first.pid)
    assert len(ranks) == 2
    first.kill()
    first.communicate()
    wait_for(lambda: not any(map(is_running, ranks)), timeout=10)
    again = run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", run)
    assert re.search("resuming .* at step 30", again[0])
    assert same(state(run), undisturbed)


@pytest.mark.parametrize(
    ("number", "nproc"),
    [(signal.SIGTERM, 2), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.exhaustive), pytest.param(signal.SIGINT, 2, marks=pytest.mark.exhaustive)],
)
def test_request_to_stop_saves_ends_with_75_and_another_start_goes_on(tmp_path, tasks, number, nproc):
    run = tmp_path / "run"
    command = ["train", f"{tasks}:SlowSteps", *ENDLESS, "data.workers=2", "--nproc", nproc, "--run-dir", run]
    process = start(*command)
    wait_for(lambda: has_logged(run))
    os.killpg(process.pid, number)  # as a terminal does: to the launcher, and on one rank also to the loader's workers
    asked = time.monotonic()
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert time.monotonic() - asked < 20
    step, _ = state(run)
    assert f"stopped by {number.name} at step {step} of 1000000, saved" in out
    assert errors.strip() == "the same command goes on from there"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    again = run_ranks(nproc, rank_cases.command, *command[:2], *ENDLESS, f"train.steps={step + 5}", "--run-dir", run)
    assert f"at step {step}\n" in again[0]
    assert state(run)[0] == step + 5


def test_request_to_one_rank_during_an_evaluation_stops_all_and_the_evaluation_is_made_up_for(tmp_path, tasks):
    run = tmp_path / "run"
    options = ["log.tensorboard=false", "train.steps=12", "train.eval_every_steps=10", "batch.global=8", "log.every_steps=10", "task.eval_length=160"]
    process = start("train", f"{tasks}:SlowEvaluation", *options, "--nproc", 2, "--run-dir", run)
    wait_for(lambda: has_logged(run))
    os.kill(children(process.pid)[1], signal.SIGUSR1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert state(run)[0] == 10
    assert '"eval/loss"' not in (run / "metrics.jsonl").read_text()
    run_ranks(1, rank_cases.command, "train", f"{tasks}:SlowEvaluation", *options, "--run-dir", run)
    assert [line.split(",")[0] for line in (run / "metrics.jsonl").read_text().splitlines() if '"eval/loss"' in line] == ['{"step": 10', '{"step": 12']


def test_second_request_ends_at_once_and_leaves_the_checkpoint_before(tmp_path):
    run = tmp_path / "run"
    stuck = "0:*:before-rename:hang 1:*:before-share:hang"
    run_ranks(1, rank_cases.command, "train", "toy", *ENDLESS, "train.steps=10", "--run-dir", run)
    process = start("train", "toy", *ENDLESS, "--nproc", 2, "--run-dir", run, LOCKSTEP_FAIL_AT=stuck)
    wait_for(lambda: (run / "metrics.jsonl").read_text().count("\n") > 1)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at once, without saving" in errors
    assert not any(map(is_running, ranks))
    assert state(run)[0] == 10


def test_request_before_training_ends_with_75(tmp_path):
    begun = [start("train", "toy", *ENDLESS, "--nproc", nproc, "--run-dir", tmp_path / str(nproc)) for nproc in (1, 2)]
    time.sleep(1.0)
    begun[0].terminate()
    wait_for(lambda: len(children(begun[1].pid)) == 2)
    begun[1].terminate()
    for process in begun:
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 75, errors
        assert "the same command goes on from there" in errors


RESTARTED = ["parallel.timeout_s=10", "checkpoint.every_steps=10", "--nproc", 2, "--max-restarts", 5]
hangs_then_crashes = launched(("train", "{folder}/tasks.py:HangsThenCrashes", *ENDLESS, *RESTARTED, "--run-dir", "{folder}/run"))


@hangs_then_crashes
def test_hang_ends_in_a_report_of_every_rank_and_is_restarted(launch):
    (done,) = launch.done
    assert "no rank got on for 10 s" in done.stderr
    (report,) = (launch.folder / "run").glob("hang-2*.txt")
    text = report.read_text()
    assert re.search(r"rank 0 \(.*\): training, step 24, silent for \d+ s, at .*tasks.py:\d+ in loss", text)
    assert re.search(r"rank 1 \(.*\): training, step 24, silent for \d+ s, at ", text)
    assert "time.sleep(1000)" in text
    assert str(report) in done.stderr
    assert not list((launch.folder / "run").glob("hang-rank*"))
    assert "failed at step 24: restart 1 of 5" in done.stderr
    assert done.stdout.count("at step 20\n") == 2
    assert "failed at step 26: restart 2 of 5" in done.stderr  # beyond the hang


@hangs_then_crashes
def test_crash_at_the_same_step_twice_is_not_tried_for_ever(launch):
    (done,) = launch.done
    assert done.returncode == 1
    assert "restart 2 of 5" in done.stderr
    assert "restart 3 of 5" not in done.stderr
    assert "error: rank 1 failed" in done.stderr
    assert "RuntimeError: always here" in done.stderr
    assert "tasks.py" in done.stderr.partition("error: rank 1 failed")[2]
    assert "it failed at step 26 2 times in a row" in done.stderr


SLOW = ["log.tensorboard=false", "train.steps=10", "parallel.timeout_s=2", "train.eval_every_steps=10", "task.eval_length=100", "batch.global=8"]


@launched(("train", "{folder}/tasks.py:SlowStart", *SLOW, "--run-dir", "{folder}/run"))
def test_slow_but_alive_is_no_hang(launch):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    assert not list((launch.folder / "run").glob("hang-*"))


@launched(("train", "toy", *SETTINGS, "--nproc", 2, "--run-dir", "{folder}/run"), LOCKSTEP_FAIL_AT="1:60:in-share:full")
def test_full_disk_is_told_at_once_survived_and_seen_in_the_exit_code(launch):
    (done,) = launch.done
    run = launch.folder / "run"
    assert done.returncode == 1
    assert "warning: the checkpoint of step 60 could not be written with" in done.stdout
    assert "No space left on device" in done.stderr
    assert "the newest is of step 50" in done.stderr
    assert "restart" not in done.stderr
    assert state(run)[0] == 50
    run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", run)
    assert state(run)[0] == 60


def test_sigterm_to_torchrun_saves_what_other_ranks_reach_undisturbed(tmp_path, tasks):
    run = tmp_path / "run"
    process = start("train", f"{tasks}:SlowSteps", *ENDLESS, "--run-dir", run, torchrun=2)
    wait_for(lambda: has_logged(run))
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert "saved" in out
    found = state(run)
    assert found[0] > 0
    run_ranks(2, rank_cases.command, "train", f"{tasks}:SlowSteps", *ENDLESS, f"train.steps={found[0]}", "--run-dir", tmp_path / "other")
    assert same(found, state(tmp_path / "other"))


def test_environment_of_ranks_does_not_reach_these_tests():
    assert not set(processes.environment()) & {"RANK", "WORLD_SIZE"}
