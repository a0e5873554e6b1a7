"""Ranks in processes of their own, as a user starts them: through `--nproc`, and through torchrun."""

import json

import pytest

from tests import rank_cases
from tests.processes import launched, lockstep
from tests.ranks import run_ranks

TASKS = """
import os, signal
from tests.own_tasks import Failing, FromFiles, Plain

class Fails0(Failing):
    def __init__(self):
        super().__init__(0)

class Fails1(Failing):
    def __init__(self):
        super().__init__(1)

class Killed(Plain):
    calls = 0
    def loss(self, model, batch):
        self.calls += model.training  # not those of the dry run
        if self.calls == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

class BadSample(FromFiles):
    def __init__(self):
        super().__init__(40, broken=[7])
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    return path


@launched(
    ("train", "digits", "train.epochs=1", "--nproc", 2, "--run-dir", "{folder}/run"),
    ("evaluate", "{folder}/run", "--nproc", 2),
    ("predict", "{folder}/run", "--samples", 3, "--nproc", 2),
)
def test_nproc_trains_evaluates_and_predicts(launch):
    trained, evaluated, predicted = launch.done
    assert trained.returncode == 0, trained.stderr
    assert "2 x cpu" in trained.stdout
    assert "step 23/23" in trained.stdout
    results = json.loads(evaluated.stdout)
    logged = [json.loads(line) for line in (launch.folder / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert results == {name: logged[name] for name in results}
    (alone,) = run_ranks(1, rank_cases.command, "predict", launch.folder / "run", "--samples", 3)
    assert predicted.stdout == alone, predicted.stderr
    rows = [json.loads(line) for line in alone.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert all(row["truth"] in "0123456789" and 0 < row["probability"] <= 1 for row in rows)


@pytest.mark.exhaustive
def test_torchrun_does_the_same_as_nproc(tmp_path):
    finals = []
    for name, torchrun in (("own", None), ("torchrun", 2)):
        options = [] if torchrun else ["--nproc", 2]
        done = lockstep(
            "train",
            "toy",
            "train.steps=10",
            "log.writers=[text_log,json_lines]",
            "--run-dir",
            tmp_path / name,
            *options,
            torchrun=torchrun,
        )
        assert done.returncode == 0, done.stderr
        finals.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["eval/loss"])
    assert finals[0] == finals[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_failed_rank_is_named_with_its_traceback(tmp_path, tasks, rank):
    done = lockstep("train", f"{tasks}:Fails{rank}", "--nproc", 2, "--max-restarts", 0, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert f"error: rank {rank} failed" in done.stderr
    assert "ValueError: the cat sat on the cable" in done.stderr
    assert "own_tasks.py" in done.stderr


@launched(("train", "{folder}/tasks.py:Fails0", "--run-dir", "{folder}/run"), torchrun=2)
def test_under_torchrun_the_other_ranks_say_which_rank_failed(launch):
    (done,) = launch.done
    assert done.returncode == 1
    assert "[rank 1] error: rank 1 stopped because of it: rank 0 failed" in done.stderr
    assert "the cat sat on the cable" in done.stderr.partition("[rank 1] error")[2]


@pytest.mark.exhaustive
def test_killed_rank_ends_the_run_and_is_named(tmp_path, tasks):
    done = lockstep("train", f"{tasks}:Killed", "--nproc", 2, "--max-restarts", 0, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "rank 1 was killed by signal 9" in done.stderr


@launched(("train", "{folder}/tasks.py:BadSample", "--nproc", 2, "--max-restarts", 0, "--run-dir", "{folder}/run"))
def test_unreadable_sample_on_one_rank_ends_all_with_its_name(launch):
    (done,) = launch.done
    assert done.returncode == 1
    assert "folder/007.png: sample 7 cannot be read: OSError: truncated file" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_key_is_refused_before_anything_starts(tmp_path):
    done = lockstep("train", "digits", "optim.lrr=1", "--nproc", 2, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "did you mean optim.lr?" in done.stderr
    assert not (tmp_path / "run").exists()
