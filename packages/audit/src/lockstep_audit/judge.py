"""From the events of all ranks to a report and an exit code."""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path

from lockstep_audit import events
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.events import EventHistory
from lockstep_audit.report import formats
from lockstep_audit.report.outcome import HANGS, Outcome, outcome, shown, write_baseline
from lockstep_audit.rules.waiting import stuck
from lockstep_audit.settings import Settings

CLEAN, FAILED, USAGE, FINDINGS = range(4)
"""Exit codes: the same rule as for all commands of Lockstep."""


class AuditVerdict(enum.Enum):
    """What an audit ends with, and its exit code."""

    CLEAN = "clean"
    FAILED = "failed"
    """The script failed, and no rule found an error."""
    FINDINGS = "findings"
    HANG = "hang"
    INCONCLUSIVE = "inconclusive"
    """No rank made a step of an optimizer, so nothing can be said."""

    @property
    def exit_code(self) -> int:
        """A fault that was found is 3, and what shows nothing is a failure."""
        codes = {AuditVerdict.CLEAN: CLEAN, AuditVerdict.FINDINGS: FINDINGS, AuditVerdict.HANG: FINDINGS}
        return codes.get(self, FAILED)


_WAIT_S = 10.0
_LOOK_S = 0.1


def judge(folder: Path, settings: Settings, *, failed: bool = False) -> AuditVerdict:
    """Judge the events in a folder and write the report.

    Args:
        failed: whether the script's launcher reports that a rank failed.

    Returns:
        what was found, with the exit code of the command.

    Raises:
        AuditUsageError: the events or the baseline are missing.
    """
    previous = _read(settings.previous) if settings.previous else None
    history = EventHistory(_read(folder).events, previous)
    found = outcome(history, settings.baseline)
    if len(history.ranks) < 2 and not any((event.get("world_size") or 1) > 1 for event in history.of("start")):
        many = len(found.not_exercised)
        found.notes.append(f"one rank ran: {many} rules were not exercised; those that compare ranks need --nproc 2")
    if settings.write_baseline:
        write_baseline(settings.write_baseline, found.findings)
    verdict = verdict_on(history, found, settings, failed)
    if verdict is AuditVerdict.INCONCLUSIVE:
        found.inconclusive = _why_inconclusive(history)
    others = {"sarif": formats.sarif, "github": formats.github}
    code, is_text = verdict.exit_code, settings.format == "text"
    written = formats.text(found, settings.verbose) if is_text else formats.as_json(found, code)
    written = others[settings.format](found) if settings.format in others else written
    if settings.output:
        settings.output.write_text(written, encoding="utf-8")
    else:
        sys.stdout.write(written)
        sys.stdout.flush()
    return verdict


def _why_inconclusive(history: EventHistory) -> tuple[str, str]:
    """Why an audit shows nothing, and the remedy."""
    what = "no rank stepped a torch optimizer"
    loaded = next((event for event in history.of("state", "load") if event.get("at")), None)
    if loaded is None:
        return what, "audit a command that trains: at least one step, better an epoch and an evaluation"
    file, line, _ = loaded["at"]
    remedy = "audit a run that trains: in a new run directory, with more epochs, or from the first weights"
    return f"{what}, and {shown(file)}:{line} loaded a checkpoint, perhaps of a run that is complete", remedy


def _read(folder: Path) -> EventHistory:
    found = EventHistory(events.read(folder))
    if not found.events:
        remedy = "name a folder that `lockstep-audit --folder` wrote; a script without torch writes no events"
        raise AuditUsageError("contains no events of an audit", where=str(folder), remedy=remedy)
    return found


def verdict_on(history: EventHistory, found: Outcome, settings: Settings, failed: bool = False) -> AuditVerdict:
    """The verdict: a hang and findings come before the failure of the script, which they explain."""
    if stuck(history) and any(finding.rule in HANGS for finding in found.findings):
        return AuditVerdict.HANG
    if found.of("error") or (settings.strict and found.findings):
        return AuditVerdict.FINDINGS
    if failed or any(event.get("code") or event.get("error") for event in history.of("exit")):
        return AuditVerdict.FAILED
    return AuditVerdict.CLEAN if any(history.of("step")) else AuditVerdict.INCONCLUSIVE


def judge_here(folder: Path, settings: Settings) -> AuditVerdict:
    """`judge` in the first rank of a foreign launcher, once the other ranks have ended.

    It reads files and runs no collective. Ranks that have not ended after 10 s are judged by what they wrote.
    """
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        history = EventHistory(events.read(folder))
        world = max((event.get("world_size") or 1 for event in history.of("start")), default=1)
        if len({event["rank"] for event in history.of("exit")}) >= world - 1:
            break
        time.sleep(_LOOK_S)
    return judge(folder, settings)
