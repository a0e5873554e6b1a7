"""The regression set of `lockstep-audit`: scripts by others with one fault each, and right scripts that look unusual.

`cases/manifest.json` says what each script guards, and what the audit must find in it. `make test` runs a handful of
them, `make test-all` the whole set. Ranks are forked, and a second or two is enough for most scripts; a script with
`"launched"` is started by `lockstep-audit`, because its fault is that each process hashes strings in its own way.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_audit import events
from lockstep_audit.events import EventHistory
from lockstep_audit.report.outcome import outcome
from lockstep_audit.rules.catalogue import BY_ID
from packages.audit.tests import forked, page_ranks
from packages.audit.tests.processes import HANG_S, environment

FOLDER = Path(__file__).with_name("cases")
CASES = json.loads((FOLDER / "manifest.json").read_text())
PATIENCE_S = 12
QUICK = ("wrong/LS101_tutorial_classifier.py", "wrong/LS203_finetune_unfreeze.py", "right/join_uneven.py")
LIBRARIES = {
    "torch": [],
    "fsdp": ["torch.distributed.fsdp"],
    "accelerate": ["accelerate"],
    "lightning": ["pytorch_lightning", "lightning_fabric"],
    "transformers": ["accelerate", "transformers.trainer", "datasets"],
}


def wrongly_judged(names, folder):
    """Run scripts under the audit. Returns a line for each that is not judged as its entry says."""
    cases = [case for case in CASES if case["script"] in names and not case.get("launched")]
    jobs = []
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        script, runs = str(FOLDER / case["script"]), [*case.get("runs_before", []), case.get("arguments", [])]
        jobs.append((script, str(folder / str(number)), PATIENCE_S, runs))
    libraries = sorted({name for case in cases for name in LIBRARIES[case["framework"]]})
    (done,) = forked.ended([forked.start(page_ranks.run_cases, jobs, libraries, OMP_NUM_THREADS="1")])
    lines = []
    for number, case in enumerate(cases):
        histories = [
            EventHistory(events.read(path))
            for path in sorted((folder / str(number)).glob("events-*"), key=lambda p: p.name)
        ]
        if not histories or not histories[-1].events:
            lines.append(f"{case['script']}: no events; {done.stderr[-1000:]}")
            continue
        last = histories[-1] if len(histories) == 1 else EventHistory(histories[-1].events, histories[-2])
        found = outcome(last)
        places = [
            {"rule": one.rule, "file": one.where and Path(one.where.file).name, "line": one.where and one.where.line}
            for one in found.findings
        ]
        lines += disagreements(case, places, found.notes)
    return lines


def launched(case, folder):
    """The same for a script that `lockstep-audit` starts."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "lockstep_audit.command", "--nproc", "2", "--patience", str(PATIENCE_S)]
    command += ["--format", "json", "--output", str(report), str(FOLDER / case["script"]), *case.get("arguments", [])]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    if not report.exists():
        return [f"{case['script']}: no report; {done.stdout[-500:]} {done.stderr[-1000:]}"]
    findings = json.loads(report.read_text())["findings"]
    for finding in findings:
        finding["file"] = finding["file"] and os.path.basename(finding["file"])
    return disagreements(case, findings, [])


def disagreements(case, findings, notes):
    """What an entry says and a report does not, or the reverse."""
    script, told = case["script"], [f"{one['rule']} {one['file']}:{one['line']}" for one in findings]
    lines = [f"{script}: {note}" for note in notes if case.get("note", "nothing") not in note]
    if script.startswith("right/"):
        expected = set(case.get("warnings", []))
        return lines + [f"{script}: {one}" for one in told if one.split()[0] not in expected]
    wanted = f"{case['rule']} {Path(script).name}:{case['line']}"
    return lines if wanted in told else [*lines, f"{script}: not {wanted}, but {told}"]


def is_installed(framework):
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in LIBRARIES[framework])


def test_the_manifest_has_each_script_once_and_says_what_it_guards():
    names = [case["script"] for case in CASES]
    assert names == sorted({str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.py")})
    assert len(names) <= 250
    for case in CASES:
        assert case["framework"] in LIBRARIES, case
        assert case["guards"], case
        if case["script"].startswith("wrong/"):
            assert case["rule"] in BY_ID, case
            assert (FOLDER / case["script"]).read_text().splitlines()[case["line"] - 1].strip(), case
        else:
            assert all(BY_ID[rule].severity == "warning" for rule in case.get("warnings", [])), case
    guarded = [(case["framework"], case["guards"]) for case in CASES]
    assert len(set(guarded)) == len(guarded)


def test_some_scripts_are_judged_as_the_manifest_says(tmp_path):
    assert wrongly_judged(QUICK, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["wrong", "right"])
@pytest.mark.parametrize("framework", LIBRARIES)
def test_all_scripts_are_judged_as_the_manifest_says(framework, kind, tmp_path):
    if not is_installed(framework):
        pytest.skip(f"needs {', '.join(LIBRARIES[framework])}")
    chosen = [case for case in CASES if case["framework"] == framework and case["script"].startswith(kind)]
    lines = wrongly_judged([case["script"] for case in chosen], tmp_path)
    for case in chosen:
        if case.get("launched"):
            (place := tmp_path / Path(case["script"]).stem).mkdir()
            lines += launched(case, place)
    assert lines == []
