"""Rules on data: which samples each rank reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import Key, differ, each_rank, line, named, numbered, place, replicas, rule, some
from lockstep_audit.rules.loaders import Iteration, Iterations, iterations, restored
from lockstep_audit.rules.shares import probes, same_noise
from lockstep_audit.rules.waiting import waiting

_FEW = 8
"""At least this many different indices are needed before their order means anything."""
_FEW_INPUTS = 4
_NO_GROUP = "no ranks train one model together"
_OF_TORCH = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler", "BatchSampler")
_NO_LOADER = "training used no DataLoader"


def _made(iteration: Iteration) -> Any:
    return iteration.begin.get("made_at") or iteration.begin.get("at")


def _read_the_same(one: Iteration, other: Iteration) -> str | None:
    """The evidence that two ranks read the same samples. None: there is none."""
    common = sorted(one.sampled.keys() & other.sampled.keys())
    digests = [one.sampled[number].get("digest") for number in common]
    is_varied = len(set(digests)) > 1
    is_equal = bool(common) and digests == [other.sampled[number].get("digest") for number in common]
    length = min(len(one.indices), len(other.indices))
    order = one.indices[:length]
    same_order = length > 1 and order == other.indices[:length] and len(set(map(str, order))) > 1
    batches = f"the {len(common)} compared batches are bitwise equal"
    if is_equal and same_order:
        return f"the first {length} indices are equal ({some(map(str, order), 5)}), and {batches}"
    if is_equal and is_varied and not length:
        return batches
    same_subset = one.begin.get("subset") == other.begin.get("subset")
    if same_order and same_subset and _equal_part([(one.sampled[n], other.sampled[n]) for n in common]):
        shown = some(map(str, order), 5)
        return f"the first {length} indices are equal ({shown}), and so is a tensor of each compared batch"
    return None


def _equal_part(pairs: list[tuple[Event, Event]]) -> bool:
    """True if a tensor of the batches, such as the labels, is equal on both ranks and changes between batches."""
    one = [tuple(pair[0].get("digests") or ()) for pair in pairs]
    other = [tuple(pair[1].get("digests") or ()) for pair in pairs]
    both = zip(zip(*one, strict=False), zip(*other, strict=False), strict=False)
    return any(a == b and len(set(a)) > 1 for a, b in both)


def _overlap(one: Iteration, other: Iteration) -> bool:
    """True if two iterations of a rank were open during the same steps."""
    ends = [it.end["step"] if it.end else float("inf") for it in (one, other)]
    return bool(one.begin["step"] <= ends[1] and other.begin["step"] <= ends[0])


def _other_data(found: Iterations, key: Key, ranks: tuple[int, int], iteration: Iteration) -> bool:
    """True if the same steps of two ranks also use a loader whose data differ."""
    for other, epochs in found.items():
        for by_rank in epochs.values():
            if other == key or not set(ranks) <= by_rank.keys():
                continue
            pair = by_rank[ranks[0]], by_rank[ranks[1]]
            if all(it.is_training for it in pair) and _overlap(pair[0], iteration) and not _read_the_same(*pair):
                return True
    return False


@rule("LS101", "same-data", "several ranks train on the same samples")
def same_data(history: EventHistory) -> Iterable[Finding] | str:
    """Ranks whose training batches are equal, in content and order."""
    groups, found = replicas(history), iterations(history)
    if not groups:
        return _NO_GROUP
    findings, seen = [], False
    for key, epochs in found.items():
        for by_rank in list(epochs.values())[:1]:
            training = {rank: it for rank, it in by_rank.items() if it.is_training}
            pairs = {pair for group in groups for pair in combinations([rank for rank in group if rank in training], 2)}
            seen = seen or bool(pairs)
            same = {pair: _read_the_same(training[pair[0]], training[pair[1]]) for pair in sorted(pairs)}
            equal = [pair for pair, evidence in same.items() if evidence]
            equal = [pair for pair in equal if not _parted(history, pair, training)]
            if equal and not _other_data(found, key, equal[0], training[equal[0][0]]):
                ranks = tuple(sorted({rank for pair in equal for rank in pair}))
                finding = _same_data(training[ranks[0]], ranks, str(same[equal[0]]), len(by_rank))
                begins = {rank: training[rank].begin for rank in ranks}
                findings.append(_resumed(history, finding, begins) if begins[ranks[0]].get("is_iterable") else finding)
    if not found:
        findings, seen = _same_inputs(history, groups), any(history.of("inputs"))
    return findings if seen else _NO_LOADER


def _parted(history: EventHistory, pair: tuple[int, int], its: dict[int, Iteration]) -> bool:
    """True if the script gives the models of two ranks different parts of the same batches: samples, or tokens."""
    given = [[e for e in history.of("inputs", rank=rank) if e["number"] > its[rank].begin["number"]] for rank in pair]
    read = [max((e.get("elements") or 0 for e in its[rank].sampled.values()), default=0) for rank in pair]
    apart = [one["digest"] != other["digest"] for one, other in zip(*given, strict=False)]
    most = max((e.get("elements") or 0 for events in given for e in events), default=0)
    is_part = most > 0 and read[0] == read[1] and not read[0] % most and 1 < read[0] // most <= len(its)
    return len(apart) > 1 and all(apart) and is_part


def _same_inputs(history: EventHistory, groups: list[tuple[int, ...]]) -> list[Finding]:
    """Batches that a script makes without a loader, and that are equal on all ranks."""
    given: dict[Any, dict[int, list[Event]]] = {}
    for event in history.of("inputs"):
        given.setdefault(event["model"], {}).setdefault(event["rank"], []).append(event)
    for by_rank in given.values():
        for group in groups:
            digests = {rank: [event["digest"] for event in by_rank.get(rank, ())] for rank in group}
            first = digests[group[0]]
            if len(first) >= _FEW_INPUTS and len(set(first)) == len(first) and not differ(digests):
                drawn = [each.where for each in same_noise(history) if isinstance(each, Finding)]
                at = drawn[0] if drawn else _seeded(place(by_rank[group[0]][0].get("at")))
                evidence = f"the inputs of the model were equal on {named(group)} in "
                evidence += f"each of the first {len(first)} steps, and changed from step to step"
                cause = "the script draws its batches with the same seed on all ranks"
                remedy = "draw each rank's data from its own generator: torch.Generator().manual_seed(seed + rank)"
                begins = {rank: by_rank[rank][0] for rank in group}
                return [_resumed(history, Finding("LS101", at, evidence, cause, remedy, group, 0), begins)]
    return []


def _seeded(where: SourceLine | None) -> SourceLine | None:
    """The line of a file that gives all ranks the same seed; else the given line."""
    row = sources.seeds_alike(where.file) if where else None
    return where._replace(line=row, function="") if where and row else where


def _resumed(history: EventHistory, finding: Finding, begins: dict[int, Event]) -> Finding:
    """The finding, at the line that gives all ranks the same generator state, if there is such a line."""
    if not (at := restored(history, begins)):
        return finding
    cause = "every rank restored its generator from one file, which holds the state of one rank"
    remedy = "save the states of all ranks (dist.all_gather_object) and restore each rank's own; or reseed by rank"
    return replace(finding, where=at, cause=cause, remedy=remedy)


def _same_data(iteration: Iteration, ranks: tuple[int, ...], evidence: str, world: int) -> Finding:
    begin = iteration.begin
    dealt = begin.get("distributed")
    if dealt and iteration.end and iteration.end["batches"] < int(dealt.get("replicas") or 1):
        cause = f"the data set has fewer batches than the {dealt['replicas']} ranks, so all ranks got the same ones"
    elif dealt and "even_batches" in dealt:
        cause = "each rank reads its own data set, or the sampler below draws a different order on each rank"
    elif dealt:
        cause = f"the sampler has num_replicas={dealt.get('replicas')} and rank={dealt.get('rank')} on {named(ranks)}"
    elif begin.get("is_iterable"):
        cause = "an IterableDataset yields all of its samples on every rank"
    else:
        sampler = begin.get("sampler_kind") or "sampler"
        cause = f"no DistributedSampler: the {sampler} draws the same order on every rank, because seeds are equal"
    remedy = "DataLoader(..., sampler=DistributedSampler(dataset), shuffle=False), and sampler.set_epoch(epoch)"
    if begin.get("is_iterable"):
        remedy = "give each rank its own shard inside __iter__: itertools.islice(samples, rank, None, world_size)"
        if begin.get("dataset") == "IterableDataset":  # of the package datasets
            remedy = "datasets.distributed.split_dataset_by_node(dataset, rank=rank, world_size=world_size)"
    remedy = _of_own_sampler(begin) or remedy
    said = f"in epoch {begin.get('epoch', 0)} of this loader, {evidence} on {named(ranks)}"
    return Finding("LS101", place(_made(iteration)), said, cause, remedy, ranks, begin["step"])


def _of_own_sampler(begin: Event) -> str | None:
    """The remedy if the script's own sampler forms batches, such as one of P classes with K samples each."""
    kind = str(begin.get("sampler_kind") or "RandomSampler")
    if begin.get("is_iterable") or kind in _OF_TORCH or begin.get("distributed"):
        return None
    return f"let {kind} give each rank its own batches: draw with seed + rank, or take [rank::world_size] of one order"


@rule("LS102", "no-set-epoch", "every epoch has the same order")
def no_set_epoch(history: EventHistory) -> Iterable[Finding] | str:
    """Loaders that shuffle but repeat the same order in every epoch."""
    findings, seen = [], False
    for epochs in iterations(history).values():
        by_rank: dict[int, list[Iteration]] = {}
        for each in epochs.values():
            for rank, iteration in each.items():
                if iteration.is_training and _shuffles(iteration):
                    by_rank.setdefault(rank, []).append(iteration)
        several = {rank: its for rank, its in by_rank.items() if len(its) > 1}
        seen = seen or bool(several)
        same = tuple(rank for rank, its in several.items() if _same_order(history, its))
        if same and len(same) == len(several):
            findings.append(_same_epochs(history, several[same[0]], same))
    return findings if seen else "no shuffling loader ran two epochs of training"


def _shuffles(iteration: Iteration) -> bool:
    dealt = iteration.begin.get("distributed") or {}
    return bool(dealt["shuffle"] if dealt.get("shuffle") is not None else iteration.begin.get("shuffles"))


def _set_epochs(history: EventHistory, iteration: Iteration) -> int:
    begin = iteration.begin
    return sum(event.get("sampler") == begin.get("sampler") for event in history.of("set_epoch", rank=begin["rank"]))


def _same_order(history: EventHistory, its: list[Iteration]) -> bool:
    epochs = {(it.begin.get("distributed") or {}).get("epoch") for it in its}
    if len(epochs) > 1:
        return False
    if None not in epochs and 0 < _set_epochs(history, its[0]) < len(its):
        return False  # this loader is read twice per epoch on purpose
    orders = [it.indices for it in its]
    length = min(map(len, orders))
    first = orders[0][:length]
    return len(set(map(str, first))) >= _FEW and all(order[:length] == first for order in orders)


def _same_epochs(history: EventHistory, its: list[Iteration], ranks: tuple[int, ...]) -> Finding:
    begin = its[0].begin
    dealt, calls = begin.get("distributed") or {}, _set_epochs(history, its[0])
    first = some(map(str, its[0].indices), 5)
    evidence = f"{len(its)} epochs of this loader had the same order: {first}, ..."
    if not dealt:
        cause = "the sampler's generator starts from the same seed in each epoch"
        remedy = "seed it once, or by epoch"
    elif calls:
        cause = f"sampler.set_epoch was called {calls} times with the same number, {dealt.get('epoch')}"
        remedy = "call sampler.set_epoch(epoch) with the number of the epoch"
    else:
        cause = "the script never called set_epoch of the DistributedSampler, which shuffles by seed + epoch"
        remedy = "call sampler.set_epoch(epoch) before each `for batch in loader`"
    at = place((not begin.get("by_framework") and begin.get("at")) or _made(its[0]))
    return Finding("LS102", at, evidence, cause, remedy, ranks, its[1].begin["step"])


@rule("LS103", "split-differs", "ranks split the data set differently")
def split_differs(history: EventHistory) -> Iterable[Finding] | str:
    """random_split, or a Subset, that differs by rank below a sampler that deals one data set to all ranks."""
    found = iterations(history)
    dealt = [by_rank for epochs in found.values() for by_rank in list(epochs.values())[:1] if _is_dealt(by_rank)]
    sizes = {it.begin.get("dataset_size") for by_rank in dealt for it in by_rank.values()}
    findings, drawn = [], [each for each in _splits(history) if not any("by" in event for event in each.values())]
    for splits in drawn:
        digests = {rank: event["digest"] for rank, event in splits.items()}
        if differ(digests) and any(set(event["lengths"]) & sizes for event in splits.values()):
            event = next(iter(splits.values()))
            findings.append(_split(event, tuple(digests), f"random_split into {event['lengths']}"))
    if not findings:
        for by_rank in dealt:
            subsets = {rank: it.begin.get("subset") for rank, it in by_rank.items()}
            if differ(subsets) and None not in subsets.values():
                event = next(iter(by_rank.values())).begin
                drawn_at = _ordered_apart(history, event)
                event = {**event, "at": drawn_at or event.get("dataset_at") or event.get("made_at") or event.get("at")}
                loader = line(event.get("made_at") or next(iter(by_rank.values())).begin.get("at"))
                findings.append(_split(event, tuple(subsets), f"the Subset of the loader at {loader}"))
        findings = list({finding.where: finding for finding in reversed(findings)}.values())
    if findings or drawn or any(it.begin.get("subset") for by_rank in dealt for it in by_rank.values()):
        return findings
    return "no sampler deals a random_split or Subset to ranks"


def _ordered_apart(history: EventHistory, begin: Event) -> Any:
    """Where the script last drew an order of at least as many samples before a loop, if ranks drew different ones."""
    drawn = [each for each in _splits(history, "order") if len(each) == len(history.ranks)]
    firsts = [each[begin["rank"]] for each in drawn if differ({rank: event["digest"] for rank, event in each.items()})]
    sizes = [e for e in firsts if e["number"] < begin["number"] and e["length"] >= (begin.get("dataset_size") or 0)]
    return sizes[-1].get("at") if sizes else None


def _splits(history: EventHistory, kind: str = "split") -> list[dict[int, Event]]:
    """What split the data sets, in the order of rank 0: the events of the same call, by rank."""
    found: dict[Any, dict[int, Event]] = {}
    for rank, events in history.by_rank(kind).items():
        for key, event in numbered(events):
            found.setdefault(key, {})[rank] = event
    return list(found.values())


def _drawn_apart(history: EventHistory, sizes: set[Any]) -> Event | None:
    """The call that took different samples on each rank, equally many: of one of these sizes, or the only such line."""
    found = [each for each in _splits(history) if len(each) == len(history.ranks) > 1]
    found = [each for each in found if not differ({rank: event["lengths"] for rank, event in each.items()})]
    apart = [next(iter(s.values())) for s in found if differ({rank: event["digest"] for rank, event in s.items()})]
    fitting = [event for event in apart if sizes & {*event["lengths"]}]
    is_one = len({str(event.get("at")) for event in apart}) == 1
    return fitting[0] if fitting else apart[0] if is_one else None


def _is_dealt(by_rank: dict[int, Iteration]) -> bool:
    """True if one data set is dealt to these ranks, each with its own shard."""
    parts = {(it.begin.get("distributed") or {}).get("rank") for it in by_rank.values()}
    return len(by_rank) > 1 and all(it.shards == len(by_rank) for it in by_rank.values()) and len(parts) == len(by_rank)


def _split(event: Event, ranks: tuple[int, ...], what: str) -> Finding:
    evidence = f"{what} drew different indices on {named(ranks)}, but a sampler deals them out as if they were equal"
    cause = "the split depends on each rank's random state: one rank trains on samples that another validates on"
    remedy = "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)), or split before ranks start"
    return Finding("LS103", place(event.get("at")), evidence, cause, remedy, ranks, event["step"])


@rule("LS104", "uneven-loaders", "ranks have different numbers of batches")
def uneven_loaders(history: EventHistory) -> Iterable[Finding] | str:
    """Training loaders with different numbers of batches on the ranks of a group, so that collectives do not match."""
    groups, found = replicas(history), iterations(history)
    if not groups:
        return _NO_GROUP
    findings, seen, waits = [], False, bool(waiting(history))
    for epochs in found.values():
        for by_rank in epochs.values():
            for group in groups:
                its = {rank: by_rank[rank] for rank in group if rank in by_rank}
                is_open = any(it.end is None or (waits and not it.is_complete) for it in its.values())
                if len(its) > 1 and (is_open or any(it.is_training for it in its.values())):
                    seen = True
                    findings += _uneven(history, its)
            if findings:
                return findings
    return findings if seen else _NO_LOADER


def _steps_are_equal(history: EventHistory, its: dict[int, Iteration]) -> bool:
    """True if all ranks made equally many steps until the next iteration of a loader, or until they ended.

    Ranks without data then take part with empty batches.
    """
    steps = {}
    for rank, it in its.items():
        later = [e for e in history.of("loader", "exit", rank=rank) if e["number"] > it.begin["number"]]
        steps[rank] = min(later, key=lambda e: int(e["number"]))["step"] - it.begin["step"] if later else None
    return None not in steps.values() and not differ(steps) and any(steps.values())


def _uneven(history: EventHistory, its: dict[int, Iteration]) -> list[Finding]:
    lengths = {rank: it.begin.get("batches") for rank, it in its.items()}
    ends = {rank: it.end for rank, it in its.items()}
    backwards = {rank: end.get("backwards", 0) for rank, end in ends.items() if end}
    left = [event for event in history.of("exit") if event["rank"] in its]  # the last epoch's end may be missing
    if any(event.get("joined") for event in [*ends.values(), *left] if event) or not _exchange(history, its):
        return []
    given = {rank: end["batches"] for rank, end in ends.items() if end}
    if any(not count and its[rank].begin.get("by_framework") for rank, count in given.items()):
        return []  # one rank reads for all
    is_over = {rank for rank, it in its.items() if it.is_complete}
    if differ(lengths) and None not in lengths.values():
        shown = f"len(loader) is {each_rank(lengths)}"
        if len(backwards) == len(its) and not differ(backwards) and any(backwards.values()):
            return []
    elif None in lengths.values() and is_over and differ(backwards) and differ(given):
        if _steps_are_equal(history, its):
            return []
        shown = f"batches in this epoch: {each_rank(given)}"
    else:
        return []
    first = next(iter(its.values()))
    evidence = shown + (f"; backward passes: {each_rank(backwards)}" if differ(backwards) else "")
    sizes = {rank: it.begin.get("dataset_size") for rank, it in its.items()}
    cause = f"each rank has its own size of data set: {each_rank(sizes)}" if differ(sizes) else None
    remedy = "use a DistributedSampler over one data set (it makes shards equal), stop all ranks at the fewest "
    remedy += "batches, or `with model.join():`"
    return [Finding("LS104", place(_made(first)), evidence, cause, remedy, tuple(its), first.begin["step"])]


def _exchange(history: EventHistory, its: dict[int, Iteration]) -> bool:
    """True if the ranks exchanged anything in backward passes, and not equally often."""
    counts = dict.fromkeys(its, 0)
    for step in history.of("step"):
        if step["rank"] in counts:
            synced = [each.get("synced") for each in step.get("backwards") or ()]
            counts[step["rank"]] += sum(each is not False for each in synced)
    return any(counts.values()) or not any(history.of("step"))


@rule("LS105", "own-data-set", "a sampler deals data sets that differ between ranks")
def own_data_set(history: EventHistory) -> Iterable[Finding] | str:
    """A sampler that deals one data set to all ranks, although sizes or contents differ."""
    findings, probed = [], probes(history)
    dealt = [by_rank for e in iterations(history).values() for by_rank in list(e.values())[:1] if _is_dealt(by_rank)]
    for by_rank in dealt:
        sizes = {rank: it.begin.get("dataset_size") for rank, it in by_rank.items()}
        loader = next(iter(by_rank.values())).begin["loader"]
        evidence = next((_other_contents(*each) for each in probed if each[0]["loader"] == loader), None)
        if differ(sizes) and None not in sizes.values():
            evidence = f"the data set has {each_rank({rank: f'{size} samples' for rank, size in sizes.items()})}"
        if evidence:
            first = next(iter(by_rank.values()))
            drawn = _drawn_apart(history, {*sizes.values()})
            cause = "each rank makes its own data set, and the sampler takes a different shard of each"
            remedy = "make the data set from a fixed seed or one file, or read it on rank 0 and broadcast it"
            if drawn:
                call = f"{drawn.get('by', 'random_split')}()"
                cause = f"{call} took different samples on each rank, and the sampler takes a different shard of each"
                remedy = f"seed {call}, or whatever draws its indices, equally on all ranks"
            at = place(drawn.get("at") if drawn else _made(first))
            findings.append(Finding("LS105", at, evidence, cause, remedy, tuple(by_rank), 0))
    if findings or probed:
        return list({finding.where: finding for finding in reversed(findings)}.values())
    return "the contents of data sets were not compared" if dealt else "no sampler deals a data set to ranks"


def _other_contents(event: Event, by_rank: dict[int, list[list[Any]]]) -> str | None:
    """Evidence if samples have different contents on each rank, in all of their fields, such as inputs and labels.

    A rank that only augments its inputs leaves the labels as they are.
    """
    rows = list(zip(*by_rank.values(), strict=False))
    fields = [list(zip(*row, strict=False)) for row in rows]
    count = min(map(len, fields), default=0)
    known = [[field[n] for field in fields if None not in field[n]] for n in range(count)]
    known = [column for column in known if column]
    other = [[len(set(map(str, parts))) > 1 for parts in column] for column in known]
    is_wide = len(known) > 1 or event.get("dataset") == "TensorDataset"
    if not (is_wide and all(map(any, other)) and any(map(all, other)) and len(rows) > 1):
        return None
    return f"samples with equal indices, read at the end, have different contents on {named(by_rank)}, in all fields"


@rule("LS106", "whole-data", "every rank trains on the whole data set", "warning")
def whole_data(history: EventHistory) -> Iterable[Finding] | str:
    """Loaders without a shard for each rank, shuffled differently on each rank: one epoch is N epochs."""
    groups, found = replicas(history), iterations(history)
    if not groups:
        return _NO_GROUP
    findings, seen = [], False
    own = {event["loader"] for event, by_rank in probes(history, dealt=False) if _other_contents(event, by_rank)}
    for epochs in found.values():
        for by_rank in list(epochs.values())[:1]:
            its = {r: it for r, it in by_rank.items() if it.is_training and it.is_complete and it.shards == 1}
            its = {rank: it for rank, it in its.items() if any(rank in group for group in groups)}
            if len(its) < 2:
                continue
            seen = True
            orders = {rank: it.indices for rank, it in its.items()}
            whole = [_is_whole(it) for it in its.values()]
            subsets = differ({rank: (it.begin.get("subset"), it.begin.get("dataset_size")) for rank, it in its.items()})
            is_own = next(iter(its.values())).begin["loader"] in own  # each rank has its own files
            if all(whole) and differ(orders) and not subsets and not is_own:
                findings.append(_whole(next(iter(its.values())), tuple(its)))
    return findings if seen else "no loader without a distributed sampler gave every rank a whole epoch"


def _is_whole(iteration: Iteration) -> bool:
    indices, size = iteration.indices, iteration.begin.get("dataset_size") or 0
    return size >= _FEW and len({str(index) for index in indices}) == len(indices) > 0.9 * size


def _whole(iteration: Iteration, ranks: tuple[int, ...]) -> Finding:
    size = iteration.begin.get("dataset_size")
    evidence = f"each of {named(ranks)} read all {size} indices in one epoch, in its own order"
    cause = f"no DistributedSampler around this {line(_made(iteration))} loader, unless each rank reads different files"
    remedy = _of_own_sampler(iteration.begin) or "sampler=DistributedSampler(dataset)"
    remedy += ", or `# lockstep: ignore[LS106]` if each rank has its own files"
    return Finding("LS106", place(_made(iteration)), evidence, cause, remedy, ranks, iteration.begin["step"])
