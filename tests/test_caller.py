"""Errors name arguments of `Trainer` to a script, and options to a command; a run has the name of its script."""

import sys
from types import SimpleNamespace

import pytest

from lockstep import RunConfig, Trainer
from lockstep.configs import config_file
from lockstep.core import caller
from lockstep.core.errors import LockstepError, UsageError
from tests import own_tasks, runs


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("start again with --fresh", "start again with Trainer(fresh=True)"),
        ("choose another place with --run-dir", "choose another place with Trainer(run_dir=...)"),
        ("a shared file system: --run-dir DIR", "a shared file system: Trainer(run_dir=...)"),
        ("or give --run-dir /data/runs/a.", 'or give Trainer(run_dir="/data/runs/a").'),
        ("--allow-change data to go on", 'Trainer(allow_change=["data"]) to go on'),
        ("--allow-change optim.lr.", 'Trainer(allow_change=["optim.lr"]).'),
        ("--allow-change KEY to go on", "Trainer(allow_change=[...]) to go on"),
        ("use --nproc 1, or device=cpu", "use fit(nproc=1), or device=cpu"),
        ("give --force to replace the file", "give force=True to replace the file"),
        ("lockstep export --optimizer writes all", "Trainer.export_training_state(file) writes all"),
        ("iconv --fresh-air", "iconv --fresh-air"),
    ],
)
def test_options_become_arguments_unless_a_command_asks(option, argument):
    assert caller.words(option) == argument
    assert caller.words(argument) == argument
    with caller.command():
        assert caller.words(option) == option


def test_an_error_that_leaves_the_trainer_speaks_python(tmp_path):
    def train(**changes):
        Trainer(runs.config(**changes), run_dir=tmp_path / "run", quiet=True).fit(own_tasks.Plain())

    train(train={"steps": 2})
    with pytest.raises(LockstepError, match="a different config") as caught:
        train(train={"steps": 2}, seed=5)
    assert "Trainer(allow_change=[...])" in caught.value.remedy
    assert "Trainer(fresh=True)" in str(caught.value)
    assert "--" not in str(caught.value)
    with caller.command(), pytest.raises(LockstepError, match="a different config") as caught:
        train(train={"steps": 2}, seed=5)
    assert "--fresh" in caught.value.remedy


def test_a_run_without_a_name_has_the_name_of_its_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/home/me/my first.try.py"))
    plain = {"batch": {"global": 10}, "train": {"steps": 2}}
    trainer = Trainer(plain)
    assert str(trainer.run_dir) == "runs/my_first.try"
    assert trainer.config.name == "my_first.try"
    assert str(Trainer(plain, run_dir="here").run_dir) == "here"
    assert str(Trainer({**plain, "name": "mine"}).run_dir) == "runs/mine"
    assert str(Trainer("digits").run_dir) == "runs/digits"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # a notebook
    assert str(Trainer(plain).run_dir) == "runs/run"
    trainer.fit(own_tasks.Plain())
    assert "the run directory is runs/my_first.try, named after the script" in capsys.readouterr().out


def test_keys_with_points_are_to_be_nested():
    for make in (lambda: RunConfig({"train.epochs": 3}), lambda: RunConfig(**{"train.epochs": 3})):
        with pytest.raises(UsageError, match=r"'train\.epochs' names a section") as caught:
            make()
        assert caught.value.remedy == "nest them: RunConfig(**{'train': {'epochs': 3}})"
    with pytest.raises(UsageError, match="takes keyword arguments"):
        RunConfig({"train": {"epochs": 3}})
    with pytest.raises(UsageError, match=r"train.epochs: unknown key; write sections as mappings: \{'train': \{'ep"):
        Trainer({"train.epochs": 3})


@pytest.mark.parametrize(
    ("key", "option"), [("run-dir=foo", "--run-dir foo"), ("run_dir=foo", "--run-dir foo"), ("nproc=2", "--nproc 2")]
)
def test_a_key_that_is_an_option_is_said_so(key, option):
    with pytest.raises(UsageError, match=f"it is an option: {option}"):
        config_file.load("toy", [key])
