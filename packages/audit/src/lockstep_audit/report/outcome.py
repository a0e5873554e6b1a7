"""The findings of all rules about a run, without those that a user has switched off."""

from __future__ import annotations

import json
import linecache
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_audit.errors import AuditUsageError
from lockstep_audit.events import EventHistory
from lockstep_audit.findings import Finding, Rule
from lockstep_audit.report import coverage
from lockstep_audit.rules.catalogue import ALL, BY_ID, EXPLAINED

_IGNORE = re.compile(r"#\s*lockstep:\s*ignore\[([^\]]*)\](.*)")
HANGS = ("LS501", "LS502", "LS503", "LS504")


@dataclass
class Outcome:
    """The remaining findings, and notes."""

    findings: list[Finding] = field(default_factory=list)
    switched_off: list[tuple[Finding, str]] = field(default_factory=list)
    """Findings that a comment or a baseline switches off, and the reason."""
    checked: list[str] = field(default_factory=list)
    not_exercised: dict[str, str] = field(default_factory=dict)
    """By rule id, the reason why the script did not exercise the rule."""
    notes: list[str] = field(default_factory=list)
    seen: str = ""
    """What ran."""
    unseen: str = ""
    """What did not run, so that nothing can be said about it."""
    inconclusive: tuple[str, str] | None = None
    """Why the run shows nothing, and the remedy."""

    def of(self, severity: str) -> list[Finding]:
        """The findings of this severity."""
        return [finding for finding in self.findings if BY_ID[finding.rule].severity == severity]


def outcome(history: EventHistory, baseline: Path | None = None, rules: Iterable[Rule] = ALL) -> Outcome:
    """Run all rules.

    Raises:
        AuditUsageError: the baseline cannot be read.
    """
    known = _read_baseline(baseline) if baseline else set()
    result, found = Outcome(), list[Finding]()
    try:
        result.seen, result.unseen = coverage.seen(history), coverage.unseen(history)
    except Exception as error:  # unforeseen events
        result.notes.append(f"what ran could not be counted: {type(error).__name__}: {error}")
    for rule in rules:
        try:
            said = rule.check(history)
        except Exception as error:  # unforeseen events: the other rules still apply
            result.notes.append(f"{rule.id} could not be checked: {type(error).__name__}: {error}")
            continue
        if isinstance(said, str):
            result.not_exercised[rule.id] = said
        else:
            result.checked.append(rule.id)
            found += said
    ids = {finding.rule for finding in found}
    ignores = Ignores(history)
    for finding in found:
        if ids & set(EXPLAINED.get(finding.rule, ())):
            continue
        reason = ignores.reason(finding) or ("in the baseline" if fingerprint(finding) in known else None)
        if reason:
            result.switched_off.append((finding, reason))
        else:
            result.findings.append(finding)
    result.notes += ignores.notes
    result.notes += [f"rank {e['rank']} could not observe {e['what']}: {e['reason']}" for e in history.of("note")]
    order = {"error": 0, "warning": 1}
    result.findings.sort(key=lambda finding: (order[BY_ID[finding.rule].severity], finding.rule))
    return result


def source(finding: Finding) -> str | None:
    """The line of the script that a finding names."""
    return linecache.getline(finding.where.file, finding.where.line).strip() or None if finding.where else None


def shown(file: str) -> str:
    """A path below the current folder, or the whole path."""
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def fingerprint(finding: Finding) -> tuple[str, str, str]:
    """What identifies a finding while other lines of the file change."""
    return finding.rule, os.path.basename(finding.where.file) if finding.where else "", source(finding) or ""


def write_baseline(path: Path, findings: Iterable[Finding]) -> None:
    """Write findings into a file that `outcome` accepts as a baseline."""
    keys = ("rule", "file", "line")
    rows = [dict(zip(keys, fingerprint(finding), strict=True)) for finding in findings]
    path.write_text(json.dumps({"lockstep_audit_baseline": 1, "findings": rows}, indent=1) + "\n", encoding="utf-8")


def _read_baseline(path: Path) -> set[tuple[str, str, str]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["findings"]
        return {(row["rule"], row["file"], row["line"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"is not a baseline: {type(error).__name__}: {error}"
        raise AuditUsageError(what, where=str(path), remedy="write it with --write-baseline FILE") from None


class Ignores:
    """Comments `# lockstep: ignore[LS101] reason`, on a line or on the line above."""

    def __init__(self, history: EventHistory) -> None:
        self.notes: list[str] = []
        self._lines: dict[tuple[str, int], dict[str, str]] = {}
        self._read: set[str] = set()
        for event in history.of("start"):
            if event.get("script"):
                self._read_file(event["script"])

    def reason(self, finding: Finding) -> str | None:
        """The user's reason for switching off this finding. None: it is on."""
        if finding.where is None:
            return None
        self._read_file(finding.where.file)
        for number in (finding.where.line, finding.where.line - 1):
            if reason := self._lines.get((finding.where.file, number), {}).get(finding.rule):
                return reason
        return None

    def _read_file(self, file: str) -> None:
        if file in self._read:
            return
        self._read.add(file)
        for number, text in enumerate(linecache.getlines(file), 1):
            if match := _IGNORE.search(text):
                self._add(file, number, match[1], match[2].strip(" :-"))

    def _add(self, file: str, number: int, ids: str, reason: str) -> None:
        for id in filter(None, (part.strip() for part in ids.split(","))):
            if id not in BY_ID:
                self.notes.append(f"{shown(file)}:{number}: there is no rule {id} to ignore")
            elif not reason:
                self.notes.append(f"{shown(file)}:{number}: ignore[{id}] has no effect without a reason after it")
            else:
                self._lines.setdefault((file, number), {})[id] = reason
