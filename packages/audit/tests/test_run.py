"""`lockstep-audit` as people call it: exit codes, the report, and the end of a script that hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from lockstep_audit import __main__ as module
from lockstep_audit import command, sessions
from lockstep_audit import run as run_module
from lockstep_audit.judge import FINDINGS, USAGE
from lockstep_audit.settings import JUDGED_OUTSIDE, Settings
from packages.audit.tests import lone
from packages.audit.tests.processes import HANG_S, ROOT, environment
from packages.audit.tests.test_pages import END, LINES, PRELUDE

RANK_0_WAITS = (
    PRELUDE + "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    import time\n    time.sleep(10_000)\n"
)
OTHERS = """
import importlib.util
for name in ("lockstep", "numpy", "typer", "pydantic", "yaml", "pytest"):
    if importlib.util.find_spec(name):
        print(name)
"""


def audit(script, *options, python=sys.executable, **variables):
    command = [python, "-m", "lockstep_audit.command", "--nproc", "2", *options, str(script)]
    run = {"capture_output": True, "text": True, "timeout": HANG_S, "cwd": script.parent}
    return subprocess.run(command, env=environment(**variables), **run)


@pytest.mark.exhaustive  # test_house.py checks its imports, test_doors.py its findings
def test_a_fault_is_named_with_its_line_where_only_torch_is_installed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + LINES["LS101"][0] + END)
    python = lone.environment(tmp_path / "environment")
    (tmp_path / "others.py").write_text(OTHERS)
    assert subprocess.check_output([python, tmp_path / "others.py"], env=environment(PYTHONPATH=""), text=True) == ""
    report = tmp_path / "report.json"
    done = audit(script, "--format", "json", "--output", str(report), python=python, PYTHONPATH="")
    found = {finding["rule"]: finding for finding in json.loads(report.read_text())["findings"]}
    assert done.returncode == FINDINGS, done.stdout + done.stderr
    assert "LS101" in found, done.stdout + done.stderr
    assert found["LS101"]["file"] == str(script)
    assert "# LS101" in script.read_text().splitlines()[found["LS101"]["line"] - 1]


@pytest.mark.exhaustive
def test_a_right_script_is_clean_and_the_exit_code_is_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + LINES["LS101"][1] + END)
    done = audit(script)
    assert (done.returncode, "0 errors" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.exhaustive
def test_a_script_that_hangs_is_ended_and_explained(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RANK_0_WAITS)
    done = audit(script, "--patience", "5")
    assert (done.returncode, "rank 0" in done.stdout) == (FINDINGS, True), done.stdout + done.stderr


def test_a_script_that_is_not_there_is_an_error_of_usage(tmp_path):
    done = audit(tmp_path / "none.py")
    assert done.returncode == USAGE
    assert "none.py" in done.stderr


@pytest.mark.exhaustive
def test_uneven_ranks_that_join_are_right_without_a_loader_too():
    done = audit(ROOT / "packages/audit/tests/scripts/with_join.py")
    assert (done.returncode, "0 errors" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_command_takes_its_options_then_the_script_and_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(command, "run", lambda target, settings, **how: seen.append((target, settings, how)) or 3)
    assert command.main(["--nproc=4", "--no-probe", "--patience", "9", "--strict", "-v", "t.py", "--nproc", "1"]) == 3
    assert command.main(["--format", "json", "--output", "report", "-m", "a.b", "-v"]) == 3
    assert command.main(["--", "-odd.py"]) == 3
    Path("report").write_text("an old one")
    assert command.main(["--force", "--output", "report", "t.py"]) == 3
    del seen[3:]
    (target, settings, how), (module, other, defaults), (odd, _, _) = seen
    assert (target, module, odd) == (["t.py", "--nproc", "1"], ["-m", "a.b", "-v"], ["-odd.py"])
    assert (settings.strict, settings.verbose, settings.format) == (True, True, "text")
    assert (other.strict, other.verbose, other.format, str(other.output)) == (False, False, "json", "report")
    assert how == {"nproc": 4, "folder": None, "every": 50, "patience": 9.0, "probe": False}
    assert defaults == {"nproc": 2, "folder": None, "every": 50, "patience": 60.0, "probe": True}


@pytest.mark.parametrize(
    ("text", "words", "right"),
    [
        ("", ["t.py", "--nproc", "2"], "--nproc 2 t.py"),
        ("", ["--strict", "t.py", "--lr", "1", "--format=json", "x"], "--strict --format=json t.py --lr 1 x"),
        ("", ["t.py", "--no-probe", "x"], "--no-probe t.py x"),
        ("'--write-baseline'", ["t.py", "--write-baseline", "x"], ""),
        ("write_baseline = 3", ["t.py", "--write-baseline", "x"], ""),
        ("", ["--strict", "--", "t.py", "--nproc", "2"], ""),
        ("", ["t.py", "--lr", "1", "-v"], ""),
        ("", ["-m", "t", "--nproc", "2"], ""),
    ],
)
def test_an_option_after_a_script_that_does_not_have_it_is_an_error_with_the_right_order(
    text, words, right, monkeypatch, tmp_path, capsys
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run", lambda *_, **__: 0)
    Path("t.py").write_text(text)
    assert command.main(words) == (USAGE if right else 0)
    kept = " ".join([*words[: words.index("t.py")], "--", *words[words.index("t.py") :]]) if right else ""
    remedy = f"write lockstep-audit {right}; if the script has it: lockstep-audit {kept}\n"
    assert (remedy in capsys.readouterr().err) == bool(right)


def test_torchrun_reads_no_argument_of_the_script(monkeypatch, tmp_path):
    """It knows abbreviations: `--nproc` could be two of its options, and `--start` would be one."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("")
    started = []
    monkeypatch.setattr(run_module.subprocess, "Popen", lambda command, **_: started.append(command) or 1 / 0)
    own = ["--nproc", "3", "--start", "x", "--log", "--role=a", "-m", "-r", "--", "--nnodes"]
    with pytest.raises(ZeroDivisionError):
        run_module.run(["t.py", *own], Settings(), nproc=2)
    options = get_args_parser().parse_args(started[0][3:])
    assert (options.module, options.training_script, options.nproc_per_node) == (True, "lockstep_audit", "2")
    seen = []
    monkeypatch.setattr(module, "run", lambda *given: seen.append(given))
    monkeypatch.setattr(module.boot, "activate", lambda *_, **__: None)
    monkeypatch.setattr(module.boot, "on_leave", [])
    monkeypatch.setattr(module.recorder, "is_main", False)
    monkeypatch.setenv(JUDGED_OUTSIDE, "1")
    module.main(options.training_script_args)
    assert seen == [(None, "t.py", own)]


def test_bad_options_are_errors_of_usage_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "run", lambda *_, **__: pytest.fail("it ran"))
    (there := tmp_path / "there.json").write_text("{}")
    for given, said in (
        (["--nproc", "0", "t.py"], "0 must be at least 1"),
        (["--every", "many", "t.py"], "invalid int value: 'many'"),
        (["--patience", "0.5", "t.py"], "0.5 must be at least 1"),
        (["--format", "html", "t.py"], "invalid choice: 'html'"),
        (["--evry", "3", "t.py"], "--evry: lockstep-audit has no such option"),
        (["--output", str(tmp_path / "none" / "report"), "t.py"], "cannot be written"),
        (["--output", str(tmp_path), "t.py"], "is a folder"),
        (["--output", str(there), "t.py"], "give --force to replace the file"),
        (["--write-baseline", str(there), "t.py"], "give --force to replace the file"),
        (["--baseline", str(tmp_path / "known.json"), "t.py"], "is not there"),
        (["--previous", str(tmp_path / "first"), "t.py"], "is not there"),
        (["--read", str(tmp_path)], "contains no events"),
    ):
        try:
            code = command.main(given)
        except SystemExit as ended:
            code = ended.code
        assert (code, said in (told := capsys.readouterr().err)) == (USAGE, True), (given, told)


def test_sessions_of_ranks_end_with_all_that_they_started():
    text = "import os, time; os.fork() or os.fork(); os.write(1, b'here\\n'); time.sleep(10_000)"
    started = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    assert [started.stdout.readline() for _ in range(3)] == [b"here\n"] * 3
    assert len(sessions._members({started.pid})) == 3
    sessions.end({started.pid}, HANG_S)
    started.wait()
    started.stdout.close()
    assert sessions._members({started.pid}) == []
