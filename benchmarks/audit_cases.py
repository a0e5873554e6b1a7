"""`lockstep audit` judged on scripts by somebody who has not read its rules: faults, their repaired twins, odd scripts.

    python benchmarks/audit_cases.py [--cases benchmarks/audit_cases[/second]] [--only faults|fixed|odd]
        [--ids 01 14 ...] [--patience 12] [--out results.json]

A fault counts as found where an error or a warning points at one of its accepted lines (`lines` or `also` of
cases.json), and as "elsewhere" where the audit reports only other lines. Whether the sentence of the finding is the
right sentence is for a person to read: the results hold both. A right script must have no finding of the level error.
The scripts with Lightning need, once:

    pip install --target benchmarks/audit_cases/extra --no-deps lightning==2.6.6 pytorch-lightning==2.6.6 \
        lightning-utilities
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def audited(script: Path, run: dict[str, Any], root: Path, patience: int) -> dict[str, Any]:
    """Run a script under the audit, as its case says. Returns the report of the last run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {name: value.replace("{root}", str(root)) for name, value in run.get("env", {}).items()}
    with tempfile.TemporaryDirectory(prefix="audit-case-") as folder:
        before: list[str] = []
        for number, arguments in enumerate([*run.get("first", []), run["args"]]):
            events, report = f"{folder}/events-{number}", Path(folder, f"report-{number}.json")
            report_options = ["--format", "json", "--output", str(report), *before]
            options = ["--patience", str(patience), "--folder", events]
            command = [sys.executable, "-m", "lockstep", "audit"]
            if run["launch"] == "torchrun":
                command += ["--nproc", "2", *options, *report_options, str(script), *arguments]
            else:
                command = [sys.executable, "-m", "lockstep.audit", *options, str(script), *arguments]
            work = Path(folder, "work")
            work.mkdir(exist_ok=True)
            begun = time.monotonic()
            try:
                done = subprocess.run(
                    command, cwd=work, env=environment, capture_output=True, text=True, errors="replace", timeout=300
                )
                code, output = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                code, output = -1, f"300 s were not enough\n{error.stdout}"
            if run["launch"] != "torchrun" and Path(events).exists():
                read = [sys.executable, "-m", "lockstep", "audit", "--read", events, *report_options]
                code = subprocess.run(read, cwd=work, env=environment, capture_output=True).returncode
            before = ["--previous", events]
        found = json.loads(report.read_text()) if report.exists() else {"findings": [], "lost": output[-3000:]}
    return found | {"code": code, "seconds": round(time.monotonic() - begun, 1), "output": output[-3000:]}


def accepted(case: dict[str, Any]) -> set[tuple[str, int]]:
    """Files by name, and lines, at which the fault may be reported."""
    places = {(Path(case["file"]).name, line) for line in case["lines"]}
    also = case.get("also", [])
    if isinstance(also, dict):
        also = [f"{also['file']}:{line}" for line in also["lines"]]
    for place in also:
        file, _, line = place.rpartition(":")
        places.add((Path(file).name, int(line)))
    return places


def run_of(case: dict[str, Any]) -> dict[str, Any]:
    """How a case is run. Those of the second set say only their arguments, and how often they run."""
    arguments = case.get("args", [])
    return case.get("run") or {
        "launch": "torchrun",
        "args": arguments,
        "first": [arguments] * (case.get("runs", 1) - 1),
    }


def verdict(kind: str, case: dict[str, Any], report: dict[str, Any]) -> str:
    """found, elsewhere, missed; for right scripts: clean, warning, FALSE ALARM."""
    findings = report["findings"]
    if kind != "faults":
        levels = {finding["severity"] for finding in findings}
        if "lost" in report:
            return "NO REPORT"
        return "FALSE ALARM" if "error" in levels else "warning" if levels else "clean"
    places = {(Path(finding["file"] or "").name, finding["line"]) for finding in findings}
    return "found" if places & accepted(case) else "elsewhere" if findings else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=HERE / "audit_cases")
    parser.add_argument("--only", choices=("faults", "fixed", "odd"))
    parser.add_argument("--ids", nargs="+", help="beginnings of names")
    parser.add_argument("--patience", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = options.cases.resolve()
    cases = json.loads((root / "cases.json").read_text())
    results = []
    for kind in ("faults", "fixed", "odd"):
        for case in cases["faults" if kind == "fixed" else kind]:
            wanted = not options.ids or case["id"].startswith(tuple(options.ids))
            has_twin = kind != "fixed" or "fixed" in case
            if not wanted or not has_twin or (options.only and options.only != kind):
                continue
            script = root / case["fixed" if kind == "fixed" else "script"]
            report = audited(script, run_of(case), root, options.patience)
            result = verdict(kind, case, report)
            fault = case.get("sentence") or case.get("what")
            results.append({"kind": kind, "id": case["id"], "verdict": result, "fault": fault, **report})
            print(
                f"{kind:<7} {case['id']:<34} {result:<12} code {report['code']:>2} {report['seconds']:5.1f} s",
                flush=True,
            )
            for finding in report["findings"]:
                where = f"{Path(finding['file'] or '?').name}:{finding['line']}"
                print(f"            {finding['severity']} {finding['rule']} {finding['name']} {where}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    for kind in ("faults", "fixed", "odd"):
        verdicts = [result["verdict"] for result in results if result["kind"] == kind]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in sorted(set(verdicts)))
        print(f"{kind}: {len(verdicts)} scripts: {counts}")


if __name__ == "__main__":
    main()
