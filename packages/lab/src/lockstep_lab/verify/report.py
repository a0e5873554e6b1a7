"""The results of checks for programs (verify.json) and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep_lab.verify.result import CheckResult, VerifyResult

STATUS_WORDS = {"passed": "passed", "fault": "FAULT", "not shown": "not shown"}
_CHECK_KEYS = ("name", "status", "reason", "value", "bound", "what", "notes", "curves", "rows", "seconds")


def to_json(result: VerifyResult) -> dict[str, Any]:
    """The content of verify.json: plain values only, and null for every number that is not finite.

    Its keys are:

    - schema: 1; a larger number if a key changes its meaning
    - name: of the training
    - passed: whether at least one check passed and none found a fault
    - nproc: number of ranks
    - device, quick: as asked for
    - seconds: of all checks
    - versions: of lockstep, torch and Python
    - counts: number of checks by status, under `passed`, `fault` and `not shown`
    - config: of the training
    - checks: a list in the order in which they ran. Each has the fields of `CheckResult`.
    """
    values = {
        "schema": 1,
        "name": result.name,
        "passed": not result.faults and not result.shows_nothing,
        "nproc": result.nproc,
        "device": result.device,
        "quick": result.quick,
        "seconds": result.seconds,
        "versions": result.versions,
        "counts": counts(result),
        "checks": [{name: getattr(check, name) for name in _CHECK_KEYS} for check in result.checks],
        "config": result.config,
    }
    return {name: plain(value) for name, value in values.items()}


def counts(result: VerifyResult) -> dict[str, int]:
    """Number of checks by status."""
    return {status: sum(check.status == status for check in result.checks) for status in STATUS_WORDS}


def plain(value: Any) -> Any:
    """`value` in the types of strict JSON. Values of all other types become text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    try:
        numbers = value.tolist()  # of a tensor, an array or a scalar of NumPy
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return str(value)
    return str(value) if isinstance(numbers, type(value)) else plain(numbers)


HEAD = f"{'check':<14} {'result':<10} {'value and bound':<20} reason  (time)"
"""The heads of the columns of `line`."""


def line(check: CheckResult) -> str:
    """A check in one line for the terminal: name, status, value and bound, reason, seconds."""
    columns = (
        f"{_one_line(check.name):<14}",
        f"{STATUS_WORDS[check.status]:<10}",
        f"{comparison(check):<20}",
        _one_line(check.reason),
    )
    return " ".join(columns) + f"  ({check.seconds:.1f} s)"


def summary(result: VerifyResult) -> str:
    """The number of checks by status in one line, and below it a line for each fault, or if nothing is shown."""
    number = counts(result)
    faults = [f"FAULT {_one_line(check.name)}: {_one_line(check.reason)}" for check in result.faults]
    if result.shows_nothing:
        faults = ["no check could decide anything about this training, for the reasons above"]
    first = counts_in_words(f"{number['passed']} passed", number, not_shown="not shown")
    return "\n".join([f"{first} in {result.seconds:.0f} s", *faults])


def counts_in_words(passed: str, number: Mapping[str, int], *, not_shown: str) -> str:
    """For example `14 passed, 1 fault, 1 not shown`. Zeros are left out."""
    words = [passed]
    if number["fault"]:
        words.append("1 fault" if number["fault"] == 1 else f"{number['fault']} faults")
    if number["not shown"]:
        words.append(f"{number['not shown']} {not_shown}")
    return ", ".join(words)


def _one_line(text: str) -> str:
    """`text` without line breaks and control characters, which would affect a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def comparison(check: CheckResult) -> str:
    """For example `3.1e-14 <= 1.0e-11`, whatever the status, with enough digits to distinguish both numbers."""
    value, bound = check.value, check.bound
    if value is None or bound is None:
        return "" if value is None else _number(value)
    sign = "<=" if value <= bound else ">" if value > bound else "against"
    enough = (digits for digits in (2, 4, 8, 17) if value == bound or _number(value, digits) != _number(bound, digits))
    digits = next(enough, 17)
    return f"{_number(value, digits)} {sign} {_number(bound, digits)}"


def _number(value: float, digits: int = 2) -> str:
    if value == 0 or (abs(value) < 1e6 and value == int(value)):
        return f"{value:.0f}"
    if 0.01 <= abs(value) < 1e4 or not math.isfinite(value):
        return f"{value:.{digits + 2}g}"
    return f"{value:.{digits - 1}e}"
