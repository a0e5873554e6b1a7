"""From the events of all ranks to a report and an exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lockstep_audit import events
from lockstep_audit.errors import UsageError
from lockstep_audit.events import History
from lockstep_audit.report import formats
from lockstep_audit.report.outcome import HANGS, Outcome, outcome, write_baseline
from lockstep_audit.rules.waiting import stuck
from lockstep_audit.settings import Settings

CLEAN, FAILED, USAGE, FINDINGS, HANG, INCONCLUSIVE = range(6)
"""Exit codes."""
_WAIT_S = 10.0
_LOOK_S = 0.1


def judge(folder: Path, settings: Settings, *, failed: bool = False) -> int:
    """Judge the events in a folder and write the report.

    Args:
        failed: whether the script's launcher reports that a rank failed.

    Returns:
        the exit code of the command.

    Raises:
        UsageError: the events or the baseline are missing.
    """
    previous = _read(settings.previous) if settings.previous else None
    history = History(_read(folder).events, previous)
    found = outcome(history, settings.baseline)
    if settings.write_baseline:
        write_baseline(settings.write_baseline, found.findings)
    code = exit_code(history, found, settings, failed)
    if code == INCONCLUSIVE:
        found.notes.append("inconclusive: no rank stepped a torch optimizer")
    others = {"sarif": formats.sarif, "github": formats.github}
    written = formats.text(found, settings.verbose) if settings.format == "text" else formats.as_json(found, code)
    written = others[settings.format](found) if settings.format in others else written
    if settings.output:
        settings.output.write_text(written, encoding="utf-8")
    else:
        sys.stdout.write(written)
        sys.stdout.flush()
    return code


def _read(folder: Path) -> History:
    found = History(events.read(folder))
    if not found.events:
        raise UsageError(
            "contains no events of an audit",
            where=str(folder),
            remedy="name a folder that `lockstep-audit --folder` wrote; a script without torch writes no events",
        )
    return found


def exit_code(history: History, found: Outcome, settings: Settings, failed: bool = False) -> int:
    """The exit code: see docs/audit.md."""
    if stuck(history) and any(finding.rule in HANGS for finding in found.findings):
        return HANG
    if found.of("error") or (settings.strict and found.findings):
        return FINDINGS
    if failed or any(event.get("code") or event.get("error") for event in history.of("exit")):
        return FAILED
    return CLEAN if any(history.of("step")) else INCONCLUSIVE


def judge_here(folder: Path, settings: Settings) -> int:
    """`judge` in the first rank of a foreign launcher, once the other ranks have ended.

    It reads files and runs no collective. Ranks that have not ended after 10 s are judged by what they wrote.
    """
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        history = History(events.read(folder))
        world = max((event.get("world_size") or 1 for event in history.of("start")), default=1)
        if len({event["rank"] for event in history.of("exit")}) >= world - 1:
            break
        time.sleep(_LOOK_S)
    return judge(folder, settings)
