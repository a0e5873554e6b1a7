"""The pytest fixture `lockstep_audit`: a test fails with the report of the audit of a script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep_audit.judge import FINDINGS


@pytest.fixture
def lockstep_audit(tmp_path: Path) -> Callable[..., str]:
    """Run a script on several ranks under `lockstep-audit`.

    Call it with the script, its arguments, and `nproc` and `strict` as keywords. It returns the report. The test fails
    if the exit code is not 0: a finding (with `strict` also a warning), a failed script, a hang, no optimizer step.
    """

    def audit(
        script: str | Path, *arguments: object, nproc: int = 2, strict: bool = False, patience: float = 60
    ) -> str:
        report = tmp_path / "lockstep-audit.txt"
        command = [sys.executable, "-m", "lockstep_audit.command", "--nproc", str(nproc), "--patience", str(patience)]
        command += ["--output", str(report), *["--strict"] * strict, str(script), *map(str, arguments)]
        done = subprocess.run(command, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = report.read_text(encoding="utf-8") if report.exists() else ""
        if done.returncode:
            last = "" if text and done.returncode == FINDINGS else "\n".join(done.stdout.splitlines()[-40:]) + "\n"
            pytest.fail(f"lockstep-audit ended with exit code {done.returncode}\n{last}{text}", pytrace=False)
        return text

    return audit
