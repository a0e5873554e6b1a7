"""`lockstep config`."""

import pytest
from typer.testing import CliRunner

from lockstep.cli import application as cli
from lockstep.cli import config_text
from lockstep.configs import config_file
from tests.selection import mainly


@pytest.mark.parametrize("recipe", mainly(["digits", "imagenet_88", "text"], sorted(config_file.recipes())))
def test_the_printed_config_is_the_config(tmp_path, recipe):
    overrides = ["optim.lr=1e-8", "seed=3"]
    text = config_text.resolved(recipe, overrides)
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    assert config_file.load(str(path)) == config_file.load(recipe, overrides)
    assert max(map(len, text.splitlines())) < 180


def test_each_value_says_where_it_comes_from(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: digits\ntrain: {epochs: 4}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\noptim: {lr: 0.5}\n")
    mine = str(tmp_path / "mine.yaml")
    lines = [line.strip() for line in config_text.resolved(mine, ["seed=7"], explained=False).splitlines()]
    source = {line.split(":")[0]: line.rpartition("# ")[2] for line in lines if "# " in line}
    assert source["seed"] == "command line"
    assert source["lr"] == mine
    assert source["epochs"] == str(tmp_path / "base.yaml")
    assert source["clip_norm"].endswith("recipes/digits.yaml")
    assert source["gamma"] == "default"


def test_the_values_of_a_preset_say_so():
    lines = config_text.resolved("digits", ["precision=bf16"], preset="p3", explained=False).splitlines()
    source = {line.strip().split(":")[0]: line.rpartition("# ")[2] for line in lines if "# " in line}
    assert lines[0] == "# lockstep train digits precision=bf16 --preset p3"
    assert source["workers"] == source["micro"] == "preset p3"
    assert source["precision"] == "command line"
    assert source["strategy"] == "default"  # the preset has the same value


def test_a_value_that_suits_the_task_says_so():
    text = config_text.resolved("text", ["data.train=x.csv", "task.model=y"], explained=False)
    assert "# suits the task" in text


def test_only_the_recipes_of_texts_take_values_from_their_kind_of_task():
    """Its comment says so. A reader of another recipe sees all that is not the plain default."""
    suited = [name for name in config_file.recipes() if "# suits the task" in config_text.resolved(name, ())]
    assert suited == ["lm", "text"]


def test_the_command_prints_the_meaning_of_each_key():
    done = CliRunner().invoke(cli.app, ["config", "digits", "optim.lr=1e-3"])
    assert done.exit_code == 0, done.stderr
    assert "# Largest norm" in done.stdout or "clip_norm" in done.stdout
    assert "lr: 0.001" in done.stdout
    wrong = CliRunner().invoke(cli.app, ["config", "digits", "optim.lrr=1e-3"])
    assert wrong.exit_code == 2
    assert "did you mean" in wrong.stderr
    close = CliRunner().invoke(cli.app, ["config", "digits", "optim={lr:0.1}"])
    assert "YAML needs a space after a colon" in close.stderr


def test_the_version_is_shown():
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.stdout.startswith("lockstep ")
