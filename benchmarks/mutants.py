"""Break the engine in many ways, one at a time, and see which of `lockstep verify`'s checks notices.

    .venv/bin/python benchmarks/mutants.py [NAME ...] [--nproc 2] [--all-checks] [--write benchmarks/MUTANTS.md]

What is right is verified first, with every check that is to catch something in it, so that a catch is no false alarm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.verify import mutants
from tests.verify.mutants import MUTANTS, SURVIVORS, Found


def clean_twins(
    names: Sequence[str], judge: Callable[[str, Sequence[str]], Found], everything: bool
) -> dict[str, Found]:
    """What verify says of each base that `names` break, by base."""
    found = {}
    for base in dict.fromkeys(MUTANTS[name].base for name in names):
        checks = (
            []
            if everything
            else list(dict.fromkeys(MUTANTS[name].check for name in names if MUTANTS[name].base == base))
        )
        found[base] = one = judge(base, checks)
        faults = "; ".join(f"{check}: {one.checks[check].reason}" for check in one.faults)
        print(f"as it is  {base:24} {one.seconds:5.1f} s  {one.error or faults or 'no fault'}", flush=True)
    return found


def ordered(check: str, everything: bool) -> list[str]:
    """The check that is to catch it first."""
    from lockstep.verify.checks import CHECKS

    return [check, *(name for name in CHECKS if name != check)] if everything else [check]


def shortened(text: str, length: int = 160) -> str:
    """As a cell of a table."""
    line = text.splitlines()[0] if text else ""
    return (line if len(line) <= length else f"{line[: length - 3]}...").replace("|", "\\|")


def said(name: str, found: Found) -> str:
    """By the check that was to catch it, or by the first that did."""
    verdict = found.checks.get(MUTANTS[name].check)
    if verdict is not None and verdict.status != "fault" and found.faults:
        verdict = found.checks[found.faults[0]]
    return found.error or (verdict.reason if verdict is not None else "")


def row(name: str, found: Found) -> str:
    """Of the table. Bold: the check that is to notice it."""
    mutant = MUTANTS[name]
    by = ", ".join(f"**{check}**" if check == mutant.check else check for check in found.faults) or "nobody"
    return f"| {name} | {shortened(mutant.words, 220)} | {by} | {shortened(said(name, found))} | {found.seconds:.1f} |"


def local_shard(text: str) -> dict[str, str]:
    """The rows of an earlier table, by mutant."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {one.split(" | ")[0].removeprefix("| "): one for one in rows[1:]}


def table(results: dict[str, Found], before: str, clean: dict[str, Found], nproc: int) -> str:
    """Markdown. Rows of mutants that were not made again stay as they were in the text `before`."""
    earlier = local_shard(before)
    rows = {name: row(name, results[name]) if name in results else earlier.get(name, "") for name in MUTANTS}
    caught = [
        name
        for name in MUTANTS
        if f"| **{MUTANTS[name].check}**" in rows[name] or f", **{MUTANTS[name].check}**" in rows[name]
    ]
    minutes = sum(float(one.rsplit("|", 2)[1]) for one in rows.values() if one) / 60
    alarms = {base: one.faults for base, one in clean.items() if one.faults or one.error}
    bases = {one.base for one in MUTANTS.values()}
    lines = [
        "# What `lockstep verify` notices",
        "",
        f"`benchmarks/mutants.py` breaks the engine, or a task, in {len(rows)} ways, one at a time, and verifies the training on {nproc} ranks.",
        f"The check that is to notice it reported a fault for {len(caught)} of them; together they took {minutes:.0f} minutes. The same {len(bases)}",
        f"trainings as they are gave {'no fault' if not alarms else f'faults: {alarms}'}.",
        "",
        "| mutant | what was broken | caught by | what verify said | seconds |",
        "|---|---|---|---|---:|",
        *filter(None, rows.values()),
    ]
    missed = [name for name in rows if name not in caught]
    if missed:
        lines += ["", "## Not noticed by the check that should", ""]
        lines += [f"- **{name}** ({MUTANTS[name].check}): {SURVIVORS.get(name, 'no reason known')}" for name in missed]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants or of checks; default: all")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--all-checks",
        action="store_true",
        help="make every check on every mutant, not only the one that is to catch it",
    )
    parser.add_argument(
        "--write", type=Path, help="a Markdown file for the table; rows of mutants that are not named stay"
    )
    options = parser.parse_args()
    names = [name for name, one in MUTANTS.items() if not options.names or {name, one.check} & {*options.names}]

    from lockstep.verify.workers import Workers

    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        ranks = Workers(Path(folder) / "ranks.log")
        place, common = Path(folder) / "run", {"nproc": options.nproc, "steps": options.steps}
        try:
            clean = clean_twins(
                names,
                lambda base, checks: mutants.judge_clean(base, ranks, place, checks, **common),
                options.all_checks,
            )
            begun = time.perf_counter()
            for name in names:
                check = MUTANTS[name].check
                results[name] = found = mutants.judge(name, ranks, place, ordered(check, options.all_checks), **common)
                word = "caught" if check in found.faults else "elsewhere" if found.faults else "SURVIVED"
                unclear = [one.name for one in found.checks.values() if one.status == "not shown"]
                by = ", ".join(found.faults) + (f" (not shown: {', '.join(unclear)})" if unclear else "")
                print(
                    f"{word:9} {name:60} {check:13} {found.seconds:5.1f} s  {by}: {shortened(said(name, found), 110)}",
                    flush=True,
                )
            seconds = time.perf_counter() - begun
        finally:
            ranks.close()
    missed = [name for name, found in results.items() if MUTANTS[name].check not in found.faults]
    print(
        f"{len(results) - len(missed)} of {len(results)} caught in {seconds:.0f} s; {sum(bool(one.faults) for one in clean.values())} false alarms"
    )
    if options.write is not None:
        before = options.write.read_text() if options.write.exists() else ""
        options.write.write_text(table(results, before, clean, options.nproc))
    return 1 if set(missed) - SURVIVORS.keys() or any(one.faults or one.error for one in clean.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
