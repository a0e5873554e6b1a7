"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "fault", "not shown"]


@dataclass
class CheckResult:
    """The outcome of one check.

    status: `fault` where the promise is broken; `not shown` where it cannot be judged, for the reason given.
    value, bound: the number that decided, and the largest that passes, where there are such numbers. what: of what it is.
    notes: what was switched off, left out or found on the way. curves: losses by step, to be shown together.
    rows: further lines for people, such as predictions beside the truth. seconds: how long it took.
    """

    status: Status
    reason: str
    name: str = ""
    value: float | None = None
    bound: float | None = None
    what: str = ""
    notes: list[str] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class VerifyResult:
    """All checks on a training. config: as `RunConfig` writes it. versions: of lockstep, torch and Python."""

    name: str
    nproc: int
    device: str
    quick: bool
    config: dict[str, Any]
    versions: dict[str, str]
    checks: list[CheckResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[CheckResult]:
        """Broken promises."""
        return [verdict for verdict in self.checks if verdict.status == "fault"]


def passed(reason: str, **more: Any) -> CheckResult:
    """The promise was seen to hold."""
    return CheckResult("passed", reason, **more)


def fault(reason: str, **more: Any) -> CheckResult:
    """The promise was seen to be broken."""
    return CheckResult("fault", reason, **more)


def not_shown(reason: str, **more: Any) -> CheckResult:
    """Nothing can be said, and why."""
    return CheckResult("not shown", f"cannot be shown because {reason}", **more)
