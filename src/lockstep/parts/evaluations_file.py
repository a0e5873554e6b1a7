"""evaluations.jsonl: what `lockstep evaluate` has found, with the checkpoints that were evaluated.

These results are not in metrics.jsonl. Its entries follow the training step by step, and a run that goes on drops those
of later steps.
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
            line = line if file.read(1) == b"\n" else b"\n" + line  # the end of a line that a full disk cut off
        file.write(line)


def note(folder: Path, step: int, changes: Sequence[str], results: Mapping[str, float]) -> None:
    """Keep the results of an evaluation with the run, as `append` does. Where this fails, a warning says so."""
    try:
        append(folder, step=step, changes=changes, results=results)
    except OSError as error:  # such as a run that may only be read
        print(f"warning: {FILE} cannot be written: {error.strerror}", file=sys.stderr)


def read(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in their order. Damaged lines are left out."""
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
