"""The starts of a run and their ends, warnings and evaluation tables, from train.log."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[+-]\d\d:?\d\d|Z)?)  (.*)", re.DOTALL)
_START = re.compile(r"lockstep (\S+), torch (\S+), (\d+) ranks? on (\S+), from step (\d+)$")
_ENTRY = re.compile(r"step (\d+)/(\d+)  ")
_STOPPED = re.compile(r"stopped by \S+ (?:at step (\d+)|before the first step)")
_ENDED = re.compile(r"the training ended at step (\d+) of \d+: ")
_NOTED = ("warning:", "error:", "out of memory", "passed over a damaged", "loader worker")
_MOST = 200  # different notes, and lines before the first step
_TABLE_CHARACTERS, _NOTE_CHARACTERS = 20_000, 1000


@dataclass
class LoggedStart:
    """One start of the training, up to its end or the next start."""

    at: str
    """Time in ISO 8601."""
    lockstep: str
    torch: str
    world: int
    device: str
    from_step: int
    reached: int
    """The last step in the log."""
    last_at: str
    """Time of its last line."""
    goal: int | None = None
    """The step at which the training ends."""
    ending: str = ""
    """The log's words on its end. Empty: there are none."""

    @property
    def is_complete(self) -> bool:
        """True if this start trained to the end."""
        return bool(_ENDED.match(self.ending)) or (self.goal is not None and self.reached >= self.goal)

    @property
    def seconds(self) -> float:
        """From the first to the last line."""
        try:
            begin, end = map(datetime.datetime.fromisoformat, (self.at, self.last_at))
            return max(0.0, (end - begin).total_seconds())
        except (ValueError, TypeError):  # invalid date, or only one has a time zone
            return 0.0


@dataclass
class Note:
    """A warning or another event, with its number of occurrences."""

    at: str
    text: str
    count: int = 1


@dataclass
class TrainLog:
    """The content of train.log."""

    starts: list[LoggedStart] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    intro: list[str] = field(default_factory=list)
    """Lines of the first start before its first step: the data and the model."""
    tables: dict[int, str] = field(default_factory=dict)
    """The report of the task on an evaluation, by step."""


def read(path: Path) -> TrainLog:
    """The content of a log. It is empty if the file is missing or unreadable."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _read(file)
    except OSError:
        return TrainLog()


def _read(lines: Iterable[str]) -> TrainLog:
    log = TrainLog()
    notes: dict[str, Note] = {}
    table = ""
    for at, text in _messages(lines):
        if begin := _START.match(text):
            lockstep, torch, world, device, step = begin.groups()
            log.starts.append(LoggedStart(at, lockstep, torch, int(world), device, int(step), int(step), at))
            continue
        last = log.starts[-1] if log.starts else None
        if last is not None:
            last.last_at = at
        if entry := _ENTRY.match(text):
            step, goal = int(entry[1]), int(entry[2])
            if last is not None:
                last.reached, last.goal = max(step, last.from_step), goal
            if table and "eval/" in text:
                log.tables[step] = table
            table = ""
        elif (stopped := _STOPPED.match(text) or _ENDED.match(text)) and last is not None:
            last.ending = text
            last.reached = int(stopped[1]) if stopped.lastindex else last.reached
        elif text.startswith(_NOTED):
            if text in notes:
                notes[text].count += 1
            elif len(notes) < _MOST:
                notes[text] = Note(at, text[:_NOTE_CHARACTERS])
        elif "\n" in text:
            table = (f"{table}\n\n{text}" if table else text)[:_TABLE_CHARACTERS]  # one text per data set
        if last is not None and len(log.starts) == 1 and last.goal is None and len(log.intro) < _MOST:
            log.intro += [] if text.startswith(_NOTED) else text.split("\n")
    log.notes = list(notes.values())
    return log


def _messages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(time, text) of each message. Lines without a time belong to the message before them."""
    at, parts = "", [""]
    for line in lines:
        line = line.rstrip("\n")
        if match := _LINE.match(line):
            if at:
                yield at, "\n".join(parts)
            at, parts = match[1], [match[2]]
        elif len(parts) < 2000:
            parts.append(line)
    if at:
        yield at, "\n".join(parts)
