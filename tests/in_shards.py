"""Run the tests in two processes for each core, and print the results of one after the other.

    python tests/in_shards.py [--record] [paths and options of pytest]

A process takes whole files: fixtures and warm ranks serve all tests of a file. The files are dealt by the seconds
that `tests/durations.json` records, the longest first. `--record` records them, on a machine without other work, and
adds the slowest tests to `tests/costly.txt`, until the others take the time of `make test`: these are left to
`make test-all`. Temporary files are in memory if TMPDIR is not set and /dev/shm has room: runs flush their files to
disk, and here nobody needs that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
DURATIONS = HERE / "durations.json"
_PER_CORE = 2  # processes: while one waits for its ranks or for a program, another computes
IN_MEMORY = Path("/dev/shm")
COSTLY = HERE / "costly.txt"
BUDGET_S = 870.0
"""Seconds of all tests of `make test`, added up over four processes on two cores: 3.6 minutes each. Imports, starts and
reports take the rest of the five minutes that `make test` may take."""
LIBRARIES = ("peft", "pytorch_lightning", "monai", "datasets")
"""Their import takes seconds of each process."""
ROOM_BYTES = 4 << 30
"""The tests leave 0.3 GB of temporary files."""


def groups(files: list[str]) -> list[list[str]]:
    """The files that one process runs: those that import the same of `LIBRARIES`, and each other file alone."""
    found: dict[str, list[str]] = {}
    for file in files:
        text = Path(file).read_text()
        named = (one for one in LIBRARIES if re.search(rf'\b(import |from |importorskip\("){one}\b', text))
        found.setdefault(next(named, file), []).append(file)
    return list(found.values())


def shards(groups: list[list[str]], seconds: dict[str, float], count: int) -> list[list[str]]:
    """Deal groups of files to `count` shards of about equal seconds: the longest first, each to the shortest shard."""
    usual = median(seconds.values()) if seconds else 1.0
    found: list[list[str]] = [[] for _ in range(count)]
    load = [0.0] * count
    timed = [(sum(seconds.get(file, usual) for file in group), group) for group in groups]
    for value, group in sorted(timed, key=lambda one: (-one[0], one[1])):
        least = load.index(min(load))
        found[least] += group
        load[least] += value
    return [sorted(shard) for shard in found if shard]


def _file_of(classname: str) -> str | None:
    """The file of a test, of pytest's XML report."""
    parts = classname.split(".")
    names = ["/".join(parts[:count]) + ".py" for count in range(len(parts), 0, -1)]
    return next((name for name in names if Path(name).exists()), None)


def by_test(reports: list[Path]) -> dict[str, float]:
    """Seconds by test, of pytest's XML reports."""
    seconds: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            file = _file_of(case.get("classname", ""))
            if file is not None:
                seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def by_file(seconds: dict[str, float], files: list[str]) -> dict[str, float]:
    """Seconds of each of `files`, of those by test."""
    found = Counter(dict.fromkeys(files, 0.0))
    for name, value in seconds.items():
        found[name.partition("::")[0]] += value
    return {file: round(value, 1) for file, value in sorted(found.items())}


def costly(seconds: dict[str, float], budget_s: float, contract: str) -> list[str]:
    """The tests to leave out so that the others take `budget_s`: the slowest first.

    A file keeps at least half of its test functions. A file that the contract names keeps all: only cases are left out.
    """
    functions: dict[str, Counter[str]] = {}
    for name in seconds:
        file, _, test = name.partition("::")
        functions.setdefault(file, Counter())[test.partition("[")[0]] += 1
    most = {file: len(found) // 2 for file, found in functions.items()}
    total, left_out = sum(seconds.values()), []
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if total <= budget_s:
            break
        file, _, test = name.partition("::")
        function = test.partition("[")[0]
        if functions[file][function] == 1:
            if not most[file] or Path(file).name in contract:
                continue
            most[file] -= 1
        functions[file][function] -= 1
        total -= seconds[name]
        left_out.append(name)
    return sorted(left_out)


def files_of(paths: list[Path]) -> list[str]:
    return sorted({str(p) for root in paths for p in (root.rglob("test_*.py") if root.is_dir() else [root])})


def roots() -> list[Path]:
    return [HERE, *sorted(HERE.parent.glob("packages/*/tests"))]


def temporary_folder() -> str | None:
    """A new folder in memory for temporary files. None if the caller has chosen a place, or the memory is short."""
    with contextlib.suppress(OSError):
        if "TMPDIR" not in os.environ and shutil.disk_usage(IN_MEMORY).free > ROOM_BYTES:
            return tempfile.mkdtemp(prefix="lockstep-tests-", dir=IN_MEMORY)
    return None


def main() -> int:
    folder = temporary_folder()
    if folder is None:
        return run()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the memory is given back all the same
    try:
        return run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run() -> int:
    os.chdir(HERE.parent)
    # Compiled modules are kept even if the environment forbids it: otherwise each command that tests start would
    # compile the package again, and each process all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = [one for one in sys.argv[1:] if one != "--record"]
    chosen = [one for one in arguments if Path(one.partition("::")[0]).exists()]
    options = [one for one in arguments if one not in chosen]
    files = files_of([Path(one) for one in chosen] or [root.relative_to(HERE.parent) for root in roots()])
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    dealt = shards(groups(files), seconds, _PER_CORE * len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{number}.xml") for number in range(len(dealt))]
        outputs = [Path(folder, f"{number}.txt").open("w+") for number in range(len(dealt))]
        outputs[0] = None  # type: ignore[call-overload]  # it is shown while it runs
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", f"--junitxml={report}", *options, *shard],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for shard, report, output in zip(dealt, reports, outputs, strict=True)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process, output in zip(processes, outputs, strict=True):
                if process.poll() is None:
                    process.terminate()
                    process.wait()
                if output is not None:
                    output.seek(0)
                    print(output.read(), end="")
        if "--record" in sys.argv:
            found = by_test(reports)
            kept = {file: value for file, value in seconds.items() if Path(file).exists()}
            new = costly(found, BUDGET_S, Path("docs/contract.md").read_text())
            kept |= by_file({name: value for name, value in found.items() if name not in new}, files)
            DURATIONS.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")
            before = COSTLY.read_text().splitlines() if COSTLY.is_file() else []
            there = [name for name in before if Path(name.partition("::")[0]).exists()]
            COSTLY.write_text("".join(f"{name}\n" for name in sorted({*there, *new})))
    nothing = 5  # pytest's exit code where a shard has no test, such as with -k
    return max((code for code in codes if code != nothing), default=0)


if __name__ == "__main__":
    sys.exit(main())
