"""`lockstep verify` as a command: what it refuses, its exit code, and what it leaves behind."""

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lockstep import locks
from lockstep.cli.application import app
from lockstep.configs import config_file
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.user_files import check_replaceable
from lockstep.trainer import run_directory
from lockstep_lab.verify import command
from lockstep_lab.verify.checks import CHECKS, DEFAULT
from lockstep_lab.verify.experiments import ExperimentFailed
from lockstep_lab.verify.result import VerifyResult, fault, not_shown, passed
from lockstep_lab.verify.task_probe import TaskProbe
from packages.lab.tests.verify.made_up import experiments
from tests import runs
from tests.processes import ROOT

ODD = Path(__file__).resolve().parent / "odd_tasks.py"


class Here:
    """Workers that are this process."""

    def __init__(self, log=None):
        self.log, self.asked, self.closed = log, [], False

    def run(self, world, wrap, function, *arguments):
        assert world == 1
        self.asked.append(function.__name__)
        return [wrap(function, *arguments)]

    def close(self):
        self.closed = True


def settings(name="Classes", **sections):
    return config_file.parse(runs.config(task={"kind": f"{ODD}:{name}"}, **sections)).model_dump(by_alias=True)


def verify(folder, name="Classes", checks=("loss",), **more):
    told = []
    result = command.verify(
        settings(name), 1, folder, checks=checks, quick=True, tell=told.append, **{"workers": Here()} | more
    )
    return result, told


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The command line, with ranks in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Workers", Here)
    options = [
        "batch.global=24",
        "optim.lr=0.05",
        "log.writers=[text_log,json_lines]",
        "device=cpu",
        "--nproc",
        "1",
        "--quick",
        "--run-dir",
        "out",
    ]
    return lambda name, *more, file=ODD: CliRunner().invoke(app, ["verify", f"{file}:{name}", *options, *more])


def test_an_unknown_check_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(UsageError, match="there is no check 'gradient'") as caught:
        verify(tmp_path / "out", checks=["loss", "gradient"])
    assert caught.value.remedy.startswith("did you mean gradients? There are: loss, metric, ")
    assert not (tmp_path / "out").exists()


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(UsageError, match="3 steps are too few"):
        verify(tmp_path / "out", steps=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inner", ["", "/deeper"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, inner):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write: ") as caught:
        verify(Path(f"{tmp_path}/file{inner}"))
    assert str(tmp_path / "file") in caught.value.where
    assert "--run-dir" in caught.value.remedy


def test_as_a_rank_of_a_launcher_it_is_refused(call, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    done = call("Classes")
    assert done.exit_code == 2
    assert "verify starts its own ranks" in done.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [("--checks=lss", "did you mean loss?"), ("--steps=1", "too few"), ("--nproc=none", "not a number of ranks")],
)
def test_wrong_options_end_with_code_2(call, option, words):
    done = call("Classes", option)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_training_that_is_right_ends_with_code_0(call, tmp_path):
    done = call("Base", "--checks", "loss, predictions", file=ODD.parent / "clean_tasks.py")
    assert done.exit_code == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert written["passed"] is True
    assert [one["name"] for one in written["checks"]] == ["loss", "predictions"]
    assert all(one["seconds"] > 0 for one in written["checks"])
    assert (written["nproc"], written["quick"], written["device"]) == (1, True, "cpu")
    assert written["config"]["batch"]["global"] == 24
    assert "written: out/verify.json, out/verify.html" in done.stdout
    for name, mark in command.MARKS.items():  # so another verification may replace it
        check_replaceable(tmp_path / "out" / name, force=False, mark=mark)


def test_a_fault_ends_with_code_3_and_is_written_down(call, tmp_path):
    done = call("LearnsNothing", "--checks", "loss")
    assert done.exit_code == 3
    assert "loss" in done.stdout
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert written["passed"] is False
    assert (written["checks"][0]["name"], written["checks"][0]["status"]) == ("loss", "fault")
    assert written["checks"][0]["curves"]["loss"]
    page = (tmp_path / "out" / "verify.html").read_text()
    assert page.startswith("<!")
    assert "does not fall" in page
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == [
        "verify.html",
        "verify.json",
    ]  # the log is the ranks'


@pytest.mark.parametrize("name", ["verify.json", "verify.html"])
def test_a_file_of_somebody_else_stays_and_is_named_before_any_check(call, tmp_path, monkeypatch, name):
    monkeypatch.setattr(command, "verify", lambda *_, **__: pytest.fail("it verifies"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    done = call("Small")
    assert done.exit_code == 2
    assert f"{name}: exists, and this command did not write it" in done.stderr
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_what_is_not_shown_is_no_fault(monkeypatch, call):
    monkeypatch.setitem(CHECKS, "loss", lambda experiments: not_shown("it is dark"))
    monkeypatch.setitem(CHECKS, "metric", lambda experiments: passed("it is light"))
    done = call("Classes", "--checks", "loss,metric")
    assert done.exit_code == 0
    assert "it is dark" in done.stdout


def test_where_nothing_is_shown_the_command_fails_and_says_so(monkeypatch, tmp_path, call):
    for name in ("loss", "metric"):
        monkeypatch.setitem(CHECKS, name, lambda experiments: not_shown("it is dark"))
    done = call("Classes", "--checks", "loss,metric")
    assert done.exit_code == 1
    assert "no check could decide anything about this training" in done.stdout
    assert json.loads((tmp_path / "out" / "verify.json").read_text())["passed"] is False


def test_fewer_gpus_than_ranks_are_not_used_and_this_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(command.devices, "gpus", lambda: 1)
    monkeypatch.setattr("lockstep.core.parallel.world.pick_device", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda *_: pytest.fail("verify itself uses a GPU"))
    monkeypatch.setitem(CHECKS, "loss", lambda experiments: passed(experiments.config["device"]))
    told = []
    config = settings() | {"device": "auto"}
    result = command.verify(config, 2, tmp_path / "a", checks=["loss"], tell=told.append, workers=Here())
    assert (result.device, result.checks[0].reason) == ("cpu", "cpu")
    assert told[0].startswith("note: 1 GPU for 2 ranks, so the checks run on the CPU; --nproc 1 ")
    with pytest.raises(UsageError, match="this machine has 1 GPU for 2 ranks") as caught:
        command.verify(config | {"device": "cuda"}, 2, tmp_path / "b", checks=["loss"], workers=Here())
    assert "device=cpu" in caught.value.remedy
    here = Here()
    monkeypatch.setattr(command.worker_functions, "device_name", lambda wanted: f"a GPU for {wanted}")
    result = command.verify(config, 1, tmp_path / "c", checks=["loss"], tell=told.append, workers=here)
    assert result.checks[0].reason == "auto"
    assert result.device == "a GPU for auto"


def test_where_a_loss_communicates_a_failed_experiment_names_that_as_a_cause(monkeypatch):
    made = experiments({"task-probe": TaskProbe(collectives=["allgather"])})
    made.probe()
    assert made.short_config()["parallel"]["timeout_s"] == 30.0
    assert experiments().short_config()["parallel"]["timeout_s"] == 600.0

    def fail(experiments):
        raise ExperimentFailed("undisturbed", "the process of rank 1 ended with exit code -6")

    monkeypatch.setitem(CHECKS, "loss", fail)
    check = command._make_check("loss", made)
    assert check.status == "fault"
    assert "exit code -6. Task.loss makes collectives (allgather): all ranks must" in check.reason
    assert command._make_check("loss", experiments()).reason.endswith("exit code -6")


def test_the_global_batch_is_a_number_when_checks_see_it(monkeypatch, tmp_path):
    given = {}

    def stub(config, nproc, run_dir, checks, quick, steps):
        given.update(config=config, nproc=nproc, run_dir=run_dir, checks=checks, quick=quick, steps=steps)
        return VerifyResult(config["name"], nproc, "cpu", quick, config, {}, [passed("good", name="loss")])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "verify", stub)
    done = CliRunner().invoke(
        app, ["verify", "toy", "batch.per_rank=5", "batch.accumulate=2", "--checks", "loss,,ranks ", "--steps", "6"]
    )
    assert done.exit_code == 0, done.stderr
    assert given["config"]["batch"] == {"global": 20, "micro": 5, "per_rank": None, "accumulate": None}
    assert (given["nproc"], given["checks"], given["quick"], given["steps"]) == (2, ["loss", "ranks"], False, 6)
    assert given["run_dir"] == Path("runs/toy")


def test_all_checks_are_made_in_their_order(monkeypatch, tmp_path):
    made = []
    for name in DEFAULT:
        monkeypatch.setitem(
            CHECKS,
            name,
            lambda experiments, name=name: (
                made.append((name, experiments.steps, experiments.learning_steps)) or passed("good")
            ),
        )
    result, told = verify(tmp_path, checks=())
    assert made == [(name, 8, 40) for name in DEFAULT]
    assert [check.name for check in result.checks] == list(DEFAULT)
    assert len(told) == 1 + len(DEFAULT)  # and the head of the table
    made.clear()
    command.verify(settings(), 1, tmp_path, checks=["elastic"], steps=5, tell=told.append, workers=Here())
    assert made == [("elastic", 5, 60)]


def test_the_documentation_counts_the_checks_once():
    docs = ROOT / "docs"
    assert f"`lockstep verify` makes {len(DEFAULT)} checks on" in (docs / "verify.md").read_text()


@pytest.mark.parametrize("name", ["Raises", "NotBuilt"])
def test_a_task_that_does_not_run_is_said_before_any_check(tmp_path, name):
    with pytest.raises(LockstepError, match="the task does not run") as caught:
        verify(tmp_path, name)
    assert not isinstance(caught.value, UsageError)
    assert caught.value.where == str(tmp_path / "verify.log")
    assert {"Raises": "ValueError: the sheep are asleep", "NotBuilt": "RuntimeError: no model today"}[
        name
    ] in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_cannot_be_had_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no Task class 'Nobody'"):
        verify(tmp_path, "Nobody")
    assert list(tmp_path.iterdir()) == []


def test_experiments_leave_nothing_behind(tmp_path):
    seen = []

    def wrap(function, *arguments):
        answer = command.worker_functions.answering(function, *arguments)
        seen.extend(path.name for path in tmp_path.glob("verify-*/*"))
        return answer

    (tmp_path / "metrics.jsonl").write_text("{}")
    verify(tmp_path, wrap=wrap)
    assert "learned-1" in seen
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "verify.json", "verify.html"}


def test_nothing_is_left_behind_and_ranks_end_where_a_check_breaks(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(command, "Workers", lambda log: made.append(Here(log)) or made[0])

    def broken(experiments):
        (experiments.folder / "training").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "loss", broken)
    with pytest.raises(KeyboardInterrupt):
        command.verify(settings(), 1, tmp_path, checks=["loss"])
    assert made[0].closed
    assert made[0].log == tmp_path / "verify.log"
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_that_fails_is_a_fault_of_its_check_and_others_go_on(tmp_path, monkeypatch):
    def fail(_):
        raise ValueError("the cat sat on the cable")

    def wrap(function, *arguments):
        return command.worker_functions.answering(
            fail if function is command.worker_functions.train else function, *arguments
        )

    monkeypatch.setitem(CHECKS, "metric", lambda experiments: fault("another"))
    result, told = verify(tmp_path, checks=("loss", "metric"), wrap=wrap)
    assert [check.status for check in result.checks] == ["fault", "fault"]
    assert "learned-1" in result.checks[0].reason
    assert "the cat sat on the cable" in result.checks[0].reason
    assert len(told) == 3
    assert result.seconds >= 0


def test_a_second_verification_in_the_same_folder_waits_and_says_for_which_process(call, tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_DYING_S", 0.0)
    (tmp_path / "run").mkdir()
    with locks.locked(tmp_path / "run" / ".verify-lock"):
        done = call("Classes", "--run-dir", "run", "--checks", "loss")
    assert done.exit_code == 2
    assert f"waiting for process {os.getpid()} on " in done.stderr
    assert "which verifies in run" in done.stderr
    assert f"in use by process {os.getpid()} on " in done.stderr


def test_a_verification_goes_on_while_the_folder_trains_and_beside_other_verifications(call, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        command,
        "verify",
        lambda *_, **__: made.append(1) or VerifyResult("x", 1, "cpu", True, {}, {}, [passed("good")]),
    )
    for folder, lock in (("run", ".lock"), ("other", ".verify-lock")):
        (tmp_path / folder).mkdir()
        with locks.locked(tmp_path / folder / lock):
            assert call("Classes", "--run-dir", "run").exit_code == 0
    assert len(made) == 2
