"""Rules on how data are dealt to ranks and workers, and on random numbers that should differ between ranks."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import flows, sources
from lockstep_audit.rules.facts import differ, each_rank, named, numbered, place, replicas, rule, some
from lockstep_audit.rules.loaders import Iteration, iterations

_PADDING = 0.05
"""This fraction of a shard may also be on another rank: samplers repeat samples to make shards equal."""
_WORDS = 5
_FEW_STEPS = 3
_LEAST = 8
"""At least this many of a script's numbers must differ: shards of ranks may differ in a few by chance."""
_CLASHES = 1.25
"""Pairs of numbers for each number. Words may share one by chance, if they come from hash(): 600 in 2048 make 1.2."""
_OF_ALL = ("world", "ranks", "proc", "replica", "shard", "gpus", "nodes")
_NO_GROUP = "no ranks train one model together"


def _made(iteration: Iteration) -> Any:
    """Where the sampler that deals the samples was made, or else the loader."""
    if iteration.begin.get("sampler_at"):
        return iteration.begin["sampler_at"]
    return iteration.begin.get("made_at") or iteration.begin.get("at")


def _firsts(history: EventHistory) -> list[dict[int, Iteration]]:
    """The first training iterations of each loader, by rank."""
    found = []
    for epochs in iterations(history).values():
        for by_rank in list(epochs.values())[:1]:
            its = {rank: it for rank, it in by_rank.items() if it.is_training or it.end is None}
            found += [its] if its else []
    return found


@rule("LS107", "shared-twice", "the data are sharded twice", "warning")
def shared_twice(history: EventHistory) -> Iterable[Finding] | str:
    """A rank's shard that a framework or a second sampler shards again."""
    findings, firsts = [], _firsts(history)
    for its in firsts:
        first = next(iter(its.values()))
        if first.begin.get("shared_twice"):
            shares = (first.begin.get("distributed") or {}).get("kind")
            evidence = f"a sampler of the loader deals samples to ranks, and {shares} deals them again"
            findings.append(_twice(_made(first), evidence, tuple(its)))
    streams = {event["rank"]: event for event in history.of("stream")}
    if len(streams) > 1 and _apart([event["samples"] for event in streams.values()]):
        evidence = "a shard takes every n-th part of what should be one stream, but each rank has its own stream"
        first_stream = next(iter(streams.values()))
        loader = next((its for its in firsts if any(it.begin.get("is_iterable") for it in its.values())), None)
        at = _made(next(iter(loader.values()))) if loader else first_stream.get("at")
        findings.append(_twice(at, evidence, tuple(streams)))
    made: dict[Any, dict[int, Event]] = defaultdict(dict)
    for rank in history.ranks:
        for key, event in numbered(history.of("dispatched", rank=rank)):
            made[key][rank] = event
    for by_rank in made.values():
        if name := _part_of_rank({rank: event.get("parts") or {} for rank, event in by_rank.items()}):
            evidence = f"one rank reads the stream for all, and `{name}` of the stream differs by rank: the samples of "
            evidence += "other ranks are never trained on"
            findings.append(_twice(next(iter(by_rank.values())).get("at"), evidence, tuple(by_rank)))
        elif asked := _asked({rank: event.get("asks") or {} for rank, event in by_rank.items()}):
            evidence = f"one rank reads the stream for all, and the stream uses `{asked[0]}` and `{asked[1]}`: "
            evidence += "the samples of other ranks are never trained on"
            findings.append(_twice(asked[2], evidence, tuple(by_rank)))
    return findings if firsts or streams or made else "training used no DataLoader"


def _part_of_rank(parts: dict[int, dict[str, Any]]) -> str | None:
    """What differs in each rank's stream: a list without a common element, or the rank next to the number of ranks."""
    if len(parts) < 2:
        return None
    names = [name for name in next(iter(parts.values())) if all(name in held for held in parts.values())]
    for name in names:
        values = {rank: held[name] for rank, held in parts.items()}
        lists = [set(value) for value in values.values() if isinstance(value, list)]
        if len(lists) == len(values) and all(one.isdisjoint(other) for one, other in combinations(lists, 2)):
            return name
        has_world = any(held[other] == len(parts) for held in parts.values() for other in names)
        if has_world and all(value == rank for rank, value in values.items()):
            return name
    return None


def _asked(asks: dict[int, dict[str, Any]]) -> tuple[str, str, Any] | None:
    """The names by which streams use their rank and the number of ranks, and where they use the rank."""
    first = next(iter(asks.values()))
    names = [name for name in first if len(asks) > 1 and all(name in held for held in asks.values())]
    mine = [name for name in names if all(held[name][0] in ("rank", rank) for rank, held in asks.items())]
    worlds = [name for name in names if any(word in name.lower() for word in _OF_ALL)]
    worlds = [name for name in worlds if all(held[name][0] in ("ranks", len(asks)) for held in asks.values())]
    return (mine[0], worlds[0], first[mine[0]][1]) if mine and worlds else None


def _twice(at: Any, evidence: str, ranks: tuple[int, ...]) -> Finding:
    cause = "the script shards the data, and the framework or a second sampler shards each rank's shard again"
    remedy = "shard once: give the framework the whole data set, or switch its sampler off"
    return Finding("LS107", place(at), evidence, cause, remedy, ranks, 0)


def _apart(streams: list[list[Any]]) -> bool:
    """True if the first samples of streams differ: one field differs throughout, and a label differs.

    A field that changes and is the same on all ranks shows that the streams are equal, but augmented differently.
    """
    samples = [both for one, other in combinations(streams, 2) for both in zip(one, other, strict=False)]
    rows = [list(zip(one or (), other or (), strict=False)) for one, other in samples]
    is_other = is_known = False
    for field in zip(*rows, strict=False):
        pairs = [pair for pair in field if None not in pair]
        first = [str(one) for one, _ in pairs[: len(streams[0])]]
        differing = sum(one != other for one, other in pairs)
        if not differing and len(set(first)) > 1:
            return False
        is_other |= differing == len(pairs) > 0
        is_known |= differing > 0 and (isinstance(pairs[0][0], list) or len(set(first)) < len(first))
    return is_other and is_known


@rule("LS108", "shares-wrong", "shards of ranks overlap or leave samples out")
def shares_wrong(history: EventHistory) -> Iterable[Finding] | str:
    """Samplers of ranks that deal from different orders, or to more ranks than there are."""
    groups, findings, seen = replicas(history), [], False
    fixed = _fixed(history)
    for its in _firsts(history) if groups else ():
        first = next(iter(its.values()))
        if first.shards > len(history.ranks):
            evidence = f"the sampler deals to {first.shards} ranks, but there are {len(history.ranks)}"
            findings.append(_wrong(first, evidence, "num_replicas is not the number of ranks", tuple(its)))
            continue
        mine = {rank: it for rank, it in its.items() if any(rank in group for group in groups)}
        own = _rank_in({rank: it.begin.get("held") or {} for rank, it in its.items()}, len(history.ranks))
        own = own if own and sources.deals(first.begin.get("sampler_in") or "", own) else None
        shares = {rank: _share(it, bool(own) or (rank, it.begin["loader"]) in fixed) for rank, it in mine.items()}
        known = {rank: share for rank, share in shares.items() if share}
        seen = seen or len(known) > 1
        for one, other in combinations(sorted(known), 2):
            found = _overlap(its[one], its[other], known[one], known[other], len(its))
            if found:
                seeds = {rank: (it.begin.get("distributed") or {}).get("seed") for rank, it in its.items()}
                cause = "each rank deals from its own order"
                cause += f": the seed of the sampler is {each_rank(seeds)}" if differ(seeds) else ""
                finding = _wrong(first, f"{found} {named([one, other])}", cause, tuple(its))
                file = first.begin.get("sampler_in") or ""
                rows = sources.seeds(file, own) if own else []
                findings.append(replace(finding, where=SourceLine(file, rows[0], "")) if rows else finding)
                break
    if groups and (seen or findings):
        return findings
    return "no whole epoch whose indices are known" if groups else _NO_GROUP


def _rank_in(held: dict[int, dict[str, int]], world: int) -> str | None:
    """The name by which samplers of the script hold their rank, if they also hold the number of ranks."""
    names = set.intersection(*map(set, held.values())) if len(held) > 1 else set()
    has_world = any(all(each[name] == world for each in held.values()) for name in names)
    found = sorted(name for name in names if all(each[name] == rank for rank, each in held.items()))
    return found[0] if found and has_world else None


def _wrong(first: Iteration, evidence: str, cause: str, ranks: tuple[int, ...]) -> Finding:
    remedy = "use one seed, epoch and num_replicas on all ranks, or give each rank [rank::world] of one permutation"
    return Finding("LS108", place(_made(first)), evidence, cause, remedy, ranks, first.begin["step"])


def _fixed(history: EventHistory) -> set[tuple[int, int]]:
    """Ranks and loaders that read the same samples in all epochs, in different orders: a split by hand."""
    found = set()
    for epochs in iterations(history).values():
        for rank in history.ranks:
            its = [by_rank[rank] for by_rank in epochs.values() if rank in by_rank and by_rank[rank].is_complete]
            sets = {frozenset(map(str, it.indices)) for it in its}
            if len(its) > 1 and len(sets) == 1 and its[0].indices != its[1].indices:
                found.add((rank, int(its[0].begin["loader"])))
    return found


def _share(iteration: Iteration, is_fixed: bool) -> set[int] | None:
    """A rank's samples of an epoch, as indices of the underlying data set. None: unknown, or drawn in another way.

    The last batch is excluded, because Accelerate fills it with samples from the start of the epoch.
    """
    mapped, indices = iteration.begin.get("mapped"), iteration.indices
    if (iteration.begin.get("distributed") or {}).get("even_batches"):
        indices = indices[: -(iteration.begin.get("batch_size") or 1)]
    dealt = iteration.shards > 1 or is_fixed
    if not iteration.is_complete or iteration.begin.get("replacement") or not (dealt or mapped) or not indices:
        return None
    if (iteration.begin.get("subset") and not mapped) or len(set(map(str, indices))) < len(indices):
        return None
    found = {int(index) for index in indices if isinstance(index, int)}
    return {mapped[index] for index in found if index < len(mapped)} if mapped else found


def _overlap(one: Iteration, other: Iteration, mine: set[int], theirs: set[int], world: int) -> str | None:
    size = max(mine | theirs) + 1 if one.begin.get("mapped") else one.begin.get("dataset_size")
    is_share = max(len(mine), len(theirs)) <= (1 + _PADDING) * (size or 0) / world + world
    same = len(mine & theirs)
    if not is_share or mine == theirs or same <= max(2 * world, _PADDING * len(mine)):
        return None
    return f"of {len(mine)} samples of an epoch, {same} are also on the other rank, of"


@rule("LS109", "workers-repeat", "all workers of a loader read the same samples")
def workers_repeat(history: EventHistory) -> Iterable[Finding] | str:
    """An IterableDataset with several workers that each yield the whole stream."""
    findings, seen = [], False
    for its in _firsts(history):
        wrong = []
        for rank, it in its.items():
            workers = it.begin.get("num_workers") or 0
            if it.begin.get("is_iterable") and workers > 1:
                seen = True
                digests = [it.sampled[n].get("digest") for n in range(2 * workers) if n in it.sampled]
                turns = [set(digests[:workers]), set(digests[workers:])]
                if len(digests) == 2 * workers and all(len(turn) == 1 for turn in turns) and turns[0] != turns[1]:
                    wrong.append(rank)
        if wrong:
            it = its[wrong[0]]
            evidence = f"the batches of all {it.begin['num_workers']} workers are bitwise equal on {named(wrong)}"
            cause = "each worker has a copy of the IterableDataset, and each copy yields all samples"
            remedy = "take a shard in __iter__: samples[info.id :: info.num_workers] with info = get_worker_info()"
            findings.append(Finding("LS109", place(_made(it)), evidence, cause, remedy, tuple(wrong), it.begin["step"]))
    return findings if seen else "no IterableDataset with several workers"


@rule("LS110", "ids-differ", "class or label ids differ between ranks")
def ids_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Words or classes whose numbers follow an order that differs by rank, such as that of a set, or hash()."""
    findings, seen = _vocabularies(history), any(history.of("vocabulary"))
    for event, by_rank in [*probes(history), *_held(history)] if not findings else ():
        columns = list(zip(*by_rank.values(), strict=False))
        seen = seen or bool(columns)
        for number in range(max((len(parts) for row in columns for parts in row), default=0)):
            fields = [[p[number] if number < len(p) else None for p in row[:2]] for row in columns]
            others = _renamed([pair for both in fields for pair in _pairs(both)])
            if len(others) > 5 and len(set(others)) > event.get("least", 1):
                shown = some([f"{a} is {b}" for a, b in dict.fromkeys(others)])
                evidence = f"the same samples have different ids on ranks 0 and 1, one for one: {shown}"
                cause = "the ids follow an order that differs by process: that of a set, or of files in a folder"
                remedy = "sort before numbering: for number, word in enumerate(sorted(words))"
                files = [event["at"][0] if event.get("at") else None, event.get("defined_in")]
                lines = sources.unordered(files)
                if not lines and (lines := _hashes(files)):
                    cause = "hash() of the same text differs between Python processes"
                    remedy = "use zlib.crc32(text.encode()), or another hash that is the same in every process"
                at = SourceLine(*lines[0], "") if lines else place(event.get("at"))
                findings.append(Finding("LS110", at, evidence, cause, remedy, tuple(by_rank), event["step"]))
                break
    return findings if seen else "no samples of data that a sampler deals to ranks were compared"


def _vocabularies(history: EventHistory) -> list[Finding]:
    """Dictionaries of the same name that number words that all ranks have in different ways."""
    told = {event["rank"]: event for event in reversed(list(history.of("vocabulary")))}
    for group in replicas(history):
        ids = {rank: told[rank]["ids"] for rank in group if rank in told}
        for name in sorted(set.intersection(*map(set, ids.values()))) if len(ids) == len(group) else ():
            words = set.intersection(*(set(each[name]) for each in ids.values()))
            apart = [word for word in words if differ({rank: each[name][word] for rank, each in ids.items()})]
            if len(words) >= _WORDS and 2 * len(apart) > len(words):
                first = min(apart)
                shown = each_rank({rank: each[name][first] for rank, each in ids.items()})
                evidence = f"`{name}` gives {first!r} the number {shown}"
                cause = "each rank numbers the words that its data contain, or in an order that differs by process"
                remedy = "all_gather_object the counts, add them up, and number the sorted words"
                event = told[group[0]]
                files = [event["at"][0] if event.get("at") else None]
                rows = sources.unordered(files) or sources.assigns(files[0], name.rpartition(".")[2])
                at = SourceLine(*rows[0], "") if rows else place(event.get("at"))
                return [Finding("LS110", at, evidence, cause, remedy, group, event["step"])]
    return []


def _hashes(files: list[str | None]) -> list[tuple[str, int]]:
    """Lines that call hash()."""
    calls = [(file, n.func) for file in files if file for n in sources.nodes(file) if isinstance(n, ast.Call)]
    return sorted({(file, name.lineno) for file, name in calls if isinstance(name, ast.Name) and name.id == "hash"})


def _renamed(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs that differ, if the numbers of the two ranks correspond one for one, and not by a constant shift."""
    forth, back = defaultdict(set), defaultdict(set)
    for a, b in pairs:
        forth[a].add(b)
        back[b].add(a)
    is_renamed = len(set(pairs)) <= _CLASHES * min(len(forth), len(back))
    is_shifted = len({b - a for a, b in pairs}) == 1
    return [pair for pair in pairs if pair[0] != pair[1]] if is_renamed and not is_shifted else []


def _held(history: EventHistory) -> list[tuple[Event, dict[int, list[list[Any]]]]]:
    """Integers that scripts without a loader hold, in the form of `probes`: each variable is a field of one sample."""
    told = {event["rank"]: event for event in history.of("numbers")}
    if len(told) < 2 or not replicas(history):
        return []
    names = sorted(set.intersection(*(set(event["held"]) for event in told.values())))
    rows = {rank: [[event["held"][name] for name in names]] for rank, event in sorted(told.items())}
    return [({**next(iter(told.values())), "least": _LEAST}, rows)]


@rule("LS113", "order-lost", "the order of the script's sampler is lost", "warning")
def order_lost(history: EventHistory) -> Iterable[Finding] | str:
    """Training loaders whose samples are dealt at random, although the script's sampler has its own order."""
    findings, firsts = {}, _firsts(history)
    for by_rank in firsts:
        first = next(iter(by_rank.values())).begin
        if told := first.get("reordered"):
            kind, at = told["kind"], told.get("at") or first.get("made_at") or first.get("at")
            dealt = first.get("distributed") or {}
            other = dealt.get("kind") if dealt.get("shuffle") else first.get("sampler_kind")
            evidence = f"the script's loader has {kind}, and a {other} gave its samples in a random order to "
            evidence += f"{named(by_rank)}: {some(map(str, next(iter(by_rank.values())).indices), 5)}"
            cause = f"the sampler that deals samples to ranks wraps or replaces {kind}, and it shuffles"
            remedy = f"let {kind} give each rank its shard (order[rank::world_size]) and disable the other sampler: "
            remedy += "use_distributed_sampler=False of Lightning's Trainer, use_seedable_sampler=False of "
            remedy += "Accelerate, or shuffle=False in your wrapper"
            findings[place(at)] = Finding("LS113", place(at), evidence, cause, remedy, tuple(by_rank), first["step"])
    return list(findings.values()) if firsts else "no DataLoader in training"


@rule("LS112", "inputs-differ", "the same samples have different inputs on each rank", "warning")
def inputs_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Inputs that each rank prepares in its own way, such as with the mean of its shard of the data."""
    findings, probed = {}, probes(history)
    for event, by_rank in probed:
        rows = [row for row in zip(*by_rank.values(), strict=False) if len({len(fields) for fields in row}) == 1]
        columns = [[p for p in column if None not in p] for column in zip(*map(_fields, rows), strict=False)]
        known = [[len(set(map(str, parts))) > 1 for parts in column] for column in columns if column]
        if len(known) > 1 and len(rows) > 1 and any(map(all, known)) and not all(map(any, known)):
            evidence = "samples with equal indices, read twice at the end, have unequal inputs on "
            evidence += f"{named(by_rank)}, and their other fields are equal"
            cause = "each rank prepares the data with its own statistics, or augments them once with its own seed"
            remedy = "compute the statistics on all ranks together, or on one rank, and broadcast them"
            found = event.get("dataset_at") or event.get("at")
            at = place(found)
            if lines := sources.set_in_prepare_data([found[0] if found else None, event.get("defined_in")]):
                cause = "Lightning calls prepare_data on only one rank of a machine: the others lack what it sets"
                remedy = "set it in setup, which runs on all ranks, and let prepare_data only write files"
            elif found and (lines := sources.made_on_one_rank(found[0], found[1])):
                cause = "only one rank sets this, and the others prepare the data without it"
            at = SourceLine(*lines[0], "") if lines else at
            findings[at] = Finding("LS112", at, evidence, cause, remedy, tuple(by_rank), event["step"])
    return list(findings.values()) if probed else "no samples of data that a sampler deals to ranks were compared"


def _fields(row: tuple[list[Any], ...]) -> list[tuple[Any, ...]]:
    return list(zip(*row, strict=True))


def _pairs(parts: list[Any]) -> list[tuple[int, int]]:
    is_whole = len(parts) == 2 and all(isinstance(part, list) for part in parts) and len(parts[0]) == len(parts[1])
    return list(zip(*parts, strict=True)) if is_whole else []


def probes(history: EventHistory, dealt: bool = True) -> list[tuple[Event, dict[int, list[list[Any]]]]]:
    """Samples of data sets that a sampler deals: the event of a rank, and by rank the fields of the same samples.

    Args:
        dealt: False: of data sets that no sampler deals.
    """
    found: list[tuple[Event, dict[int, list[list[Any]]]]] = []
    read = {(event["rank"], event["loader"]): event for event in history.of("probe")}
    for epochs in iterations(history).values():
        for by_rank in list(epochs.values())[:1]:
            its = {rank: it for rank, it in by_rank.items() if (rank, it.begin["loader"]) in read}
            its = {rank: it for rank, it in its.items() if (it.shards > 1) == dealt}
            events = {rank: read[rank, it.begin["loader"]] for rank, it in its.items()}
            sizes = {rank: event["dataset_size"] for rank, event in events.items()}
            if len(events) > 1 and not differ(sizes):
                common = sorted(set.intersection(*(set(event["samples"]) for event in events.values())), key=int)
                begin = next(iter(its.values())).begin
                told = {name: begin.get(name) for name in ("dataset", "dataset_at", "defined_in")}
                event = {**next(iter(events.values())), **told}
                found.append((event, {r: [e["samples"][index] for index in common] for r, e in events.items()}))
    return found


@rule("LS111", "same-noise", "all ranks draw the same random numbers", "warning")
def same_noise(history: EventHistory) -> Iterable[Finding] | str:
    """Noise in training that is equal on all ranks: N ranks use the same noise instead of N different ones."""
    groups, lines = replicas(history), dict[tuple[Any, ...], dict[int, dict[int, list[str]]]]()
    for event in history.of("drawn"):
        by_rank = lines.setdefault(tuple(event["at"]), {})
        by_rank.setdefault(event["rank"], {}).setdefault(event["step"], []).append(event["digest"])
    findings = []
    for at, drawn in lines.items():
        group = next((group for group in groups if set(group) <= drawn.keys()), None)
        if group is None or differ({rank: drawn[rank] for rank in group}):
            continue
        steps = sorted(drawn[group[0]])
        digests = [digest for each in drawn[group[0]].values() for digest in each]
        is_often = len(steps) >= _FEW_STEPS and steps[-1] - steps[0] < len(steps)
        if is_often and len(set(digests)) == len(digests) and not flows.takes_rows_of_rank(*at[:2]):
            evidence = f"what this line drew in {len(steps)} successive steps is equal on {named(group)}"
            cause = "the ranks started with the same seed and draw the same numbers"
            remedy = "draw noise from a generator per rank: torch.Generator().manual_seed(seed + rank)"
            findings.append(Finding("LS111", place(at), evidence, cause, remedy, group, steps[0]))
    return findings if lines and groups else "no line of the script drew random numbers in training"
