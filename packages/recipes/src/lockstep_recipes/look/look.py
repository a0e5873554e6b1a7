"""Calls the finders of a task, and orders what they found."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import LockstepError
from lockstep_recipes.look.finding import HEAD, SAMPLE, DataFinding, Extent, Lookable, of_error

MOST_KEPT = 200
"""Findings of a fault that are kept. All are counted."""
_SHOWN = 3


@dataclass(frozen=True)
class Fault:
    """The findings with one code: the first of them, and how many files they are about."""

    findings: Sequence[DataFinding]
    count: int

    @property
    def first(self) -> DataFinding:
        return self.findings[0]

    @property
    def is_error(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)


def look(task: Lookable, extent: Extent = SAMPLE) -> list[Fault]:
    """The faults in the data of a task: errors first, then by the number of files."""
    try:
        data = task.data_to_look_at(extent)
    except LockstepError as error:
        return faults([of_error(error)])
    return faults(itertools.chain.from_iterable(find(data) for find in task.finders))


def faults(findings: Iterable[DataFinding]) -> list[Fault]:
    """Findings, grouped by their codes."""
    kept: dict[str, list[DataFinding]] = {}
    counts: dict[str, int] = {}
    seen: set[tuple[str, str, str]] = set()
    for finding in findings:
        if (same := (finding.code, finding.file, finding.what)) in seen:
            continue
        seen.add(same)
        counts[finding.code] = counts.get(finding.code, 0) + finding.count
        if len(kept.setdefault(finding.code, [])) < MOST_KEPT:
            kept[finding.code].append(finding)
    found = [Fault(kept[code], counts[code]) for code in kept]
    return sorted(found, key=lambda fault: (not fault.is_error, -fault.count))


def lines(found: Sequence[Fault], shown: int = _SHOWN) -> list[str]:
    """Faults for a terminal: what is wrong, the first files, and the remedy."""
    written = []
    for fault in found:
        first, more = fault.first, fault.count - sum(one.count for one in fault.findings[:shown])
        written.append(f"{'error' if fault.is_error else 'warning'} [{first.code}]: {fault.count:,} found")
        written += [f"  {_place(one)}" for one in fault.findings[:shown]]
        written += [f"  ... and {more:,} more"] if more > 0 else []
        written.append(f"  remedy: {first.remedy}")
    return written


def as_read(task: Any) -> list[str]:
    """What a training would log of the data: samples, classes, what the recipe decided. Empty: it cannot be read."""
    if not hasattr(task, "presenter"):
        return []
    try:
        task.train_data()
        task.eval_data()
        presenter = task.presenter(task)
        written: list[str] = getattr(presenter, "of_run", presenter.log_header)()
    except LockstepError:  # it is a finding, too
        return []
    return written


def head(task: Lookable) -> list[str]:
    """A line for each fault in a small sample of the data, for the head of a run's log. It never ends a run."""
    try:
        found = look(task, HEAD)
    except Exception as error:  # a finder is wrong, and not the data
        return [f"note: the data was not looked at: {type(error).__name__}: {error}"]
    written = []
    for fault in found:
        more = f" ({fault.count:,} found in a sample)" if fault.count > 1 else ""
        written.append(f"WARNING: [{fault.first.code}] {_place(fault.first)}{more}. {fault.first.remedy}")
    advice = "`lockstep look` with the recipe and the same data names all places, and writes a page"
    return [*written, advice] if written else []


def _place(finding: DataFinding) -> str:
    return f"{finding.file}: {finding.what}" if finding.file else finding.what
