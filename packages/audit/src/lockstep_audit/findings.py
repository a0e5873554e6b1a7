"""A finding: what a rule says about a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep_audit.events import EventHistory


class SourceLine(NamedTuple):
    """A line of the script, as events have it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in a script.

    The evidence is what was observed. The cause explains it; None: unknown. The remedy says what to write instead.
    """

    rule: str
    where: SourceLine | None
    evidence: str
    cause: str | None
    remedy: str
    ranks: tuple[int, ...] = ()
    step: int | None = None


@dataclass(frozen=True)
class Rule:
    """A fault that events can show.

    `check` returns findings, or the reason why the script did not exercise the rule ("no DataLoader with an epoch that
    shuffles"). The report can then list what was checked and what was not.
    """

    id: str
    """LS101. Stable: ignore comments and baselines name it."""
    name: str
    """same-data: the name of its documentation page."""
    title: str
    severity: Literal["error", "warning"]
    check: Callable[[EventHistory], Iterable[Finding] | str]
