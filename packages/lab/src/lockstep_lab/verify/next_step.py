"""How results end: a fault with one likely cause and the next command, a repeated reason with its first check."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep_lab.verify.result import CheckResult

_LONG = 80  # characters; shorter reasons may be repeated
_STATE = "state outside of the model's buffers, code that reads the rank, or a generator that nothing seeds"
_SPLIT = "a loss that depends on the split of the batch"
_USUAL = {  # by check: the usual cause, and the check that narrows it down
    "loss": ("a learning rate that does not fit, or labels that belong to other inputs", "gradients"),
    "metric": ("Task.predict differs from what Task.loss trains, or evaluation data differ", "predictions,evaluation"),
    "gradients": ("a setting of the optimizer, or a part of the model that the loss does not reach", "gradients"),
    "predictions": ("Task.predict mixes the samples of a batch, or keeps state", "evaluation"),
    **dict.fromkeys(("ranks", "accumulation", "strategies", "elastic"), (f"{_SPLIT}, {_STATE}", "bits")),
    "evaluation": ("a metric or a loss that depends on how samples are batched", "predictions"),
    "collectives": ("Task.loss or a hook that communicates, or reads a number from the device", "collectives"),
}


def target(config: Mapping[str, Any]) -> str:
    """The target that names a training on the command line."""
    kind = str(config["task"].get("kind", ""))
    return kind if ".py:" in kind else str(config["name"])


def finished(check: CheckResult, earlier: Sequence[CheckResult], target: str, log: str) -> CheckResult:
    """`check` with the end of its reason.

    Args:
        earlier: the results before it.
        log: the file with tracebacks.
    """
    if check.status == "not shown":
        same = [one.name for one in earlier if one.reason == check.reason and len(check.reason) > _LONG]
        return dataclasses.replace(check, reason=f"as for {same[0]}") if same else check
    if check.status == "passed" or "Next: " in check.reason:
        return check
    named = [one.name for one in earlier if check.cause and one.cause == check.cause]
    if named:
        reason = f"cannot be shown because of the cause that {named[0]} names"
        return dataclasses.replace(check, status="not shown", reason=reason)
    usual, narrower = _USUAL.get(check.name, (_STATE, "determinism"))
    step = f"lockstep verify {target} --checks {check.name if target.endswith('.py') else narrower}"
    cause = "" if "ikely cause" in check.reason else f"Likely cause: {usual}. "
    if " fail" in check.reason:
        cause, step = "", f"less {log}"
    elif page := re.search(r"lockstep --explain \w+", check.reason):
        step = page[0]
    return dataclasses.replace(check, reason=f"{check.reason.rstrip('. ')}. {cause}Next: {step}")
