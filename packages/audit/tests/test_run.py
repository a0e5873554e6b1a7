"""`lockstep-audit` as people call it: exit codes, the report, and the end of a script that hangs."""

import json
import subprocess
import sys

import pytest
from packages.audit.tests.processes import HANG_S, ROOT, environment

from packages.audit.tests.test_pages import END, LINES, PRELUDE

RANK_0_WAITS = (
    PRELUDE + "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    import time\n    time.sleep(10_000)\n"
)


def audit(script, *options):
    command = [sys.executable, "-m", "lockstep_audit.command", "--nproc", "2", *options, str(script)]
    run = {"capture_output": True, "text": True, "timeout": HANG_S, "cwd": script.parent, "env": environment()}
    return subprocess.run(command, **run)


def test_a_fault_is_named_with_its_line_and_the_exit_code_is_1(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + LINES["LS101"][0] + END)
    done = audit(script, "--format", "json", "--output", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert done.returncode == 1, done.stdout + done.stderr
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
    assert (done.returncode, "rank 0" in done.stdout) == (4, True), done.stdout + done.stderr


def test_a_script_that_is_not_there_is_an_error_of_usage(tmp_path):
    done = audit(tmp_path / "none.py")
    assert done.returncode == 2
    assert "none.py" in done.stderr


@pytest.mark.exhaustive
def test_uneven_ranks_that_join_are_right_without_a_loader_too():
    done = audit(ROOT / "packages/audit/tests/scripts/with_join.py")
    assert (done.returncode, "0 errors" in done.stdout) == (0, True), done.stdout + done.stderr
