"""The rule on gradients that a script, or its communication hook, sums over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules.divergence import elements
from lockstep_audit.rules.facts import place, rule

_NUMBERS = 4
_CLOSE = 0.05
"""A sum may be off by this much if ranks exchange with half the bits."""


@rule("LS205", "sum-not-divided", "gradients are summed over ranks and not divided")
def sum_not_divided(history: EventHistory) -> Iterable[Finding] | str:
    """all_reduce(SUM) of gradients by the script, without a division by the number of ranks."""
    reduced = list(history.of("hand_reduce"))
    findings = []
    for event in reduced:
        if event.get("op", "").upper() != "SUM" or event.get("divided") is not False:
            continue
        if _counts_before(history, event) or _divided_loss(history, event):
            continue
        if event.get("factor", 1.0) * len(history.ranks) < 1:
            continue  # LS211
        count, world = event.get("parameters"), len(history.ranks)
        evidence = f"{count} gradients were summed over {world} ranks, and the step used the sum"
        cause = "the loss is a mean over a rank's batch, so the sum of means grows with the number of ranks"
        remedy = "divide by world_size after all_reduce, use op=ReduceOp.AVG, or divide the loss by the global batch"
        told = (evidence, cause, remedy, tuple(history.ranks), event["step"])
        findings.append(Finding("LS205", place(event.get("at")), *told))
    for event, made in _sums_of_hooks(history):
        if not _counts_before(history, event) and not _divided_loss(history, event):
            evidence = f"the communication hook returns the sum of its inputs over {len(history.ranks)} ranks"
            cause = "DistributedDataParallel leaves the division to the hook, and the hook does not divide"
            remedy = "divide the bucket's buffer by the number of ranks in the hook"
            findings.append(Finding("LS205", place(made), evidence, cause, remedy, tuple(history.ranks), event["step"]))
    is_seen = reduced or any(history.of("hook_sums"))
    return findings if is_seen else "the script does not reduce gradients itself"


def _sums_of_hooks(history: EventHistory) -> Iterator[tuple[Event, Any]]:
    """DDP hooks that return the sum of all ranks' gradients: an event of the first rank, and the registering line."""
    for model, at in {event["model"]: event.get("at") for event in history.of("hook")}.items():
        told: dict[int, dict[int, Event]] = {}
        for event in (each for each in history.of("hook_sums") if each["model"] == model):
            told.setdefault(event["step"], {})[event["rank"]] = event
        full = [by_rank for by_rank in told.values() if len(by_rank) == len(history.ranks) > 1]
        if len(full) > 1 and all(map(_is_sum, full)):
            yield full[0][min(full[0])], at


def _is_sum(by_rank: dict[int, Event]) -> bool:
    """True if a hook returned the sum of what the ranks passed in, over all parameters together."""
    sums = [event["sums"] for event in by_rank.values()]
    totals = {name: sum(each[name][0] for each in sums if name in each) for name in sums[0]}
    return bool(sum(abs(sums[0][n][1] - t) for n, t in totals.items()) < _CLOSE * sum(map(abs, totals.values())))


def _counts_before(history: EventHistory, event: Event) -> bool:
    """True if a number was summed over ranks before the gradients were: a loss over the global batch."""
    calls = [call for call in history.of("collective", rank=event["rank"]) if call.get("op") == "all_reduce"]
    calls = [call for call in calls if call["number"] < event["number"] and call["step"] == event["step"]]
    at = (event.get("at") or [])[:2]
    return any(elements(call) <= _NUMBERS and (call.get("at") or [])[:2] != at for call in calls)


def _divided_loss(history: EventHistory, event: Event) -> bool:
    """True if the loss was divided by a multiple of the number of ranks, or by an unknown number."""
    for step in history.of("step", rank=event["rank"]):
        for each in step.get("backwards") or ():
            divisor = each.get("divisor")
            if divisor is not None and divisor != 1 and divisor % len(history.ranks) == 0:
                return True
            if divisor is None and any(name.startswith(("Div", "Mul")) for name in each.get("ops", ())[:2]):
                return True
    return False
