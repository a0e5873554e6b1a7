"""evaluations.jsonl: the results of `lockstep evaluate`, with the evaluated checkpoints.

These results are not in metrics.jsonl. Its entries follow the training step by step, and a resumed run drops those of
later steps.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core import run_folder
from lockstep.parts.plain import dumps

FILE = run_folder.EVALUATIONS


def append(folder: Path, *, step: int, changes: Sequence[str], results: Mapping[str, float]) -> None:
    """Add a line to the file of a run.

    Args:
        folder: the run directory.
        step: of the checkpoint.
        changes: to the config of the run, as KEY=VALUE.
        results: by their names in the log, such as `eval/loss`.

    Raises:
        OSError: the file cannot be written.
    """
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    line = dumps({"at": now, "step": step, "changes": list(changes), **results}).encode() + b"\n"
    with (folder / FILE).open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read(1) == b"\n" else b"\n" + line  # ends a line that a full disk truncated
        file.write(line)


def note(folder: Path, step: int, changes: Sequence[str], results: Mapping[str, float]) -> None:
    """Store the results of an evaluation with the run, as `append` does. If this fails, a warning reports it."""
    try:
        append(folder, step=step, changes=changes, results=results)
    except OSError as error:  # such as a read-only run
        print(f"warning: {FILE} cannot be written: {error.strerror}", file=sys.stderr)


def read(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order. Damaged lines are left out."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found
