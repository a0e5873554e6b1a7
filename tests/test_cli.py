"""The command line in this process: commands, exit codes, and what is said of wrong input."""

import datetime
import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli import train
from lockstep.cli.application import app
from lockstep.cli.options import as_arguments
from lockstep.cli.reporting import reporting
from lockstep.configs import config_file
from lockstep.core.errors import Preempted
from lockstep.trainer import local_ranks
from tests.users_file import OWN


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_recipes_are_listed(call):
    done = call("recipes")
    assert done.exit_code == 0
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"digits", "toy", "image_folder"}


def test_train_again_resumes_and_evaluate_and_predict_read_the_run(call, tmp_path):
    assert call("train", "toy", "train.steps=4", "log.writers=[text_log,json_lines]").exit_code == 0
    again = call("train", "toy", "train.steps=8", "log.writers=[text_log,json_lines]")
    assert again.exit_code == 0
    assert "resuming runs/toy at step 4" in again.stdout
    results = json.loads(call("evaluate", "runs/toy").stdout)
    assert results["eval/samples"] == 200
    rows = call("predict", "runs/toy", "--samples", "2").stdout.splitlines()
    assert len(rows) == 2
    assert {"sample", "truth", "y0"} <= json.loads(rows[0]).keys()


def test_an_automatic_run_directory_is_new_each_time(call, tmp_path, monkeypatch):
    arguments = ["toy", "train.steps=2", "log.writers=[json_lines]", "--run-dir", "auto"]
    first, second = call("train", *arguments), call("train", *arguments)
    stem = f"toy-{datetime.date.today():%Y-%m-%d}"
    for number, done in enumerate((first, second), 1):
        assert done.exit_code == 0
        assert (tmp_path / "runs" / f"{stem}-{number}" / "config.yaml").is_file()
        assert f"the run directory is runs/{stem}-{number}; give --run-dir runs/{stem}-{number}" in done.stderr
        assert (
            f"lockstep verify toy train.steps=2 'log.writers=[json_lines]' --run-dir runs/{stem}-{number}"
            in done.stdout
        )
    refused = call("train", *arguments, "--nnodes", "2", "--rendezvous", "localhost")
    monkeypatch.setenv("RANK", "0")
    for done in (refused, call("train", *arguments)):
        assert done.exit_code == 2
        assert "--run-dir: auto is for one launcher on one machine" in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_the_last_line_of_a_training_invites_to_verify_it(call, tmp_path):
    arguments = ["toy", "train.steps=2", "log.writers=[text_log, json_lines]"]
    last = call("train", *arguments, "--run-dir", "my run").stdout.splitlines()[-1]
    assert last.startswith("Check this training: ")
    command = shlex.split(last.partition(": ")[2])
    assert command == ["lockstep", "verify", *arguments, "--run-dir", "my run"]
    # The config as `verify` writes it, with another key that does not determine the training.
    config = config_file.load("toy", ["train.steps=2", "optim.lr=0.01", "log.every_steps=7"]).model_dump(by_alias=True)
    (tmp_path / "my run" / "verify.json").write_text(json.dumps({"config": config}))
    assert "Check this training" not in call("train", *arguments, "--run-dir", "my run").stdout
    another = json.dumps({"config": config | {"seed": 5}})
    for content in (another, "no JSON", "{}", '{"config": {"of": "another version"}}'):
        (tmp_path / "my run" / "verify.json").write_text(content)
        assert "Check this training" in call("train", *arguments, "--run-dir", "my run").stdout


def test_only_a_training_that_ended_well_invites_to_verify_it(call):
    assert "Check this training" not in call("train", "toy", "optim.lr=1e30").stdout


def test_the_invitation_is_a_command_for_this_machine(tmp_path, monkeypatch, capsys):
    trainer = Trainer("digits", run_dir=tmp_path)
    trainer.config = config_file.load("digits", ["device=mps"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    train._invite_to_verify(trainer, "digits", ["device=mps"], ["--preset", "m 1"])
    line = "Check this training: lockstep verify digits device=mps device=cpu --nproc 4 --preset 'm 1'\n"
    assert capsys.readouterr().out == line
    assert config_file.load("digits", ["device=mps", "device=cpu"]).device == "cpu"
    monkeypatch.setenv("RANK", "1")
    train._invite_to_verify(trainer, "digits", [], [])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["digts"], "did you mean digits?"),
        (["nowhere.yaml"], "no such file"),
        (["nowhere.py:Task"], "no such file"),
        (["mine.py"], "no class is named"),
        (["mine.py:Nine"], "the file has: Mine, Unfinished, Broken, Exits, "),
        (["mine.py:Unfinished"], "lacks loss, train_data"),
        (["mine.py:Mine", "task.widht=3"], "did you mean width?"),
        (["toy", "optim.name=Adamw"], "did you mean AdamW?"),
        (["toy", "optim.args.momentun=0.9"], "takes no argument 'momentun'"),
        (["toy", "batch.micro=100"], "micro (100) is above global (50)"),
        (["toy", "train.epochs=many"], "train.epochs: 'many'"),
        (["toy", "nonsense"], "'nonsense' is not key=value"),
        (["toy", "--nproc", "zero"], "'zero' is not a number of ranks"),
        (["image_folder"], "needs data.train"),
        (["toy", "data.train=zzz"], "data.train: Toy has no use for 'zzz'"),
        (["mine.py:Mine", "data.eval=zzz"], "give the constructor a parameter 'eval'. Mine takes: width"),
        (["toy", "name=../../evil"], "name: '../../evil' cannot be the name of a folder in runs/"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(call, arguments, expected):
    done = call("train", *arguments)
    assert done.exit_code == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("nproc", "warned"), [("1", False), ("3", False), ("4", True), ("100", True)])
def test_more_ranks_than_cores_are_warned_of_in_one_line(monkeypatch, capsys, nproc, warned):
    monkeypatch.setattr(local_ranks.os, "sched_getaffinity", lambda _: {0, 2, 5})
    assert local_ranks.ranks_of(nproc) == int(nproc)
    told = capsys.readouterr().err
    assert told == (
        f"warning: {nproc} ranks on 3 CPU cores slow each other down; --nproc 3 gives each rank a core\n"
        if warned
        else ""
    )


@pytest.mark.parametrize(
    ("command", "rest"),
    [("train", "starts again"), ("run", "starts again"), ("predict", "starts from the beginning")],
)
def test_a_stopped_command_says_what_the_same_command_does(monkeypatch, capsys, command, rest):
    monkeypatch.setattr("sys.argv", ["lockstep", command, "run"])
    with pytest.raises(typer.Exit), reporting(debug=False):
        raise Preempted("stopped before training began; nothing was lost")
    said = capsys.readouterr().err
    assert said.endswith(f"the same command {rest}\n")
    assert ("before training" in said) == (command != "predict")


def test_ranks_get_the_options_that_were_given():
    options = {
        "--fresh": True,
        "--debug": False,
        "--profile": None,
        "--top-k": 0,
        "--out": Path("a b"),
        "--key": ["x", "y"],
    }
    assert as_arguments(options) == ["--fresh", "--top-k", "0", "--out", "a b", "--key", "x", "--key", "y"]


def test_all_errors_are_told_at_once(call):
    done = call("train", "digits", "optim.lrr=1", "train.epochs=x", "task.chanels=3", "seeed=1")
    for expected in ("optim.lr?", "train.epochs", "task.channels?", "did you mean seed?"):
        assert expected in done.stderr


def test_missing_data_exits_with_1_and_names_the_folder(call, tmp_path):
    done = call("train", "image_folder", "data.train=./nowhere")
    assert done.exit_code == 1
    assert "nowhere: no such file or folder" in done.stderr
    (tmp_path / "empty" / "cats").mkdir(parents=True)
    # The failed start trained nothing, so its directory is free for another config.
    assert "cats: a class folder has no images" in call("train", "image_folder", "data.train=./empty").stderr


def test_debug_shows_the_traceback_of_a_known_error(call):
    assert "Traceback" in call("train", "digts", "--debug").stderr


def test_what_is_no_run_directory_is_said_so(call):
    done = call("evaluate", "runs/none")
    assert done.exit_code == 2
    assert "not a run directory" in done.stderr


def test_run_without_checkpoint_cannot_be_evaluated(call, tmp_path):
    call("train", "toy", "train.steps=2")
    for path in (tmp_path / "runs" / "toy" / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    done = call("evaluate", "runs/toy")
    assert done.exit_code == 1
    assert "no checkpoint" in done.stderr


def test_checkpoints_are_listed_checked_and_pruned(call, tmp_path):
    assert (
        call(
            "train",
            "toy",
            "train.steps=8",
            "checkpoint.every_steps=2",
            "checkpoint.keep_last=4",
            "log.writers=[text_log,json_lines]",
        ).exit_code
        == 0
    )
    listed = call("checkpoints", "runs/toy", "--check")
    assert listed.exit_code == 0
    rows = listed.stdout.splitlines()
    assert [row.split()[0] for row in rows] == [f"step-0000000{step}" for step in (8, 6, 4, 2)]
    assert all("kept: last" in row and row.endswith("valid") for row in rows)
    path = tmp_path / "runs" / "toy" / "checkpoints" / "step-00000008" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    damaged = call("checkpoints", "runs/toy", "--check")
    assert damaged.exit_code == 3
    assert "DAMAGED: __0_0.distcp has" in damaged.stdout.splitlines()[0]
    assert call("checkpoints", "runs/toy").exit_code == 0
    config = tmp_path / "runs" / "toy" / "config.yaml"
    config.write_text(config.read_text().replace("keep_last: 4", "keep_last: 1"))
    pruned = call("checkpoints", "runs/toy", "--prune")  # keeps 8, the last, and 6, the last valid one
    assert [line for line in pruned.stdout.splitlines() if line.startswith("deleted")] == [
        "deleted step-00000004",
        "deleted step-00000002",
    ]
    assert call("checkpoints", "nowhere").exit_code == 2


@pytest.mark.exhaustive
def test_export_writes_weights_that_load_without_lockstep(call, tmp_path):
    import torch
    from safetensors.torch import load_file

    assert call("train", "mine.py:Mine", "train.steps=2", "log.writers=[text_log,json_lines]").exit_code == 0
    done = call("export", "runs/mine", "out")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out" / "model.safetensors")
    *told, last = done.stderr.splitlines()
    assert told[-1].endswith("the weights need the code of the model: UsageError: Task.predict: Mine has no predict")
    assert (
        last == "next, in Python: from safetensors.torch import load_file; weights = load_file('out/model.safetensors')"
    )
    assert (tmp_path / "out" / "source").is_dir()
    assert {name: tuple(tensor.shape) for name, tensor in load_file("out/model.safetensors").items()} == {
        "weight": (1, 4),
        "bias": (1,),
    }
    assert call("export", "runs/mine", "all.pt", "--optimizer").stdout.strip() == str(tmp_path / "all.pt")
    assert torch.load("all.pt", weights_only=True)["optimizer"]["param_groups"][0]["param_names"] == ["weight", "bias"]
    again = call("export", "runs/mine", "out")
    assert again.exit_code == 2
    assert "is an earlier export" in again.stderr
