"""`lockstep audit` is the command of another package, if that is installed."""

import os
import sys

import pytest
from typer.testing import CliRunner

import lockstep
import lockstep_audit
from lockstep.cli.application import app
from lockstep_audit import command, judge
from lockstep_audit.settings import Settings
from packages.audit.tests import forked


def call(*words):
    return CliRunner().invoke(app, ["audit", *words])


def test_all_words_and_the_exit_code_are_those_of_the_package(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "main", lambda given, name: seen.append((given, name)) or 3)
    words = ["--nproc", "4", "-v", "--no-probe", "--patience=9", "-m", "package.train", "--lr", "1", "--help"]
    for given in (words, ["--", "train.py", "--nproc", "2"], ["--strict", "--", "train.py"]):
        assert call(*given).exit_code == 3
        assert seen.pop() == (given, "lockstep audit")


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
    assert (
        done.exit_code,
        f"in the clone of Lockstep {lockstep.__version__}: pip install -e packages/audit" in done.stderr,
    ) == (2, True)


def test_another_version_of_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(lockstep_audit, "__version__", "0.0.9")
    done = call("train.py")
    assert done.exit_code == 2
    assert "torch-lockstep-audit is 0.0.9" in done.stderr
    assert f"in the clone of Lockstep {lockstep.__version__}: pip install -e packages/audit" in done.stderr


LOOP = """
import torch, lockstep
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loop = lockstep.Loop(model, optimizer, (torch.randn(8, 4),), global_batch=4, epochs=1, run_dir="run", quiet=True)
for step in loop:
    for (x,) in step:
        step.backward(loop.model(x).square().mean())
"""


def test_trial_steps_of_the_engine_do_not_count_as_steps_of_a_script(tmp_path):
    """The engine tries the optimizer before the first step, and also if the run is complete."""
    (tmp_path / "train.py").write_text(LOOP)
    for verdict, steps in ((judge.AuditVerdict.CLEAN, [0, 1]), (judge.AuditVerdict.INCONCLUSIVE, [])):
        events = tmp_path / verdict.value
        arguments = (events, tmp_path / "train.py")
        [done] = forked.ended(
            [forked.start(forked.observed, *arguments, cwd=tmp_path, LOCKSTEP_AUDIT_JUDGED_OUTSIDE="1")]
        )
        assert done.returncode == 0, done.stderr
        history = judge._read(events)
        assert [event["index"] for event in history.of("step")] == steps
        assert judge.judge(events, Settings()) is verdict
