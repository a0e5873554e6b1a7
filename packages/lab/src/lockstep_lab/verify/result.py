"""The result of one check, and of a verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "fault", "not shown"]


@dataclass
class CheckResult:
    """The result of one check."""

    status: Status
    """`fault`: the promise is broken. `not shown`: the check cannot decide, for the given reason."""
    reason: str
    name: str = ""
    """Of the check."""
    value: float | None = None
    """The number that decided, if there is one."""
    bound: float | None = None
    """The largest value that passes, if there is a bound."""
    what: str = ""
    """The quantity that `value` measures."""
    notes: list[str] = field(default_factory=list)
    """Notes on what was switched off, left out or noticed on the way."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Losses by step, drawn together."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of a table for people, such as predictions next to the truth."""
    seconds: float = 0.0
    """The time of the check."""
    cause: str = ""
    """The cause that `reason` ends with, if the same cause may make several checks fail."""


@dataclass
class VerifyResult:
    """The results of all checks of one training."""

    name: str
    """Of the training."""
    nproc: int
    """Number of ranks."""
    device: str
    quick: bool
    config: dict[str, Any]
    """As `RunConfig` writes it."""
    versions: dict[str, str]
    """Of lockstep, torch and Python."""
    checks: list[CheckResult] = field(default_factory=list)
    """In the order in which they ran."""
    seconds: float = 0.0
    """The time of all checks."""

    @property
    def faults(self) -> list[CheckResult]:
        """Checks that found a broken promise."""
        return [check for check in self.checks if check.status == "fault"]

    @property
    def shows_nothing(self) -> bool:
        """True if no check could decide anything."""
        return all(check.status == "not shown" for check in self.checks)


def passed(reason: str, **more: Any) -> CheckResult:
    """The promise holds. `more`: further fields of the result."""
    return CheckResult("passed", reason, **more)


def fault(reason: str, cause: str = "", /, **more: Any) -> CheckResult:
    """The promise is broken. `more`: further fields of the result."""
    reason = f"{reason}. Likely cause: {cause}" if cause else reason
    return CheckResult("fault", reason, cause=cause, **more)


def not_shown(reason: str, **more: Any) -> CheckResult:
    """The check cannot decide, for this reason. `more`: further fields of the result."""
    return CheckResult("not shown", f"cannot be shown because {reason}", **more)
