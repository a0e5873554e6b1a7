"""Break the engine or a task in many ways, one at a time, and find out which check of `lockstep verify` notices it.

    .venv/bin/python benchmarks/mutants.py [NAME ...] [--nproc 2] [--all-checks] [--write benchmarks/MUTANTS.md]

Each fault is written into a copy of the package's source, and `lockstep verify` runs in that copy, as it would with a
real fault. The same trainings without a fault are verified first, with the same checks, to rule out false alarms.

A fault counts as found by comparison if a check compared two things and found them different. It counts as found by a
crash if the check's training ended with an error, and as found by a note if a note of the check names it. If a mutant
specifies words for the cause, only these words count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lockstep_lab.verify.result import CheckResult
from packages.lab.tests.verify import mutants
from packages.lab.tests.verify.edits import edited_sources
from packages.lab.tests.verify.mutants import MUTANTS, Mutant, Outcome

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 6
LONGEST_S = 900
CRASH = ("the experiment failed", "the run failed")


def write_copy(mutant: Mutant, folder: Path) -> None:
    """Write the package into `folder`, with the edits of `mutant` in its source."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = [ROOT / "src", *(ROOT / "packages" / name / "src" for name in ("recipes", "lab"))]
    for source in sources:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, folder, ignore=ignored, dirs_exist_ok=True)
    for path, source, edited in edited_sources(mutant.edits):
        file = folder / next(path.relative_to(one) for one in sources if path.is_relative_to(one))
        text = file.read_text()
        assert text.count(source) == 1, f"{path} contains the function {text.count(source)} times"
        file.write_text(text.replace(source, edited))


def verify(mutant: Mutant, checks: Sequence[str], folder: Path, *, nproc: int, steps: int) -> Outcome:
    """The output of `lockstep verify` in a copy of the package with the edits of `mutant`."""
    write_copy(mutant, folder / "source")
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "lockstep", "verify", *mutants.arguments(mutant), "--nproc", str(nproc), "--quick"]
    command += ["--steps", str(steps), "--checks", ",".join(checks), "--run-dir", str(run_dir)]
    paths = os.pathsep.join([str(folder / "source"), str(ROOT)])
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return Outcome({}, LONGEST_S, f"it did not end within {LONGEST_S} s")
    seconds = time.perf_counter() - begun
    if not (run_dir / "verify.json").exists():
        return Outcome({}, seconds, done.stderr.decode().strip().splitlines()[-1] if done.stderr else "no result")
    found = json.loads((run_dir / "verify.json").read_text())["checks"]
    return Outcome({check["name"]: CheckResult(**check) for check in found}, seconds)


def is_crash(reason: str) -> bool:
    """Whether a check found a fault because its training failed."""
    return reason.startswith(CRASH)


def verify_bases(
    names: Sequence[str], verify: Callable[[str, Sequence[str]], Outcome], all_checks: bool
) -> dict[str, Outcome]:
    """The result of verify for each base that the mutants `names` break, by base."""
    outcomes = {}
    for base in dict.fromkeys(MUTANTS[name].base for name in names):
        checks = list(dict.fromkeys(MUTANTS[name].check for name in names if MUTANTS[name].base == base))
        outcomes[base] = outcome = verify(base, [] if all_checks else checks)
        faults = "; ".join(f"{check}: {outcome.checks[check].reason}" for check in outcome.faults)
        print(f"unbroken {base:24} {outcome.seconds:5.1f} s  {outcome.error or faults or 'no fault'}", flush=True)
    return outcomes


def ordered(check: str, all_checks: bool) -> list[str]:
    """The names of the checks to run: first the check that must find the fault."""
    from lockstep_lab.verify.checks import DEFAULT

    return [check, *(name for name in DEFAULT if name != check)] if all_checks else [check]


def shortened(text: str, length: int = 160) -> str:
    """The first line of a text as a table cell."""
    line = text.splitlines()[0] if text else ""
    return (line if len(line) <= length else f"{line[: length - 3]}...").replace("|", "\\|")


def reason(name: str, outcome: Outcome) -> str:
    """The reason of the check that must find the fault, or of the first check that found it."""
    mutant = MUTANTS[name]
    check = outcome.checks.get(mutant.check)
    if mutant.note and check is not None and mutant.is_found(outcome):
        return next(note for note in check.notes if mutant.says in note)
    if check is not None and check.status != "fault" and outcome.faults:
        check = outcome.checks[outcome.faults[0]]
    return outcome.error or (check.reason if check is not None else "")


def row(name: str, outcome: Outcome) -> str:
    """A row of the table. The check that must find the fault is bold if it found it and named its cause."""
    mutant = MUTANTS[name]
    noticed = [mutant.check] if mutant.note and mutant.is_found(outcome) else outcome.faults
    is_found = {mutant.check} if mutant.is_found(outcome) else {}
    by = ", ".join(f"**{check}**" if check in is_found else check for check in noticed) or "no check"
    why = reason(name, outcome)
    kind = "" if not noticed else "note" if mutant.note else "crash" if is_crash(why) else "comparison"
    cells = (name, shortened(mutant.words, 220), by, kind, shortened(why), f"{outcome.seconds:.1f}")
    return f"| {' | '.join(cells)} |"


def earlier_rows(text: str) -> dict[str, str]:
    """The rows of an earlier table, by mutant."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows[1:] if line.count(" | ") == COLUMNS - 1}


def table(outcomes: dict[str, Outcome], before: str, bases: dict[str, Outcome], nproc: int) -> str:
    """The Markdown page. Mutants without an outcome keep their rows from the text `before`."""
    earlier = earlier_rows(before)
    rows = {name: row(name, outcomes[name]) if name in outcomes else earlier.get(name, "") for name in MUTANTS}
    rows, waiting = {name: text for name, text in rows.items() if text}, [name for name in MUTANTS if not rows[name]]
    caught = [
        name
        for name in rows
        if f"| **{MUTANTS[name].check}**" in rows[name] or f", **{MUTANTS[name].check}**" in rows[name]
    ]
    crashes = sum("| crash |" in rows[name] for name in caught)
    minutes = sum(float(text.rsplit("|", 2)[1]) for text in rows.values()) / 60
    alarms = {base: outcome.faults for base, outcome in bases.items() if outcome.faults or outcome.error}
    count = len({MUTANTS[name].base for name in rows})
    lines = [
        "# What `lockstep verify` notices",
        "",
        f"`benchmarks/mutants.py` breaks the engine, or a task, in {len(rows)} ways, one way at a time, and verifies",
        f"the training on {nproc} ranks. Faults of the engine are written into a copy of its source, in which the",
        f"whole command runs. Each fault was made for one check. {len(caught)} were found by that check,",
        f"{crashes} of them because the training of the check failed, and not by a comparison.",
        f"Together they took {minutes:.0f} minutes. The same {count} trainings without a fault gave "
        f"{'no fault' if not alarms else f'faults: {alarms}'}.",
        "",
        "| mutant | what was broken | caught by | found by | what verify said | seconds |",
        "|---|---|---|---|---|---:|",
        *rows.values(),
    ]
    missed = [name for name in rows if name not in caught]
    if missed:
        lines += ["", "## Not noticed by the check that should", ""]
        lines += [f"- **{name}** ({MUTANTS[name].check})" for name in missed]
    if waiting:
        lines += ["", "## Not run", "", f"{len(waiting)} faults were not tried in this way: {', '.join(waiting)}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of mutants or checks; default: all")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--all-checks",
        action="store_true",
        help="run every check on every mutant, not only the check that must find the fault",
    )
    parser.add_argument(
        "--write", type=Path, help="write the table to this Markdown file; rows of other mutants are kept"
    )
    options = parser.parse_args()
    names = [name for name, mutant in MUTANTS.items() if not options.names or {name, mutant.check} & {*options.names}]

    outcomes: dict[str, Outcome] = {}
    common = {"nproc": options.nproc, "steps": options.steps}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        bases = verify_bases(
            names,
            lambda base, checks: verify(Mutant(base, next(iter(checks), ""), base), checks, folder, **common),
            options.all_checks,
        )
        start = time.perf_counter()
        for name in names:
            mutant = MUTANTS[name]
            checks = ordered(mutant.check, options.all_checks)
            outcomes[name] = outcome = verify(mutant, checks, folder, **common)
            word = "caught" if mutant.is_found(outcome) else "elsewhere" if outcome.faults else "SURVIVED"
            unclear = [result.name for result in outcome.checks.values() if result.status == "not shown"]
            by = ", ".join(outcome.faults) + (f" (not shown: {', '.join(unclear)})" if unclear else "")
            text = f"{by}: {shortened(reason(name, outcome), 110)}"
            print(f"{word:9} {name:60} {mutant.check:13} {outcome.seconds:5.1f} s  {text}", flush=True)
            if options.write is not None:  # after each, because all of them take hours
                before = options.write.read_text() if options.write.exists() else ""
                options.write.write_text(table(outcomes, before, bases, options.nproc))
        seconds = time.perf_counter() - start
    missed = [name for name, outcome in outcomes.items() if not MUTANTS[name].is_found(outcome)]
    alarms = sum(bool(outcome.faults) for outcome in bases.values())
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught in {seconds:.0f} s; {alarms} false alarms")
    failed = any(outcome.faults or outcome.error for outcome in bases.values())
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
