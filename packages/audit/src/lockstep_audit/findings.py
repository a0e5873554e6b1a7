"""A finding: what a rule says about a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lockstep_audit.events import History


class Place(NamedTuple):
    """A line of the script, as events have it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong in a script.

    Evidence is what was seen. The cause is what explains it; None: unknown. The remedy says what to write instead.
    """

    rule: str
    where: Place | None
    evidence: str
    cause: str | None
    remedy: str
    ranks: tuple[int, ...] = ()
    step: int | None = None


@dataclass(frozen=True)
class Rule:
    """A fault that can be seen in events.

    `check` returns findings, or the reason why the script did not exercise the rule ("no DataLoader with an epoch that
    shuffles"), so that a report says what was checked and what was not.
    """

    id: str
    """LS101. Stable: ignore comments and baselines name it."""
    name: str
    """same-data: the name of its page."""
    title: str
    severity: Literal["error", "warning"]
    check: Callable[[History], Iterable[Finding] | str]
