"""The rule on numbers of steps and backward passes that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep_audit.events import EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import skips, sources
from lockstep_audit.rules.divergence import Indexed
from lockstep_audit.rules.facts import Key, differ, each_rank, named, number_of, place, replicas, rule, steps


@rule("LS206", "steps-differ", "ranks make different numbers of steps or backward passes")
def steps_differ(history: EventHistory) -> Iterable[Finding] | str:
    """A rank that skips a step, or a backward pass that exchanges gradients."""
    groups, findings, seen = replicas(history), [], False
    joined = any(event.get("joined") for event in history.of("loader_end", "exit"))
    for key, by_rank in steps(history).items():
        for group in groups:
            ranks = tuple(rank for rank in group if rank in by_rank)
            findings += _idle(history, group, by_rank)
            if len(ranks) < 2 or joined:
                continue
            seen = True
            findings += filter(None, [_left_out(history, key, ranks, by_rank)])
    return findings if seen or findings else "no ranks of one group made steps of one optimizer"


def _idle(history: EventHistory, group: tuple[int, ...], by_rank: Indexed) -> list[Finding]:
    """A rank that makes backward passes but never steps an optimizer."""
    passes_of = {event["rank"]: event.get("backwards_left") for event in history.of("exit")}
    idle = [rank for rank in group if passes_of.get(rank) and not any(history.of("step", rank=rank))]
    first = next((events[min(events)] for rank, events in sorted(by_rank.items()) if rank in group), None)
    if not idle or first is None:
        return []
    evidence = f"{named(idle)} made {number_of(passes_of[idle[0]], 'backward pass')} and no step, while others did"
    remedy = "step on every rank: parameters stay equal because all ranks do the same"
    return [Finding("LS206", place(first.get("at")), evidence, None, remedy, group, first["step"])]


def _left_out(history: EventHistory, key: Key, ranks: tuple[int, ...], by_rank: Indexed) -> Finding | None:
    remedy = "decide together: all_reduce the flag (MAX) before `continue` or a skipped step"
    sums = dict.fromkeys(ranks, 0)
    for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
        for rank in ranks:
            backwards = by_rank[rank][index].get("backwards") or ()
            sums[rank] += sum(each.get("synced") is True for each in backwards)
        if differ(sums):
            event = by_rank[max(sums, key=lambda rank: sums[rank])][index]
            backwards = event.get("backwards") or [{}]
            evidence = f"before step {index} of this optimizer, backward passes with an exchange: {each_rank(sums)}"
            cause = "a rank skipped a step after a backward pass: its gradients are then paired with other steps'"
            if skip := skips.skipped(history, ranks):
                return Finding("LS206", skip[0], evidence, skip[1], skips.REMEDY, ranks, index)
            at = place(backwards[0].get("at") or event.get("at"))
            step_at = place(event.get("at"))
            if at and step_at and at.file == step_at.file:
                at = at._replace(line=sources.condition(at.file, at.line, step_at.line) or at.line)
            return Finding("LS206", at, evidence, cause, remedy, ranks, index)
    counts = {rank: len(by_rank[rank]) for rank in ranks}
    exits = {event["rank"]: event for event in history.of("exit")}
    is_over = all(rank in exits and not exits[rank].get("code") and not exits[rank].get("error") for rank in ranks)
    if not (is_over and differ(counts)) or not _exchanges(by_rank):
        return None
    event = by_rank[ranks[0]][max(by_rank[ranks[0]])]
    evidence = f"steps of this optimizer by the end: {each_rank(counts)}"
    return Finding("LS206", place(event.get("at")), evidence, None, remedy, ranks, min(counts.values()))


def _exchanges(by_rank: Indexed) -> bool:
    events = [event for by_index in by_rank.values() for event in by_index.values()]
    return any(each.get("synced") for event in events for each in event.get("backwards") or ())
