"""A user's own file on the command line: how it is imported, what it may return, what goes wrong in it, and when it
is edited."""

import csv
import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from tests.selection import mainly
from tests.users_file import OWN


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_own_task_trains_and_takes_keys(call):
    done = call("train", "mine.py:Mine", "task.width=6", "train.steps=3")
    assert done.exit_code == 0, done.stderr
    assert "7 parameters" in done.stdout
    assert "step 3/3" in done.stdout


def not_json(text):
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.exhaustive
def test_outputs_of_any_kind_are_printed_and_written_whole(call):
    import numpy as np
    from safetensors.torch import load_file

    assert call("train", "mine.py:Outputs", "train.steps=1", "log.writers=[text_log,json_lines]").exit_code == 0
    results = json.loads(call("evaluate", "runs/mine").stdout, parse_constant=not_json)
    assert results["eval/loss"] is None
    rows = [json.loads(line)["output"] for line in call("predict", "runs/mine").stdout.splitlines()]
    inputs = [[0.0, 0.125, 0.25, 0.375], [0.5, 0.625, 0.75, 0.875], [1.0, 1.125, 1.25, 1.375]]
    assert rows == [{"half": one, "both": [one * 500, None], "array": one} for one in inputs]
    for name in ("out.csv", "out.npz", "out.safetensors"):
        done = call("predict", "runs/mine", "--out", name)
        assert done.exit_code == 0, done.stderr
        assert done.stderr.startswith(f"3 predictions: {name}")
    assert "left out: truth, output/both/1" in done.stderr
    with open("out.csv", newline="") as file:
        assert [json.loads(row["output/both"]) for row in csv.DictReader(file)] == [[one * 500, None] for one in inputs]
    arrays, tensors = np.load("out.npz"), load_file("out.safetensors")
    assert arrays["output/both/0"].shape == tuple(tensors["output/both/0"].shape) == (3, 2000)
    assert (
        arrays["output/half"].tolist() == tensors["output/half"].tolist() == arrays["output/array"].tolist() == inputs
    )
    assert call("predict", "runs/mine", "--out", "out.pickle").exit_code == 2


def test_fault_in_a_users_code_shows_where_without_library_frames(call):
    done = call("train", "mine.py:Broken", "train.steps=3")
    assert done.exit_code == 1
    assert "KeyError: 'no such thing'" in done.stderr
    assert "mine.py" in done.stderr
    assert "site-packages" not in done.stderr
    assert "site-packages" in call("train", "mine.py:Broken", "train.steps=3", "--debug").stderr


EXITS = [(where, code) for where in ("model", "train_data", "prepare", "loss") for code in (0, 3, "bye", None)]


@pytest.mark.parametrize(("where", "code"), mainly([("train_data", None), ("prepare", "bye")], EXITS))
def test_exit_in_a_users_code_is_a_failure_that_says_where(call, tmp_path, where, code):
    done = call(
        "train",
        "mine.py:Exits",
        f"task.where={where}",
        f"task.code={json.dumps(code)}",
        "train.steps=3",
        "log.writers=[text_log,json_lines]",
    )
    assert done.exit_code == 1
    assert "mine.py:31, in exit: the task called sys.exit(" in done.stderr
    assert repr(code) in done.stderr or code is None
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").rglob("manifest.json"))


@pytest.mark.parametrize(
    ("command", "where"),
    mainly(
        [("evaluate", "loss")],
        [("evaluate", "loss"), ("predict", "predict"), ("predict", "describe"), ("export", "model")],
    ),
)
def test_exit_after_training_is_a_failure_too(call, tmp_path, command, where):
    assert (
        call(
            "train", "mine.py:Exits", "task.where=nowhere", "train.steps=1", "log.writers=[text_log,json_lines]"
        ).exit_code
        == 0
    )
    config = tmp_path / "runs" / "mine" / "config.yaml"
    config.write_text(config.read_text().replace("where: nowhere", f"where: {where}"))
    done = call(command, "runs/mine", *(["out"] if command == "export" else []))
    assert done.exit_code == 1
    assert "in exit: the task called sys.exit(0)" in done.stderr


def test_exit_while_a_users_file_is_imported_is_a_failure(call, tmp_path):
    (tmp_path / "script.py").write_text(
        OWN + "\nimport argparse\nargparse.ArgumentParser().parse_args(['--unknown'])\n"
    )
    done = call("train", "script.py:Mine")
    assert done.exit_code == 1
    assert f"script.py:{len(OWN.splitlines()) + 3}, in <module>: the task called sys.exit(2)" in done.stderr


def test_syntax_error_in_a_users_file_names_the_line_alone(call, tmp_path):
    (tmp_path / "mine.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("first = 1\nclass Mine(Task)\n")
    done = call("train", "mine.py:Mine")
    assert done.exit_code == 2
    assert f"error: {tmp_path / 'helper.py'}:2: is not valid Python: expected ':': class Mine(Task)" in done.stderr
    assert "Traceback" not in done.stderr


def test_parameters_that_cannot_be_trained_are_refused_by_name(call):
    lazy, sparse = (call("train", f"mine.py:{name}", "train.steps=3") for name in ("Lazy", "Sparse"))
    assert (lazy.exit_code, sparse.exit_code) == (1, 1)
    assert (
        "Task.model: the model is not complete: 0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean get a shape only"
        in lazy.stderr
    )
    assert "Task.model: words, bags would have sparse gradients" in sparse.stderr
    assert "sparse=False" in sparse.stderr
    assert "Traceback" not in lazy.stderr + sparse.stderr


def test_data_keys_reach_a_constructor_that_takes_any(call):
    done = call(
        "train", "mine.py:Loads", "data.train=a", "data.eval=b", "train.steps=1", "log.writers=[text_log,json_lines]"
    )
    assert done.exit_code == 0, done.stderr
    assert "loads a {'eval': 'b'}" in done.stdout


RELATIVE = (
    "from .util import width\nfrom mine import Mine\nclass Here(Mine):\n"
    "    def __init__(self):\n        super().__init__(width)\n"
)


def test_file_of_a_package_may_import_from_it(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "lab" / "tasks_of_mine"
    package.mkdir(parents=True)
    (tmp_path / "lab" / "rich").mkdir()
    (tmp_path / "lab" / "rich" / "__init__.py").write_text("")  # beside the package: it must hide no library
    (package / "util.py").write_text("width = 5\n")
    (package / "first.py").write_text(RELATIVE)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ["train.steps=1", "log.writers=[text_log,json_lines]"]
    done = call("train", "lab/tasks_of_mine/first.py:Here", *settings)
    assert done.exit_code == 2
    assert f"put an empty __init__.py into {package}" in done.stderr
    (package / "__init__.py").write_text("")
    done = call("train", "lab/tasks_of_mine/first.py:Here", *settings)
    assert done.exit_code == 0, done.stderr
    assert "6 parameters" in done.stdout
    (package / "first.py").write_text(RELATIVE.replace("(width)", "(width + 1)"))
    edited = call("train", "lab/tasks_of_mine/first.py:Here", *settings, "--fresh")
    assert "7 parameters" in edited.stdout  # not what Python remembers of the file


def test_package_with_the_name_of_another_is_told_so(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").write_text("")
    (tmp_path / "yaml" / "first.py").write_text(RELATIVE)
    (tmp_path / "yaml" / "second.py").write_text(OWN)
    done = call("train", "yaml/first.py:Here")
    assert done.exit_code == 2
    assert f"give the folder {tmp_path / 'yaml'} another name: Python finds " in done.stderr
    assert call("train", "yaml/second.py:Mine", "train.steps=1", "log.writers=[text_log,json_lines]").exit_code == 0


# ---- the task's source


@pytest.fixture
def edited(call, tmp_path, monkeypatch):
    """A run of four steps of a task whose helper, in another file, is edited afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("losses", "lockstep_user_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loss = OWN.replace("(model(batch[0]) - batch[1]).square().sum()", "squared(model(batch[0]), batch[1])")
    (tmp_path / "mine.py").write_text(f"from losses import squared\n{loss}")
    (tmp_path / "losses.py").write_text(
        "def squared(one, other):\n    # of the difference\n    return (one - other).square().sum()\n"
    )
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=4").exit_code == 0
    yield lambda old, new: (tmp_path / "losses.py").write_text((tmp_path / "losses.py").read_text().replace(old, new))
    sys.modules.pop("losses", None)


SHORT = ["log.writers=[text_log,json_lines]", "optim.lr=0.001"]
CHANGED = "losses.py differs in 1 place, first in squared (from line 1): now "


def test_source_of_a_task_is_kept_with_the_run(call, tmp_path, edited):
    kept = tmp_path / "runs" / "mine" / "source"
    assert sorted(path.name for path in kept.iterdir()) == ["losses.py", "mine.py"]
    assert (kept / "losses.py").read_text() == (tmp_path / "losses.py").read_text()
    about = json.loads((tmp_path / "runs" / "mine" / "environment.json").read_text())
    assert len(about["task"]) == 64
    assert about["git"] is None
    edited("# of the difference", "# comments are free")
    again = call("train", "mine.py:Mine", *SHORT, "train.steps=5")
    assert again.exit_code == 0, again.stderr
    assert "comments are free" in (kept / "losses.py").read_text()
    assert json.loads((tmp_path / "runs" / "mine" / "environment.json").read_text())["task"] == about["task"]


@pytest.mark.exhaustive
def test_copied_run_is_used_with_the_kept_source_where_the_tasks_file_is_not_there(call, tmp_path, edited):
    (tmp_path / "runs" / "mine").rename(tmp_path / "copied")
    for name in ("mine.py", "losses.py"):
        (tmp_path / name).unlink()
    for name in ("losses", "lockstep_user_mine"):
        sys.modules.pop(name, None)
    for command in (["evaluate", "copied"], ["predict", "copied"], ["export", "copied", "out"]):
        done = call(*command)
        assert done.exit_code == 0 or "Task.eval_data: there is no evaluation data" in done.stderr  # for this task
        assert "mine.py is not there: the task's code is taken from copied/source/mine.py" in done.stderr
        assert "has changed" not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("steps", mainly([8], [4, 8]))
def test_edited_task_is_refused_with_the_difference_also_where_the_run_is_complete(call, tmp_path, edited, steps):
    edited("square()", "abs()")
    done = call("train", "mine.py:Mine", *SHORT, f"train.steps={steps}")
    assert done.exit_code == 2
    assert f"runs/mine: the task's code has changed since the run began: {CHANGED}" in done.stderr
    assert '"return (one - other).abs().sum()", before "return (one - other).square().sum()"' in done.stderr
    assert "--allow-change task" in done.stderr
    assert "resuming" not in done.stdout
    assert "square" in (tmp_path / "runs" / "mine" / "source" / "losses.py").read_text()


def test_edited_task_may_be_allowed_is_told_and_is_the_runs_from_then_on(call, tmp_path, edited):
    edited("square()", "abs()")
    evaluated = call("export", "runs/mine", "out")
    assert evaluated.exit_code == 0
    assert f"warning: the task's code has changed since the run was trained: {CHANGED}" in evaluated.stderr
    allowed = call("train", "mine.py:Mine", *SHORT, "train.steps=6", "--allow-change", "task")
    assert allowed.exit_code == 0, allowed.stderr
    assert f"warning: the task's code has changed: {CHANGED}" in allowed.stdout
    assert f"warning: the task's code has changed: {CHANGED}" in (tmp_path / "runs" / "mine" / "train.log").read_text()
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=8").exit_code == 0
    edited("abs()", "square()")
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=9").exit_code == 2
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=2", "--fresh").exit_code == 0


def test_task_without_a_checkpoint_may_change(call, tmp_path, edited):
    shutil.rmtree(tmp_path / "runs" / "mine" / "checkpoints")
    edited("square()", "abs()")
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=2").exit_code == 0
    assert "abs" in (tmp_path / "runs" / "mine" / "source" / "losses.py").read_text()


def test_run_from_before_sources_were_kept_goes_on(call, tmp_path, edited):
    shutil.rmtree(tmp_path / "runs" / "mine" / "source")
    edited("square()", "abs()")
    assert call("train", "mine.py:Mine", *SHORT, "train.steps=5").exit_code == 0
    assert "abs" in (tmp_path / "runs" / "mine" / "source" / "losses.py").read_text()
