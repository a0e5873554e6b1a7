"""`lockstep audit` is the command of another package, if that is installed."""

import os
import sys

import pytest
from typer.testing import CliRunner

import lockstep
import lockstep_audit
from lockstep.cli.application import app
from lockstep_audit import command


def call(*words):
    return CliRunner().invoke(app, ["audit", *words])


def test_all_words_and_the_exit_code_are_those_of_the_package(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "main", lambda given, name: seen.append((given, name)) or 3)
    words = ["--nproc", "4", "-v", "--no-probe", "--patience=9", "-m", "package.train", "--lr", "1", "--help"]
    assert call(*words).exit_code == 3
    assert seen == [(words, "lockstep audit")]


def test_both_commands_say_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)
    for words in (["--help"], ["--evry", "3"], ["--format", "html"], [str(tmp_path / "none.py")], []):
        with pytest.raises(SystemExit) as ended:
            sys.exit(command.main(words, name="lockstep audit"))
        told = capsys.readouterr()
        done = call(*words)
        assert (done.exit_code, done.stdout, done.stderr) == (ended.value.code, told.out, told.err), words
        assert done.exit_code == (0 if words == ["--help"] else 2), words
    assert "--write-baseline" in call("--help").stdout


def test_without_the_package_the_command_says_how_to_install_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lockstep_audit"]:
        monkeypatch.delitem(sys.modules, name)
    places = [one for one in sys.path if not os.path.isdir(os.path.join(one, "lockstep_audit"))]
    monkeypatch.setattr(sys, "path", places)
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if "editable" not in repr(one).lower()])
    done = call("--help")
    assert (done.exit_code, f"pip install torch-lockstep-audit=={lockstep.__version__}" in done.stderr) == (2, True)


def test_another_version_of_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(lockstep_audit, "__version__", "0.0.9")
    done = call("train.py")
    assert done.exit_code == 2
    assert "torch-lockstep-audit is 0.0.9" in done.stderr
    assert f"pip install torch-lockstep-audit=={lockstep.__version__}" in done.stderr
