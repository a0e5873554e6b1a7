"""Rules on schedules, on parameters that optimizers leave out, and on gradients that are missing or never cleared."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import number_of, place, rule, some, steps, uses
from lockstep_audit.rules.loaders import iterations

_LEAST = 4
"""Fewer steps say nothing about a schedule."""
_NEAR = 0.1
"""Step counts that differ by at most this fraction are close."""
_TINY = 1e-6
_PART = 0.25
"""This fraction of the training without a learning rate is a fault."""
_NO_STEP = "no optimizer made a step"


@rule("LS307", "schedule-length", "the schedule is longer or shorter than the training", "warning")
def schedule_length(history: EventHistory) -> Iterable[Finding] | str:
    """A schedule made for batches, or for the steps of one process, that steps by epochs; a learning rate of zero."""
    findings: list[Finding] = []
    ended = all(not e.get("code") and not e.get("error") for e in history.of("exit"))
    told = [event for event in history.of("schedule") if event.get("optimizer_steps", 0) >= _LEAST]
    for event in told if ended else ():
        others = [other for other in told if other["rank"] == event["rank"] and other.get("is_outer")]
        resumed = any(state.get("what") == "scheduler" for state in history.of("state"))
        rounds = 0 if resumed else _rounds(history, event["rank"])
        words = _length(event, len(history.ranks), rounds, bool(others))
        if words:
            at = event.get("made_at") or event.get("at")
            remedy = "give the schedule the number of times that it steps: optimizer steps of this process, or epochs"
            ranks, step = (event["rank"],), event["optimizer_steps"]
            findings.append(Finding("LS307", place(at), *words, remedy, ranks, step))
    return findings or _without_rate(history, told) if told else "no schedule over several optimizer steps"


def _rounds(history: EventHistory, rank: int) -> int:
    """How often a rank trained on all batches of its loader. 0: it stopped, or may have been stopped, early."""
    loops = [[by_rank[rank] for by_rank in turns.values() if rank in by_rank] for turns in iterations(history).values()]
    trained = [its for its in loops if its and all(it.is_training for it in its)]
    ends = [(it, it.end or {}) for its in trained for it in its]
    is_whole = all(it.is_complete or end.get("batches") == it.begin.get("batches") for it, end in ends)
    may_stop = any(history.of("stopped")) or any(_may_stop(its[0].begin.get("at")) for its in trained)
    return max(map(len, trained), default=1) if is_whole and not may_stop else 0


def _may_stop(at: Sequence[Any] | None) -> bool:
    """True if a `break` or a `return` leaves a loop around the one at this place, or around calls of it."""
    file, row, function = at or ("", 0, "")
    calls = [n for n in sources.nodes(file) if isinstance(n, ast.Call)]
    rows = [call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] == function]
    return any(sources.ways_out(file, each, 0) for each in (row - 1, *rows))


def _length(event: Event, world: int, rounds: int, has_outer: bool) -> tuple[str, str] | None:
    """Evidence and cause if the length of a schedule is not that of the training."""
    horizon, made, own = event.get("horizon"), event["optimizer_steps"], event["steps"]
    name = event.get("name")
    if not own and not has_outer:
        return f"{name} never stepped in {number_of(made, 'optimizer step')}", "scheduler.step() is missing"
    if not event.get("is_outer") or name in ("LinearLR", "ConstantLR"):
        return None
    too_long = _of_all_ranks(event, world, rounds)
    said = f"{name} was made for {number_of(too_long or horizon, 'step')} and stepped "
    said += f"{number_of(own, 'time')}, in {number_of(made, 'optimizer step')}"
    if too_long:
        return said, "it was made for the batches of one process, but each rank has a shard of them"
    if not horizon:
        return None
    if 0.9 * made <= horizon <= 1.15 * made and own < made / 1.9:
        return said, "it was made for optimizer steps, but steps once per epoch or once in several steps"
    if own >= 1.9 * horizon and name != "CosineAnnealingWarmRestarts":
        by_ranks = own - world * made in (0, 1)  # a scheduler may count the step that sets its first rate
        return said, "it steps once per rank" if by_ranks else "it was made for epochs, but steps per batch"
    return None


def _of_all_ranks(event: Event, world: int, rounds: int) -> int | None:
    """The length of a schedule, if it is that of the steps of all ranks together instead of each rank's."""
    made, numbers = event["optimizer_steps"], [event["horizon"]] if event.get("horizon") else event.get("lengths") or ()
    if world == 1 or not rounds or event["steps"] - made not in (0, 1):
        return None
    if any(abs(number - made) <= max(world, _NEAR * made) for number in numbers):
        return None
    rest = max(world, min(world * rounds, int(_NEAR * world * made)))  # each round may drop a batch
    return next((n for n in numbers if abs(n - world * made) <= (world if n % rounds else rest)), None)


def _without_rate(history: EventHistory, told: Sequence[Event]) -> list[Finding]:
    """Optimizers whose learning rates fall to zero and that keep stepping."""
    findings = []
    for by_rank in steps(history).values() if told else ():
        for rank, by_index in list(by_rank.items())[:1]:
            rates: list[float] = []
            for index in sorted(by_index):
                groups = by_index[index].get("hyperparameters")
                now = max((float(group.get("lr") or 0) for group in groups), default=0.0) if groups else None
                rates.append(now if now is not None else rates[-1] if rates else 0.0)
            idle = sum(rate <= _TINY * max(rates) for rate in rates[rates.index(max(rates)) :])
            if idle > max(_LEAST, _PART * len(rates)):
                event = next((event for event in told if event["rank"] == rank), told[0])
                evidence = f"the learning rate was zero in {idle} of {len(rates)} steps, after {max(rates):g}"
                at = event.get("made_at") or event.get("at")
                remedy = "make the schedule as long as the training"
                findings.append(Finding("LS307", place(at), evidence, None, remedy, (rank,), len(rates) - idle))
    return findings


def _besides(rank: int, event: Event) -> Iterator[Finding]:
    """Modules outside of wrapped models, such as a loss with parameters."""
    for module in event.get("untrained") or ():
        at = (module["at"] or [event.get("at")])[0]
        evidence = f"{some(module['names'])} got gradients in the first step, but no optimizer has them"
        cause = "this module is outside of the trained model: its gradients are not even exchanged"
        remedy = "make it a part of the model before wrapping, and give its parameters to the optimizer; or freeze it"
        yield Finding("LS308", place(at), evidence, cause, remedy, (rank,), event["step"])


@rule("LS308", "left-out", "parameters have gradients, but no optimizer has them", "warning")
def left_out(history: EventHistory) -> Iterable[Finding] | str:
    """Parameters of a wrapped model, or of a module besides it, that no optimizer trains."""
    made = {event["rank"]: event for event in history.of("optimizer") if event.get("owned")}
    findings = [found for rank, event in made.items() for found in _besides(rank, event)]
    for rank, event in made.items():
        wraps = {str(wrap["model"]): wrap for wrap in history.of("wrap", rank=rank)}
        for model, names in (event.get("left_out") or {}).items():
            if names and len(names) < wraps.get(str(model), {}).get("trainable", 0):
                at = event.get("made_at") or event.get("at")
                evidence = f"{some(names)} got gradients in the first step, but no optimizer has them"
                cause = "the optimizer was given only some of the parameters, or was made before these"
                remedy = "give them to an optimizer, or freeze them with requires_grad_(False) before wrapping"
                findings.append(Finding("LS308", place(at), evidence, cause, remedy, (rank,), event["step"]))
    return findings if made else "no optimizer of a wrapped model made a step"


def _looked_at(history: EventHistory) -> list[list[list[Event]]]:
    """For each optimizer, on each rank: the examined steps that follow a backward pass, if there are any."""
    found = []
    for by_rank in steps(history).values():
        turns = [[by_index[index] for index in sorted(by_index)] for by_index in by_rank.values()]
        found.append([looked for turn in turns if (looked := list(filter(_is_looked_at, turn)))])
    return [ranks for ranks in found if ranks]


def _is_looked_at(event: Event) -> bool:
    return bool(event.get("sampled") and not event.get("skipped") and event.get("backwards"))


def _named(id: str, cases: list[list[Event]], evidence: str, cause: str | None, remedy: str) -> list[Finding]:
    by_line: dict[Any, list[Event]] = {}
    for events in cases:
        by_line.setdefault(str(events[0].get("at")), []).extend(events)
    found = []
    for events in by_line.values():
        seen, ranks = f"{evidence}, in {number_of(len(events), 'examined step')}", {event["rank"] for event in events}
        at, step = place(events[0].get("at")), events[0]["step"]
        found.append(Finding(id, at, seen, cause, remedy, tuple(sorted(ranks)), step))
    return found


@rule("LS309", "no-gradients", "the optimizer steps without gradients")
def no_gradients(history: EventHistory) -> Iterable[Finding] | str:
    """Steps after a backward pass that find no gradients, or only zeros: nothing is trained."""
    looked = _looked_at(history)
    if uses(history, "deepspeed") or not looked:
        return _NO_STEP
    wrong = [events for ranks in looked if all(map(_has_none, ranks)) for events in ranks]  # a rank may hold no rows
    cause = "zero_grad() between backward() and step(), a loss independent of the parameters, or unreduced shards"
    remedy = "call optimizer.zero_grad(), loss.backward(), optimizer.step() in this order"
    if wrong and all(each.get("loss") == 0 for events in wrong for e in events for each in e["backwards"]):
        cause = "the loss is 0 in all of these steps, whatever the model predicts"
        remedy = "cross_entropy needs a column for each class, and a mask must leave some labels"
    return _named("LS309", wrong, "no parameter had a gradient other than zero", cause, remedy)


def _has_none(events: list[Event]) -> bool:
    """True if no step of a rank found a gradient, although the script did not multiply the loss by 0 to start later."""
    factors = [each["factor"] for event in events for each in event["backwards"] if "factor" in each]
    is_off = bool(factors) and not any(factors)
    return len(events) > 1 and all(event.get("gradient_norm") == 0 for event in events) and not is_off


@rule("LS310", "never-cleared", "gradients are never cleared")
def never_cleared(history: EventHistory) -> Iterable[Finding] | str:
    """Steps whose gradients still contain those of all earlier steps."""
    # The first step of a loop is examined too late to know what its backward pass began with.
    turns = [events for ranks in _looked_at(history) for events in ranks]
    looked = [[e for e in events if e.get("was_cleared") is not None] for events in turns]
    wrong = [events for events in looked if len(events) > 1 and not any(e["was_cleared"] for e in events)]
    remedy = "call optimizer.zero_grad() after each step"
    files = {(event.get("at") or [""])[0] for events in wrong for event in events}
    is_named = any(sources.name_of(node) == "zero_grad" for file in files for node in sources.nodes(file))
    cause = None if is_named else "no zero_grad() in this file"
    found = _named("LS310", wrong, "every backward pass began with the gradients of the previous step", cause, remedy)
    return found if any(looked) else _NO_STEP
