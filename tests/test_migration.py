"""`lockstep init`: the first task and the examples of the migration pages train, with the keys that the pages give."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli.application import app
from lockstep.cli.init import Library, page
from lockstep.configs import config_file
from lockstep.trainer import user_exit
from lockstep_recipes.tasks.lm.options import LmOptions
from tests import examples_of_loops
from tests.selection import mainly

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["device=cpu", "log.writers=[json_lines]", "log.pictures=0", "log.model_summary=false"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def train(target, *keys):
    """What a short training logs."""
    return Trainer(config_file.load(target, [*keys, *QUICK]), run_dir="run", fresh=True, quiet=True).fit()


def test_the_first_task_trains_with_the_commands_that_it_names(call, tmp_path):
    done = call("init", "first.py")
    assert done.exit_code == 0, done.output
    assert "lockstep train first.py:MyTask" in done.stdout
    text = (tmp_path / "first.py").read_text()
    assert "lockstep verify first.py:MyTask" in text
    assert "FILE.py" not in text
    results = train("first.py:MyTask", "train.epochs=2", "train.eval_every_epochs=1", "optim.lr=0.01")
    assert results["eval/accuracy"] > 0.9


def test_a_file_that_exists_is_left_alone(call, tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    for arguments in (["mine.py"], ["--from", "ddp", "--out", "mine.py"]):
        done = call("init", *arguments)
        assert done.exit_code == 2
        assert "mine.py: exists: it is not overwritten" in done.stderr
    assert (tmp_path / "mine.py").read_text() == "x = 1\n"


TASKS = [library for library in Library if library is not Library.PLAIN]
"""The pages whose example is a task. `test_docs_loop.py` tests the page of a plain loop."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nothing to write"),
        (["task.txt"], "call it task.py"),
        (["nowhere/task.py"], "nowhere/task.py: cannot be written"),
        (["task.py", "--out", "page.md"], "--out: has no meaning without --from"),
        (["--from", "keras"], "lightning"),
    ],
)
def test_wrong_usage_is_told(call, arguments, expected):
    done = call("init", *arguments)
    assert done.exit_code == 2
    assert expected in done.stderr


def test_the_first_task_learns_with_the_command_that_is_printed(call, tmp_path):
    said = call("init", "my_task.py").stdout
    target, *keys = shlex.split(re.search(r"lockstep train (.*)", said)[1])
    results = train(target, *(key for key in keys if "=" in key))
    losses = [
        json.loads(line).get("train/loss") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.4 * losses[0], losses
    assert results["eval/accuracy"] > 0.9


@pytest.mark.parametrize("library", mainly(["ddp", "lightning"], TASKS))
def test_the_example_of_a_page_trains_with_the_command_of_the_page(call, tmp_path, library):
    done = call("init", "--from", library.value, "--out", "page.md")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.md").read_text()
    assert call("init", "--from", library.value).stdout == text == page(library)
    code = text.partition("## After")[2].partition("```python\n")[2].partition("```")[0]
    (command,) = re.findall(r"^    lockstep train (.*)$", text, re.MULTILINE)
    target, *keys = shlex.split(command)
    (tmp_path / target.partition(":")[0]).write_text(code)
    keys = [key for key in keys if "=" in key and not key.startswith("train.epochs")]
    results = train(target, *keys, "train.epochs=1")
    assert results["train/loss"] > 0
    assert ("eval/loss" in results) == any(key.startswith("train.eval") for key in keys)


def loop_of(library):
    """The code of the first diff of a page, as it is after the change."""
    diff = page(library).partition("```diff\n")[2].partition("```")[0].splitlines()
    return "\n".join(line[1:] for line in diff if line[0] in "+ ")


def test_the_loop_of_a_page_trains(tmp_path, monkeypatch):
    pages = [library for library in TASKS if library is not Library.TRANSFORMERS]
    assert len(pages) == 4
    for library in pages:
        (tmp_path / library.value).mkdir()
        monkeypatch.chdir(tmp_path / library.value)
        torch.manual_seed(0)
        names = vars(examples_of_loops).copy()
        names["train"], names["eval_loader"] = examples_of_loops.train_data(library.value)
        exec(loop_of(library), names)
        user_exit.close_open()
        loop, model = names["loop"], names["model"]
        assert loop.step == 3 * 2, library  # epochs of 128 samples
        assert all(parameter.isfinite().all() for parameter in model.parameters()), library
        if library is Library.ACCELERATE:
            assert 0 <= loop.results["script/accuracy"] <= 1
        else:
            assert set(torch.load("model.pt")) == set(examples_of_loops.make_model().state_dict()), library
        assert loop.results["train/loss"] > 0


def keys_of(text):
    """(key, value) pairs in the code of a page: `optim.lr=1e-3`, and keys without a value."""
    sections = "batch|checkpoint|compute|data|log|optim|parallel|schedule|train"
    for code in re.findall(r"`([^`]+)`", text.replace("```", "")):
        for word in shlex.split(code) if "=" in code or "." in code else ():
            if re.match(rf"({sections}|seed|precision)(\.[a-z_.]+)?=", word) and not word.endswith(
                ("=B", "=W", "[...,")
            ):
                yield word
            elif re.fullmatch(rf"({sections})\.[a-z_]+", word):
                yield f"{word}="


@pytest.mark.parametrize("library", TASKS)
def test_every_key_in_the_table_of_a_page_is_a_key_of_the_config(library):
    table = [row.strip(" |").split(" | ") for row in page(library).splitlines() if row.startswith("| ")][1:]
    assert all(len(row) == 2 for row in table)
    found = [key for _, ours in table for key in keys_of(ours)]
    assert len(found) > 10
    everything = config_file.parse({}, needs_task=False).model_dump(by_alias=True)
    for key in found:
        name, _, value = key.partition("=")
        place = everything
        for part in name.split("."):
            assert part in place or name.startswith("optim.args."), key
            place = place.get(part) or {}
        if value and "my_file.py" not in value:
            data = ["train.eval_every_epochs=1"] if "stop_when" in name or "keep_best" in name else []
            config_file.load("toy", [*data, key])


def test_every_option_of_language_models_in_a_table_is_one():
    text = page(Library.TRANSFORMERS).partition("## From programs for language models")[2].partition("## Before")[0]
    tables = [row.strip(" |").split(" | ")[1] for row in text.splitlines() if row.startswith("| ") and " | " in row]
    found = {word for ours in tables for code in re.findall(r"`([^`]+)`", ours) for word in shlex.split(code)}
    found = sorted(word for word in found if re.match(r"(task|optim|schedule|batch|compute|train|parallel)\.", word))
    assert len(found) > 30
    options = set(LmOptions.model_fields)
    for word in found:
        key, _, value = word.partition("=")
        assert not key.startswith("task.") or key.split(".")[1] in options, word
        if value and not value.startswith("NAME"):
            config_file.load("lm", [word])


@pytest.mark.parametrize("name", ["digits_task.py:Digits", "masked_task.py:Masked"])
def test_the_examples_train(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert train(f"{ROOT}/examples/{name}", "train.steps=2")["train/loss"] > 0


def test_every_command_has_an_example():
    from typer.main import get_command

    commands = get_command(app).commands
    assert {
        name for name, command in commands.items() if not (command.epilog or "").startswith("Example: lockstep")
    } == set()
    assert {name for name, command in commands.items() if name not in command.epilog} == set()
