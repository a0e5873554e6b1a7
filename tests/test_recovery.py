"""Runs that are killed, crash, hang or are asked to stop: in processes of their own."""

import contextlib
import functools
import os
import pty
import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from lockstep.core.checkpoint import files, store
from tests import processes, rank_cases
from tests.processes import HANG_S, children, handles, has_logged, is_running, launched, ranks_of, start, wait_for
from tests.ranks import run_ranks

SETTINGS = [
    "log.writers=[text_log,json_lines]",
    "optim.clip_norm=0.5",
    "train.steps=60",
    "train.eval_every_steps=20",
    "checkpoint.every_steps=10",
    "log.every_steps=10",
]
ENDLESS = ["log.writers=[text_log,json_lines]", "train.steps=1000000", "train.eval_every_steps=0", "log.every_steps=10"]

TASKS = """
import os, time
from tests.own_tasks import Plain

class WaitsInEvaluation(Plain):
    def loss(self, model, batch):
        folder = os.environ.get("WAITS")
        logged = folder and os.path.getsize(f"{folder}/run/metrics.jsonl")  # not in the dry run
        while logged and not model.training and not os.path.exists(f"{folder}/asked"):
            time.sleep(0.01)
        return super().loss(model, batch)

class FailsToEvaluate(Plain):
    trained = False
    def loss(self, model, batch):
        self.trained |= model.training
        if self.trained and not model.training and os.environ["RANK"] == "1":
            raise RuntimeError("a file that rank 1 alone cannot read")
        return super().loss(model, batch)

class SlowSteps(Plain):
    def loss(self, model, batch):
        time.sleep(0.01)
        return super().loss(model, batch)

class HangsThenCrashes(Plain):
    calls = 0
    def loss(self, model, batch):
        self.calls += model.training  # not those of the dry run
        first = os.environ["LOCKSTEP_RESTARTS"] == "0"
        if first and self.calls == 25 and os.environ["RANK"] == "0":
            time.sleep(1000)
        if not first and self.calls == 7 and os.environ["RANK"] == "1":
            raise RuntimeError("always here")
        return super().loss(model, batch)
"""


def state(run):
    newest = store.listed(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


def same(one, other):
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][key], other[1][key]) for key in one[1])
    )


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


def kill_the_launcher(folder):
    first = start(
        "train",
        "toy",
        *SETTINGS,
        "--nproc",
        2,
        "--run-dir",
        folder / "run",
        LOCKSTEP_FAIL_AT=f"0:40:staged:hang:{folder / 'once'}",
    )
    wait_for((folder / "once").exists)
    ranks = ranks_of(first.pid)
    first.kill()
    first.communicate()
    wait_for(lambda: not any(map(is_running, ranks)))
    return ranks


@launched(kill_the_launcher)
def test_ranks_end_when_their_launcher_is_killed_and_another_start_goes_on(launch, undisturbed):
    (ranks,) = launch.done
    assert len(ranks) == 2
    run = launch.folder / "run"
    again = run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", run)
    assert re.search("resuming .* at step 30", again[0])
    assert same(state(run), undisturbed)


def _has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def ask_to_stop(folder, number, nproc):
    process = start(
        "train",
        f"{folder}/tasks.py:SlowSteps",
        *ENDLESS,
        "data.workers=2",
        "--nproc",
        nproc,
        "--run-dir",
        folder / "run",
    )
    wait_for(lambda: has_logged(folder / "run"))
    os.killpg(process.pid, number)  # as a terminal does: to the launcher, and on one rank also to the loader's workers
    out, errors = process.communicate(timeout=HANG_S)
    wait_for(lambda: not _has_processes(process.pid))  # a helper of `multiprocessing` ends after the launcher
    return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=errors)


def ask_twice(folder):
    """Goes on from where the request before has stopped, in a copy."""
    run = shutil.copytree(folder / "run", folder / "twice")
    logged = (run / "metrics.jsonl").read_text().count("\n")
    stuck = f"0:*:before-rename:hang 1:*:before-share:hang:{folder}/stuck"
    process = start(
        "train", f"{folder}/tasks.py:SlowSteps", *ENDLESS, "--nproc", 2, "--run-dir", run, LOCKSTEP_FAIL_AT=stuck
    )
    wait_for(lambda: (run / "metrics.jsonl").read_text().count("\n") > logged)
    ranks = ranks_of(process.pid)
    process.send_signal(signal.SIGINT)
    wait_for((folder / "stuck").exists)
    time.sleep(0.5)  # what comes sooner is the same key press
    waited = process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(map(is_running, ranks)))
    return SimpleNamespace(returncode=process.returncode, stderr=errors, waited=waited, ranks=len(ranks))


stopped = launched(functools.partial(ask_to_stop, number=signal.SIGTERM, nproc=2), ask_twice)


@pytest.mark.parametrize(
    ("number", "nproc"),
    [
        pytest.param(signal.SIGTERM, 2, marks=stopped),
        pytest.param(
            signal.SIGTERM,
            1,
            marks=[launched(functools.partial(ask_to_stop, number=signal.SIGTERM, nproc=1)), pytest.mark.exhaustive],
        ),
        pytest.param(
            signal.SIGINT,
            2,
            marks=[launched(functools.partial(ask_to_stop, number=signal.SIGINT, nproc=2)), pytest.mark.exhaustive],
        ),
    ],
)
def test_request_to_stop_saves_ends_with_75_and_another_start_goes_on(launch, number, nproc):
    done, run = launch.done[0], launch.folder / "run"
    assert done.returncode == 75, done.stderr
    step, _ = state(run)
    assert f"stopped by {number.name} at step {step} of 1000000, saved" in done.stdout
    assert done.stderr.strip() == "the same command resumes from there"
    task = f"{launch.folder}/tasks.py:SlowSteps"
    again = run_ranks(nproc, rank_cases.command, "train", task, *ENDLESS, f"train.steps={step + 5}", "--run-dir", run)
    assert f"at step {step}\n" in again[0]
    assert state(run)[0] == step + 5


@stopped
def test_second_request_ends_at_once_and_leaves_the_checkpoint_before(launch):
    before, done = launch.done
    assert done.waited
    assert done.returncode == 130
    assert "stopped at once, without saving" in done.stderr
    assert done.ranks == 2
    assert f" at step {state(launch.folder / 'twice')[0]} of 1000000, saved" in before.stdout


STOPPED_IN_EVALUATION = [
    "log.writers=[text_log,json_lines]",
    "train.steps=12",
    "train.eval_every_steps=10",
    "batch.global=8",
    "log.every_steps=10",
    "task.eval_length=240",
]


def ask_one_rank(folder):
    task = f"{folder}/tasks.py:WaitsInEvaluation"
    process = start("train", task, *STOPPED_IN_EVALUATION, "--nproc", 2, "--run-dir", folder / "run", WAITS=str(folder))
    wait_for(lambda: has_logged(folder / "run"))
    os.kill(ranks_of(process.pid)[1], signal.SIGUSR1)
    (folder / "asked").touch()
    _, errors = process.communicate(timeout=HANG_S)
    return SimpleNamespace(returncode=process.returncode, stderr=errors)


@pytest.mark.exhaustive
@launched(ask_one_rank)
def test_request_to_one_rank_during_an_evaluation_stops_all_and_the_evaluation_is_made_up_for(launch):
    (done,) = launch.done
    run = launch.folder / "run"
    assert done.returncode == 75, done.stderr
    assert state(run)[0] == 10
    assert '"eval/loss"' not in (run / "metrics.jsonl").read_text()
    run_ranks(
        1,
        rank_cases.command,
        "train",
        f"{launch.folder}/tasks.py:WaitsInEvaluation",
        *STOPPED_IN_EVALUATION,
        "--run-dir",
        run,
    )
    assert [
        line.split(",")[0] for line in (run / "metrics.jsonl").read_text().splitlines() if '"eval/loss"' in line
    ] == ['{"step": 10', '{"step": 12']


def kill_the_warm_process(folder):
    task = f"{folder}/tasks.py:SlowSteps"
    process = start(
        "train",
        task,
        "log.every_steps=10",
        "train.steps=100",
        "--nproc",
        2,
        "--max-restarts",
        1,
        "--run-dir",
        folder / "run",
    )
    wait_for(lambda: has_logged(folder / "run"))
    (warm,) = (child for child in children(process.pid) if len(children(child)) == 2)
    ranks = children(warm)
    os.kill(warm, signal.SIGKILL)
    _, errors = process.communicate(timeout=HANG_S)
    return SimpleNamespace(returncode=process.returncode, stderr=errors, left=[r for r in ranks if is_running(r)])


@pytest.mark.exhaustive
@launched(kill_the_warm_process)
def test_killed_warm_process_is_named_and_ranks_start_again_without_it(launch):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    assert "the process from which ranks are forked was killed by signal 9" in done.stderr
    assert "restart 1 of 1" in done.stderr
    assert not done.left
    assert state(launch.folder / "run")[0] == 100


def ask_before_training(folder):
    begun = [start("train", "toy", *ENDLESS, "--nproc", nproc, "--run-dir", folder / str(nproc)) for nproc in (1, 2)]
    wait_for(lambda: handles(begun[0].pid, signal.SIGTERM))
    begun[0].terminate()
    wait_for(lambda: len(ranks_of(begun[1].pid)) == 2)
    begun[1].terminate()
    return [(process.communicate(timeout=HANG_S)[1], process.returncode) for process in begun]


@launched(ask_before_training)
def test_request_before_training_ends_with_75(launch):
    (done,) = launch.done
    assert len(done) == 2
    for errors, code in done:
        assert code == 75, errors
        assert "before training began; nothing was lost; the same command starts again" in errors


RESTARTED = ["parallel.timeout_s=20", "checkpoint.every_steps=10", "--nproc", 2, "--max-restarts", 5]
hangs_then_crashes = launched(
    (
        "train",
        "{folder}/tasks.py:HangsThenCrashes",
        *ENDLESS,
        *RESTARTED,
        "log.flops=false",  # the task counts the calls of its loss
        "--run-dir",
        "{folder}/run",
    )
)


@hangs_then_crashes
def test_hang_ends_in_a_report_of_every_rank_and_is_restarted(launch):
    (done,) = launch.done
    assert "no rank made progress for 20 s" in done.stderr
    (report,) = (launch.folder / "run").glob("hang-2*.txt")
    text = report.read_text()
    assert re.search(r"rank 0 \(.*\): training, step 24, silent for \d+ s, at .*tasks.py:\d+ in loss", text)
    assert re.search(r"rank 1 \(.*\): training, step 24, silent for \d+ s, at ", text)
    assert "time.sleep(1000)" in text
    assert re.search(r"rank 0 made only \d+ collectives, and rank 1 made \d+: rank 0 did not reach gloo:\w+ \d+", text)
    assert re.search(r"rank 1, default_pg \(0\): .*gloo:\w+ \d+ \[.*\] \w+ NOT DONE", text)
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
    assert "it failed 2 times in a row at step 26" in done.stderr


@launched(("train", "toy", *SETTINGS, "--nproc", 2, "--run-dir", "{folder}/run"), LOCKSTEP_FAIL_AT="1:60:in-share:full")
def test_full_disk_is_told_at_once_survived_and_seen_in_the_exit_code(launch):
    (done,) = launch.done
    run = launch.folder / "run"
    assert done.returncode == 1
    assert "warning: the checkpoint of step 60 could not be written with" in done.stdout
    assert "No space left on device" in done.stderr
    assert "the newest is of step 50" in done.stderr
    assert "restart" not in done.stderr, done.stderr
    assert state(run)[0] == 50
    run_ranks(2, rank_cases.command, "train", "toy", *SETTINGS, "--run-dir", run)
    assert state(run)[0] == 60


FAILING = [
    "log.writers=[text_log,json_lines]",
    "train.steps=4",
    "train.eval_every_steps=4",
    "task.eval_length=20",
    "--nproc",
    2,
    "--max-restarts",
    0,
]


@pytest.mark.exhaustive
@launched(("train", "{folder}/tasks.py:FailsToEvaluate", *FAILING, "--run-dir", "{folder}/run"))
def test_what_was_trained_is_saved_where_one_rank_fails_to_evaluate(launch):
    (done,) = launch.done
    assert done.returncode == 1
    assert "a file that rank 1 alone cannot read" in done.stderr
    assert "The checkpoint of step 4 is saved, and the same command resumes from there" in done.stderr
    assert state(launch.folder / "run")[0] == 4


def ask_torchrun(folder):
    process = start("train", f"{folder}/tasks.py:SlowSteps", *ENDLESS, "--run-dir", folder / "run", torchrun=2)
    wait_for(lambda: has_logged(folder / "run"))
    process.terminate()
    return process.communicate(timeout=HANG_S)[0]


@launched(ask_torchrun)
def test_sigterm_to_torchrun_saves_what_other_ranks_reach_undisturbed(launch):
    (out,) = launch.done
    assert "saved" in out
    found = state(launch.folder / "run")
    assert found[0] > 0
    other = launch.folder / "other"
    run_ranks(
        2,
        rank_cases.command,
        "train",
        f"{launch.folder}/tasks.py:SlowSteps",
        *ENDLESS,
        f"train.steps={found[0]}",
        "--run-dir",
        other,
    )
    assert same(found, state(other))


def test_environment_of_ranks_does_not_reach_these_tests():
    assert not set(processes.environment()) & {"RANK", "WORLD_SIZE"}


def close_the_terminal(folder):
    task = f"{folder}/tasks.py:SlowSteps"
    arguments = processes.command("train", task, *ENDLESS, "--nproc", 2, "--run-dir", folder / "run")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(arguments[0], arguments, processes.environment())
    os.set_blocking(terminal, False)

    def logs():
        with contextlib.suppress(BlockingIOError):  # the program must not wait for a reader
            os.read(terminal, 1 << 16)
        return has_logged(folder / "run")

    wait_for(logs)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.exhaustive
@launched(close_the_terminal)
def test_closed_terminal_asks_to_stop_and_nothing_is_lost(launch):
    assert launch.done == [75]
    log = (launch.folder / "run" / "train.log").read_text()
    assert f"stopped by SIGHUP at step {state(launch.folder / 'run')[0]} of 1000000, saved" in log
