"""False alarms of `lockstep verify`: tasks that are right and unusual.

    .venv/bin/python benchmarks/false_alarms.py [NAME ...] [--nproc 2] [--timeout-s 240] [--checks a,b] [--full]

Each task of `tests/verify/unusual_models.py`, `unusual_losses.py` and `unusual_data.py` is verified by the command,
with all checks. A task names its overrides of the config in `overrides`. All tasks are right, so each fault is a false
alarm. So is a command that does not end. A line per task tells how many checks passed, which were not shown, and which
found a fault. The exit code is 1 where there was a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lockstep.core.task import Task  # noqa: E402
from tests.verify.unusual_tasks import arguments, tasks  # noqa: E402


def verify(task: type[Task], options: argparse.Namespace) -> tuple[list[dict[str, Any]], str, float]:
    """The checks of a verification, an error where there are none, and its seconds."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "verify", *arguments(task)]
        command += ["--nproc", str(options.nproc), "--run-dir", folder]
        command += [] if options.full else ["--quick"]
        command += ["--checks", options.checks] if options.checks else []
        # A session of its own, so that the ranks of a command that hangs end with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=options.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            last = (output.decode().strip().splitlines() or ["nothing was printed"])[-1]
            return [], f"it did not end within {options.timeout_s} s: {last}", time.perf_counter() - begun
        written = Path(folder, "verify.json")
        checks = json.loads(written.read_text())["checks"] if written.exists() else []
        error = "" if checks else " ".join(output.decode().split())[-400:]
    return checks, error, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=240.0)
    parser.add_argument("--checks", default="")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    known = tasks()
    alarms = 0
    for name in options.names or known:
        checks, error, seconds = verify(known[name], options)
        of = {status: [check for check in checks if check["status"] == status] for status in ("not shown", "fault")}
        count = len(checks) - sum(map(len, of.values()))
        alarmed = bool(error or of["fault"])
        alarms += alarmed
        verdict = "FAULT" if alarmed else "right"
        left_out = ", ".join(check["name"] for check in of["not shown"])
        print(f"{verdict} {name:<22} {count:>2} passed, not shown: {left_out or 'none'}  ({seconds:.0f} s)", flush=True)
        for check in [*of["not shown"], *of["fault"]]:
            print(f"    {check['status']:<9} {check['name']}: {check['reason'][:300]}", flush=True)
        if error:
            print(f"    {error}", flush=True)
    print(f"{len(options.names or known)} tasks, {alarms} false alarms")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
