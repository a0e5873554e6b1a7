"""The report: text like a compiler's, JSON, SARIF 2.1.0, and GitHub annotations."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import lockstep_audit
from lockstep_audit.findings import Finding, Rule
from lockstep_audit.report.outcome import Outcome, shown, source
from lockstep_audit.rules.catalogue import ALL, BY_ID
from lockstep_audit.rules.facts import number_of

UNKNOWN = "unknown"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def explain(rule: Rule) -> str:
    """The command that prints the page of a rule."""
    return f"lockstep-audit --explain {rule.id}"


def page(rule: Rule) -> str:
    """The page of a rule, as Markdown."""
    return resources.files("lockstep_audit.pages").joinpath(f"{rule.name}.md").read_text(encoding="utf-8")


def _where(finding: Finding) -> str:
    return f"{shown(finding.where.file)}:{finding.where.line}: " if finding.where else ""


def text(outcome: Outcome, verbose: bool = False) -> str:
    """The report for people."""
    blocks = []
    for finding in outcome.findings:
        rule, line = BY_ID[finding.rule], source(finding)
        lines = [f"{_where(finding)}{rule.severity}[{rule.id}]: {rule.title}"]
        lines += [f"    {line}"] if line else []
        step = f" (step {finding.step})" if finding.step is not None else ""
        lines += [f"  seen: {finding.evidence}{step}", f"  cause: {finding.cause or UNKNOWN}"]
        lines += [f"  remedy: {finding.remedy}", f"  see {explain(rule)}"]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(_summary(outcome, verbose))]) + "\n"


def _summary(outcome: Outcome, verbose: bool) -> list[str]:
    lines = [f"note: {note}" for note in outcome.notes]
    for finding, reason in outcome.switched_off:
        lines.append(f"switched off: {_where(finding)}{finding.rule} {BY_ID[finding.rule].title}: {reason}")
    if verbose:
        lines += [f"not exercised: {id} {BY_ID[id].name}: {why}" for id, why in sorted(outcome.not_exercised.items())]
    told = {"seen": outcome.seen, "not judged": outcome.unseen}
    lines += [f"{what}: {words}" for what, words in told.items() if words]
    errors, warnings = len(outcome.of("error")), len(outcome.of("warning"))
    counts = f"{number_of(errors, 'error')}, {number_of(warnings, 'warning')}"
    if outcome.inconclusive:
        why, remedy = outcome.inconclusive
        lines += [f"inconclusive: {why}", f"  remedy: {remedy}"]
        counts = f"inconclusive, {counts}" if errors or warnings else "inconclusive"
    more = "" if verbose or not outcome.not_exercised else " (-v shows why)"
    checked, off = number_of(len(outcome.checked), "rule"), number_of(len(outcome.switched_off), "finding")
    counts += f"; {checked} checked, {len(outcome.not_exercised)} not exercised{more}, {off} switched off"
    lines.append(f"lockstep-audit: {counts}")
    return lines


def _row(finding: Finding) -> dict[str, Any]:
    rule = BY_ID[finding.rule]
    event: dict[str, Any] = {"rule": rule.id, "name": rule.name, "severity": rule.severity, "title": rule.title}
    event |= {"file": finding.where.file if finding.where else None}
    event |= {"line": finding.where.line if finding.where else None}
    event |= {"function": finding.where.function if finding.where else None, "ranks": list(finding.ranks)}
    event |= {"step": finding.step, "evidence": finding.evidence, "cause": finding.cause, "remedy": finding.remedy}
    event |= {"explain": explain(rule)}
    return event


def as_json(outcome: Outcome, exit_code: int) -> str:
    """The report for programs."""
    told: dict[str, Any] = {"schema": 1, "exit_code": exit_code}
    told["findings"] = [_row(finding) for finding in outcome.findings]
    told["switched_off"] = [_row(finding) | {"reason": reason} for finding, reason in outcome.switched_off]
    told |= {"checked": outcome.checked, "not_exercised": outcome.not_exercised, "notes": outcome.notes}
    told |= {"seen": outcome.seen, "not_judged": outcome.unseen}
    why, remedy = outcome.inconclusive or (None, None)
    told |= {"inconclusive": why and {"reason": why, "remedy": remedy}}
    return json.dumps(told, indent=1) + "\n"


def sarif(outcome: Outcome) -> str:
    """The report as SARIF 2.1.0, which GitHub code scanning and editors read."""
    rules = [_described(rule) for rule in ALL]
    numbers = {rule.id: number for number, rule in enumerate(ALL)}
    pairs: list[tuple[Finding, str | None]] = [(finding, None) for finding in outcome.findings]
    results = [_result(finding, numbers, reason) for finding, reason in [*pairs, *outcome.switched_off]]
    driver = {"name": "lockstep-audit", "version": lockstep_audit.__version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _described(rule: Rule) -> dict[str, Any]:
    level, where = {"level": rule.severity}, {"text": f"See {explain(rule)}", "markdown": page(rule)}
    words = {"shortDescription": {"text": rule.title}, "defaultConfiguration": level, "help": where}
    return {"id": rule.id, "name": rule.name, **words}


def _result(finding: Finding, numbers: dict[str, int], reason: str | None) -> dict[str, Any]:
    rule = BY_ID[finding.rule]
    words = f"{rule.title}: {finding.evidence}. Cause: {finding.cause or UNKNOWN}. Remedy: {finding.remedy}"
    told: dict[str, Any] = {"ruleId": rule.id, "ruleIndex": numbers[rule.id], "level": rule.severity}
    told |= {"message": {"text": words}, "properties": {"ranks": list(finding.ranks), "step": finding.step}}
    if finding.where:
        path = shown(finding.where.file)
        uri = path if path != finding.where.file else Path(path).as_uri()
        physical = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, finding.where.line)}}
        told["locations"] = [{"physicalLocation": physical}]
    if reason is not None:
        told["suppressions"] = [{"kind": "inSource", "justification": reason}]
    return told


def github(outcome: Outcome) -> str:
    """Annotations, which GitHub shows at the lines of a pull request."""
    lines = []
    for finding in outcome.findings:
        rule = BY_ID[finding.rule]
        words = f"{finding.evidence}\ncause: {finding.cause or UNKNOWN}\nremedy: {finding.remedy}"
        place = f"file={_property(shown(finding.where.file))},line={finding.where.line}," if finding.where else ""
        title = _property(f"{rule.id} {rule.title}")
        lines.append(f"::{rule.severity} {place}title={title}::{_data(words)}")
    return "\n".join([*lines, *_summary(outcome, verbose=False)]) + "\n"


def _data(words: str) -> str:
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    return _data(words).replace(":", "%3A").replace(",", "%2C")
