"""A file of JSON objects, one per line, each with its step; it is repaired when opened."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.errors import number_of
from lockstep.parts.plain import dumps


class JsonLinesFile:
    """Opens `path` for appending. The first appended object replaces lines that do not belong there.

    It drops objects of steps after `last_step`, from a process that was killed before it saved them, and damaged
    lines, for example from a power cut or a full disk. If it is of `last_step` itself, such as an evaluation that is
    made again, it also replaces an object with the same keys. A start that ends before it appends leaves them.

    Args:
        path: created if it does not exist.
        last_step: the last step whose objects are kept.
    """

    note: str
    """Reports how many damaged lines are dropped; empty if none."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        self.path, self.note, self.is_torn = path, "", False
        self.file = path.open("ab", buffering=0)
        lines = path.read_bytes().splitlines(keepends=True)
        steps = [_step_of(line) for line in lines]
        kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= last_step]
        self.kept: list[bytes] | None = kept
        """The lines to keep, until the first object is appended. None: it was."""
        self.has_others, self.last_step = len(kept) < len(lines), last_step
        if damaged := steps.count(None):
            self.note = (
                f"{path.name}: {damaged} of {number_of(len(lines), 'line')} damaged (by a power cut or a full disk?) "
                "and dropped"
            )

    def _drop(self, values: Mapping[str, Any]) -> None:
        """Drop the lines that `values`, the first object, replaces."""
        if self.kept is None:
            return
        kept = self.kept
        if values["step"] == self.last_step:
            kept = [
                line for line in kept if _step_of(line) != self.last_step or json.loads(line).keys() != values.keys()
            ]
        if self.has_others or len(kept) < len(self.kept):
            with atomic.staged_file(self.path) as staging:
                staging.write_bytes(b"".join(kept))
            self.file.close()
            self.file = self.path.open("ab", buffering=0)
        self.kept = None  # last: if the disk is full, the next object tries again

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one object, with the key `step`.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._drop(values)
        line = dumps(values).encode() + b"\n"
        if self.is_torn:  # end the partial line, so that it damages no other line
            line = b"\n" + line
        self.is_torn = True
        if self.file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_torn = False

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _step_of(line: bytes) -> float | None:
    """The step of a line; None if the line is damaged, incomplete, or not an object with a step."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None
