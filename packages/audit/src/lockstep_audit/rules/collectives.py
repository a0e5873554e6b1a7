"""Rules on collectives and hangs: ranks that wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import skips, sources
from lockstep_audit.rules import waiting as waits
from lockstep_audit.rules.facts import differ, each_rank, line, named, number_of, place, rule, some

_WHOLE = (
    *("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "reduce_scatter", "all_gather_object"),
    *("all_gather_into_tensor", "broadcast_object_list"),
)
"""Calls that every rank of a group makes in the same way."""
_SHAPED = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor")
"""Calls whose tensors have the same shape on all ranks."""


@rule("LS501", "collectives-mismatch", "ranks make different collectives at the same point")
def collectives_mismatch(history: EventHistory) -> Iterable[Finding] | str:
    """The n-th call of a group is a different collective, or has a different shape or type, on some rank."""
    calls: dict[tuple[str, int], dict[int, Event]] = defaultdict(dict)
    for event in history.of("collective"):
        if event.get("op") in _WHOLE and event.get("sequence") is not None:
            calls[str(event.get("group")), event["sequence"]][event["rank"]] = event
    for (group, sequence), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        if len(by_rank) < 2:
            continue
        what = {rank: _call(event) for rank, event in by_rank.items()}
        if differ(what):
            lines = {rank: f"{what[rank]} at {line(event.get('at'))}" for rank, event in by_rank.items()}
            evidence = f"call {sequence} in group {group}: {each_rank(lines)}"
            event = by_rank[waits.odd(history, {rank: place(each.get("at")) for rank, each in by_rank.items()})]
            cause = "ranks took different branches of the script before this call" if _ops(by_rank) else None
            remedy = "make the same collectives with the same shapes in the same order on all ranks"
            ranks = tuple(by_rank)
            if skip := skips.skipped(history, ranks):
                return [Finding("LS501", skip[0], evidence, skip[1], skips.REMEDY, ranks, event["step"])]
            finding = Finding("LS501", place(event.get("at")), evidence, cause, remedy, ranks, event["step"])
            return [_decided(history, finding, {rank: place(each.get("at")) for rank, each in by_rank.items()})]
    recorded = {rank: e["collectives"] for rank, e in waits.waiting(history).items() if e.get("collectives")}
    return _recorded(history, recorded) if calls or recorded else "no collective was seen in Python"


def _call(event: Event) -> str:
    root = f" of rank {event['root']}" if "root" in event else ""
    if event["op"] not in _SHAPED:
        return f"{event['op']}{root}"
    shape, reduce = event.get("shape"), event.get("reduce_op")
    return " ".join(str(each) for each in (event["op"], reduce, shape, event.get("dtype")) if each is not None) + root


def _ops(by_rank: Mapping[int, Event]) -> bool:
    return differ({rank: event["op"] for rank, event in by_rank.items()})


def _recorded(history: EventHistory, recorded: dict[int, list[Event]]) -> list[Finding]:
    """From the flight recorder: a sequence number whose collective differs between ranks."""
    by_number: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for rank, entries in recorded.items():
        for entry in entries:
            if entry.get("sequence") is not None:
                sizes = [str(size) for size in entry.get("sizes") or ()]
                words = " ".join([str(entry.get("name")), *sizes])
                by_number[str(entry.get("group")), entry["sequence"]][rank] = words
    for (group, number), what in sorted(by_number.items(), key=lambda item: item[0][1]):
        if len(what) > 1 and differ(what):
            lines = {rank: waits.waits_at(waits.waiting(history)[rank]) for rank in what}
            if differ(lines):
                continue  # LS502
            at, cause = next(iter(lines.values())), None
            evidence = f"collective {number} of group {group}: {each_rank(what)}"
            remedy = "make the same collectives with the same shapes in the same order on all ranks"
            training = {rank for rank in what if "backward" in str(waits.waiting(history)[rank].get("blocked_in"))}
            rows = sources.stops(at.file) if at and training and len(training) < len(what) else []
            if skip := skips.skipped(history, what):
                (at, cause), remedy = skip, skips.REMEDY
            elif at and len(rows) == 1:
                cause = f"{named(training)} kept training, and the others ended: each decides for itself to stop"
                at = at._replace(line=rows[0])
                remedy = "exchange the number, or the decision, before any rank stops because of it"
            return [_decided(history, Finding("LS501", at, evidence, cause, remedy, tuple(what), None))]
    return []


def _decided(history: EventHistory, finding: Finding, lines: Mapping[int, SourceLine | None] | None = None) -> Finding:
    """A finding, moved to the line at which a rank decided for itself to stop, if that line is known.

    Args:
        lines: where ranks made different calls. One of them may be in a loop that another rank has left.
    """
    reached = dict.fromkeys(history.ranks, 0) | {event["rank"]: event["step"] for event in history.events}
    asked: dict[tuple[int, tuple[Any, ...]], set[int]] = defaultdict(set)
    for event in history.of("asked"):
        if event.get("at") and event["step"] <= min(reached.values()):
            asked[event["step"], tuple(event["at"])].add(event["rank"])
    remedy = "exchange the number, or the decision, before a rank acts on it: all ranks act, or none"
    for (step, at), ranks in sorted(asked.items()):
        if ranks < set(history.ranks):
            others = named(set(history.ranks) - ranks)
            cause = f"{named(ranks)} took this branch after {number_of(step, 'step')}, and {others} did not: "
            cause += "each decides for itself"
            return replace(finding, where=place(at), cause=cause, remedy=remedy)
    known, over = {rank: at for rank, at in (lines or {}).items() if at}, dict[int, bool]()
    for event in history.of("loader_end"):
        over |= {event["rank"]: bool(event.get("is_complete"))} if event.get("backwards") else {}
    pairs = [(a, b) for a in known.values() for rank, b in known.items() if a.file == b.file and not over.get(rank)]
    rows = {(a, row) for a, b in pairs for row in sources.ways_out(a.file, a.line, b.line)}
    if len({row for _, row in rows}) == 1:
        (inside, row), *_ = rows
        cause = f"a rank left the loop around {line(inside)} here, and another continued"
        return replace(finding, where=inside._replace(line=row), cause=cause, remedy=remedy)
    return finding


@rule("LS505", "other-order", "ranks exchange the same things in different orders")
def other_order(history: EventHistory) -> Iterable[Finding] | str:
    """One line that exchanges several things in an order that differs by rank: unlike things are added."""
    turns: dict[tuple[Any, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for event in history.of("collective"):
        texts = event.get("names") or {}
        parameter = {"the parameter": event["parameter"]} if "parameter" in event else {}
        for name, text in {**texts, **parameter}.items():
            where = (*(event.get("at") or ["?", 0, ""]), event["step"], event.get("group"), name)
            turns[where][event["rank"]].append(str(text))
    for (file, row, function, step, _, name), by_rank in turns.items():
        orders = list(by_rank.values())
        is_same = all(sorted(order) == sorted(orders[0]) for order in orders)
        if len(orders) > 1 and is_same and differ(by_rank):
            shown = each_rank({rank: some(order) for rank, order in by_rank.items()})
            evidence = f"{name} in this line's calls: {shown}"
            cause = "the order comes from a set, a list of files, or something else that differs by process"
            remedy = "sort before you exchange item by item, or put everything into one tensor"
            return [Finding("LS505", SourceLine(file, row, function), evidence, cause, remedy, tuple(by_rank), step)]
    return [] if turns else "no line exchanged several named things"


@rule("LS502", "ranks-wait", "ranks wait for each other in different places")
def ranks_wait(history: EventHistory) -> Iterable[Finding] | str:
    """Ranks that are stuck on different lines: one took a branch that the others did not take."""
    stuck = waits.waiting(history)
    if not stuck:
        return "no rank was stuck"
    gone = {rank: event for rank, event in waits.left(history).items() if rank not in stuck}
    lines = {rank: waits.waits_at(event) for rank, event in stuck.items()}
    if gone or not waits.in_other_places(stuck):
        return []
    own = waits.ways(stuck)
    rank = waits.odd(history, own or lines, waits.ahead(stuck))
    evidence = f"{_since(stuck)}: {each_rank(_where(stuck))}"
    words = waits.differences(stuck)
    cause = words or f"{named([rank])} reached {line(lines[rank])}, and the others did not"
    remedy = "call collectives on all ranks (also barriers, a wrapped model in training, FSDP's state_dict): "
    remedy += "move the call out of `if rank == 0`"
    step = stuck[rank].get("step")
    if skip := skips.skipped(history, stuck):
        return [Finding("LS502", skip[0], evidence, skip[1], skips.REMEDY, tuple(stuck), step)]
    at = own.get(rank) or lines[rank]
    for other in own:
        rows = sources.ways_out(own[rank].file, own[other].line, own[rank].line) if at else []
        at = own[rank]._replace(line=rows[-1]) if rows else at
    return [_decided(history, Finding("LS502", at, evidence, cause, remedy, tuple(stuck), step), own)]


def _where(stuck: Mapping[int, Event]) -> dict[int, str]:
    nothing = "no call of torch.distributed"
    return {r: f"{line(waits.waits_at(event))} ({event.get('blocked_in') or nothing})" for r, event in stuck.items()}


def _since(stuck: Mapping[int, Event]) -> str:
    """How long nothing moved, or that the script was ended."""
    seconds = max(event.get("since_s") or 0 for event in stuck.values())
    return f"nothing moved for {seconds:.0f} s" if seconds else "when a timeout or a signal ended the script"


@rule("LS503", "rank-left", "a rank has left while others wait for it")
def rank_left(history: EventHistory) -> Iterable[Finding] | str:
    """A rank that ended, with or without an error, while the others still make collectives."""
    exits, needy = waits.left(history), {**waits.lost(history), **waits.waiting(history)}
    gone = {rank: event for rank, event in exits.items() if rank not in needy and not event.get("error")}
    if not needy:
        return "no rank was stuck or lost its connection to another"
    if not gone:
        return []
    rank = min(gone)
    ends = {rank: event["step"] for rank, event in {**gone, **needy}.items()}
    where = {rank: waits.waits_at(event) for rank, event in needy.items()}
    at = next((each for each in where.values() if each), None)
    evidence = f"{named(gone)} ended without an error after {number_of(ends[rank], 'step')}, while "
    evidence += each_rank({r: f"step {ends[r]} waits at {line(each)}" for r, each in where.items()})
    cause = f"{named(gone)} made fewer steps or batches than the others" if differ(ends) else None
    for event in history.of("loader_end", rank=rank):
        if not event.get("is_complete") and event.get("backwards"):
            count, loop = event.get("batches"), line(event.get("at"))
            batches = number_of(count, "batch")
            cause = f"{named([rank])} left the loop at {loop} after {batches}: one rank breaks or exits"
    last = [event for event in history.of("step", "collective", "save", "scheduler", rank=rank) if event.get("at")]
    alone = next((r for r in where if waits.is_alone(history, needy[r], rank)), None)
    if alone is not None:
        at, cause = where[alone], f"{named([alone])} reached {line(where[alone])}, and {named([rank])} never did"
    elif last:
        at = place(last[-1]["at"]) or at
    remedy = "decide together when to stop: all_reduce the flag, and give all ranks equally long loaders"
    all_ranks = tuple(sorted({**gone, **needy}))
    if skip := skips.skipped(history, all_ranks):
        return [Finding("LS503", skip[0], evidence, skip[1], skips.REMEDY, all_ranks, ends[rank])]
    finding = Finding("LS503", at, evidence, cause, remedy, all_ranks, ends[rank])
    outside = SourceLine(last[-1]["at"][0], 0, "") if last else None
    return [_decided(history, finding, {**where, rank: outside} if alone is None else None)]


@rule("LS506", "no-group", "several processes were started, and none joined a process group")
def no_group(history: EventHistory) -> Iterable[Finding] | str:
    """N processes that each run the same training without the others."""
    steps = {event["rank"]: event for event in reversed(list(history.of("step")))}
    if _world(history) < 2 or len(steps) < 2:
        return "no two processes made steps"
    same = {rank: (step.get("gradient_norm"), step.get("hyperparameters")) for rank, step in steps.items()}
    if any(history.of("group", "wrap", "collective")) or differ(same) or not next(iter(same.values()))[0]:
        return []
    evidence = f"{named(steps)} made the same first step, and none of them made a process group"
    cause = "without init_process_group, each process trains its own copy of the model"
    remedy = "use dist.init_process_group() and DistributedDataParallel; Accelerate on CPUs: ACCELERATE_USE_CPU=true"
    return [Finding("LS506", place(steps[min(steps)].get("at")), evidence, cause, remedy, tuple(steps), 0)]


@rule("LS504", "stuck", "the script is stuck")
def is_stuck(history: EventHistory) -> Iterable[Finding] | str:
    """Ranks that are all stuck at the same place, or outside torch."""
    stuck = waits.waiting(history)
    if not stuck:
        return "no rank was stuck"
    if (set(waits.left(history)) - set(stuck)) or waits.in_other_places(stuck):
        return []
    first = next(iter(stuck.values()))
    evidence = f"{_since(stuck)}: {each_rank(_where(stuck))}"
    silent = sorted(set(range(_world(history))) - set(history.ranks))
    cause = f"{named(silent)} never began" if silent else waits.differences(stuck)
    if not cause and not any(event["kind"] == "stuck" for event in stuck.values()):
        return []  # a timeout of a slow machine or network
    remedy = "read the stacks of all threads in the events; a rank may wait for a file, a lock, or a data worker"
    return [Finding("LS504", waits.waits_at(first), evidence, cause, remedy, tuple(stuck), first.get("step"))]


def _world(history: EventHistory) -> int:
    return max((event.get("world_size") or 1 for event in history.of("start")), default=1)
