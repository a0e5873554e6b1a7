"""metrics.jsonl: one flat JSON object per log entry."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.plain import dumps


class JsonLines:
    """Appends entries to `path`. Entries of steps after `resumed_at` came from a run that died: they are dropped first.

    So are lines that are no entry, such as a power cut or a full disk leaves; `note` then says so.
    """

    def __init__(self, path: Path, resumed_at: int = 0) -> None:
        self.note = ""
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            steps = [_step_of(line) for line in lines]
            kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= resumed_at]
            if len(kept) < len(lines):
                new = path.with_name(f".{path.name}.new")
                new.write_bytes(b"".join(kept))
                new.replace(path)
            if damaged := steps.count(None):
                what = f"{damaged} of {len(lines)} lines are damaged (by a power cut or a full disk?)"
                self.note = f"{path.name}: {what} and were dropped"
        self.file = path.open("ab", buffering=0)
        self.torn = False

    def record(self, entry: Mapping[str, Any]) -> None:
        line = (b"\n" if self.torn else b"") + dumps(entry).encode() + b"\n"  # what is left of a line spoils no other
        self.torn = True
        if self.file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.torn = False

    def progress(self, step: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        self.file.close()


def _step_of(line: bytes) -> float | None:
    """The step of an entry; None for a line that is none, or is torn."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None
