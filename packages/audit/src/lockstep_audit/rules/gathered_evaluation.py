"""Rules on what ranks gather or sum in an evaluation: the order of rows, running counts, padding."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import orders, sources
from lockstep_audit.rules.facts import line, place, rule
from lockstep_audit.rules.loaders import Iteration, iterations

_FEW = 12
_GATHERS = ("all_gather", "all_gather_into_tensor", "gather", "all_gather_object", "gather_object")


@rule("LS610", "order-of-ranks", "gathered rows are in the order of ranks instead of the data's order")
def order_of_ranks(history: EventHistory) -> Iterable[Finding] | str:
    """Predictions of each rank's shard, concatenated by rank, next to the data in their own order."""
    rows = {(text["rank"], text["path"]): text["lines"] for text in history.of("text")}
    findings, seen = list[Finding](), False
    for epochs in iterations(history).values():
        for by_rank in epochs.values():
            if not _is_dealt(by_rank):
                continue
            lone = {rank: _lone(history, it) for rank, it in by_rank.items()}
            seen = seen or any(lone.values())
            use = None
            for gather in lone.values() if all(lone.values()) else ():
                use = use or (gather and _use(history, gather, by_rank, rows))
            if use is None:
                continue
            first = lone[min(by_rank)] or {}
            shown = [by_rank[rank].indices[:3] for rank in sorted(by_rank)[:2]]
            evidence = f"the sampler dealt samples {', '.join(map(str, shown[0]))}, ... to rank 0 and "
            evidence += f"{', '.join(map(str, shown[1]))}, ... to rank 1; one gather returns the rows of rank 0, then "
            evidence += f"those of rank 1; {use}"
            cause = "no labels, ids or indices were gathered with them, so each row is paired with the wrong sample"
            remedy = "also gather the indices and sort by them, or use torch.stack(parts, 1).flatten()"
            if _is_shuffled(by_rank):
                cause, remedy = f"the sampler shuffles, and {cause}", "DistributedSampler(dataset, shuffle=False)"
            at, ranks = place(first.get("at")), tuple(by_rank)
            findings.append(Finding("LS610", at, evidence, cause, remedy, ranks, first.get("step")))
    return findings if seen else "no rows of a whole evaluation were gathered without other data"


def _is_dealt(by_rank: dict[int, Iteration]) -> bool:
    """True for an evaluation of all samples whose shards, concatenated, are not in the order of the data."""
    its = [by_rank[rank] for rank in sorted(by_rank)]
    if any(it.shards != len(its) or it.is_training or not it.indices for it in its) or len(its) < 2:
        return False
    size, parts = its[0].begin.get("dataset_size") or 0, [it.indices for it in its]
    order = [index for part in parts for index in part if isinstance(index, int)]
    is_whole = set(order) == set(range(size)) and len({len(part) for part in parts}) == 1
    return size > _FEW and is_whole and order[:size] != sorted(order[:size])


def _is_shuffled(by_rank: dict[int, Iteration]) -> bool:
    """True if the indices of a rank do not increase. The last may repeat one of the first."""
    return any(it.indices[:-1] != sorted(it.indices[:-1]) for it in by_rank.values())


def _lone(history: EventHistory, it: Iteration) -> Event | None:
    """The gather of one row per sample of an evaluation, if it is the only one between the loops around it."""
    begin, samples = it.begin, len(it.indices)
    later = [e["number"] for e in history.of("loader", "step", rank=begin["rank"]) if e["number"] > begin["number"]]
    if len(it.batches) < 2:
        return None
    end = min(later, default=float("inf"))
    made = [e for e in history.of("collective", rank=begin["rank"]) if e["op"] in _GATHERS and e.get("elements") != 1]
    inside = [e for e in made if begin["number"] < e["number"] < end]
    others = [e for e in made if _rows(e) == samples and e.get("at") != inside[0].get("at")] if inside else []
    return inside[0] if len(inside) == 1 and not others and _rows(inside[0]) == samples else None


def _rows(gather: Event) -> int | None:
    shape = gather.get("given") or gather.get("shape") or [None]
    found: int | None = gather["rows"] if "rows" in gather else shape[0]
    return found


def _use(history: EventHistory, gather: Event, by_rank: dict[int, Iteration], rows: dict[Any, int]) -> str | None:
    """What the script did with the rows gathered in the order of ranks, or shuffled: compare or write them."""
    size, world = by_rank[min(by_rank)].begin["dataset_size"], len(by_rank)
    is_shuffled = _is_shuffled(by_rank)
    mine = [e for e in history.of("lined_up", "save", rank=gather["rank"]) if e["number"] > gather["number"]]
    mine = [event for event in mine if event["step"] == gather["step"]]
    counts = (size, -(-size // world) * world)
    for event in mine:
        told, known = line(event.get("at")), orders.reorders(event, gather) and not is_shuffled
        is_beside = event["kind"] == "lined_up" and event.get("gathered_at") == gather.get("at")
        is_lost = is_shuffled or not (event.get("is_dealt") or orders.strides(event, gather))
        if is_beside and event["rows"] in counts and is_lost:
            return f"{told} compares them with {event['rows']} rows that were not gathered"
        shape = gather.get("given") or gather.get("shape") or []
        is_plain = "rows" in gather or shape[1:] in ([], [1])
        lines = rows.get((event["rank"], event.get("path")), -1)
        if event["kind"] == "save" and is_plain and not known and any(lines - n in (0, 1) for n in counts):
            return f"the file that {told} opens has {lines} lines for {size} samples"
    return None


@rule("LS611", "summed-again", "a running count is summed over ranks repeatedly")
def summed_again(history: EventHistory) -> Iterable[Finding] | str:
    """An in-place sum over ranks of a running count. Afterwards it holds the count of all ranks."""
    lines, findings = dict[str, dict[int, Event]](), []
    for event in history.of("summed_again"):
        lines.setdefault(str(event.get("at")), {})[event["rank"]] = event
    for by_rank in lines.values():
        first = by_rank[min(by_rank)]
        is_whole = len(by_rank) == len(history.ranks) > 1 and any(event["added"] for event in by_rank.values())
        if is_whole and not orders.resets(first.get("at")):
            evidence = f"one tensor of {first['elements']} numbers was summed in place over ranks three times, and "
            evidence += "each time it held at least the previous sum on every rank"
            cause = "all_reduce overwrites a rank's count with that of all ranks, and the next sum counts that again"
            remedy = "sum a copy: total = count.clone(); dist.all_reduce(total)"
            at, ranks = place(first.get("at")), tuple(by_rank)
            findings.append(Finding("LS611", at, evidence, cause, remedy, ranks, first["step"]))
    calls = [e for e in history.of("collective") if e.get("op") == "all_reduce" and e.get("reduce_op") == "SUM"]
    return findings if calls or lines else "nothing was summed over ranks in Python"


@rule("LS608", "padding-counted", "padding counts in a metric", "warning")
def padding_counted(history: EventHistory) -> Iterable[Finding] | str:
    """Labels with -100 that a gather pads with the number of a class (decoded tokens drop theirs), or added rows."""
    found: dict[str, list[Event]] = {}
    for event in history.of("padded"):
        found.setdefault(str(event.get("at")), []).append(event)
    findings = []
    for events in found.values():
        first, index = events[0], events[0]["index"]
        is_class = index >= 0 and all(any(event[key] for event in events) for key in ("ignored", "held", "added"))
        if is_class and not _handles_padding((first.get("at") or [""])[0]):
            evidence = f"labels that use -100 for ignored positions and {index} for a class are padded with {index}"
            cause = "pad_across_processes pads with pad_index=0 by default"
            remedy = "pad_across_processes(labels, dim=1, pad_index=-100)"
            ranks = {event["rank"] for event in events}
            findings.append(Finding("LS608", place(first.get("at")), evidence, cause, remedy, (*ranks,), first["step"]))
    for event in history.of("padding"):
        evidence = f"each rank gathered as many rows as the rank with the most, and {event['by']} at "
        evidence += f"{line(event.get('by_at'))} counts all {event['rows']}"
        evidence += f", but ranks have {event['own']} together" if event["own"] > 0 else ""
        cause = "shards have different lengths, and nothing removes the rows that fill up the shorter ones"
        remedy = "cut each part to its length: torch.cat([part[:size] for part, size in zip(parts, sizes)])"
        at, everyone = place(event.get("at")), tuple(history.ranks)
        findings.append(Finding("LS608", at, evidence, cause, remedy, everyone, event["step"]))
    is_seen = found or findings or any(call.get("op") in _GATHERS for call in history.of("collective"))
    return findings if is_seen else "nothing was padded or gathered"


def _handles_padding(path: str) -> bool:
    """True if a file decodes the tokens that it gathers, or also pads a mask."""
    calls = [ast.unparse(node) for node in sources.nodes(path) if isinstance(node, ast.Call)]
    is_decoded = any(word in call for call in calls for word in ("generate(", "skip_special_tokens"))
    return is_decoded or any("pad_across_processes(" in call and "mask" in call for call in calls)
