"""Rules on evaluations and metrics."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import facts, sources
from lockstep_audit.rules.buffers import outside, overwritten
from lockstep_audit.rules.facts import differ, each_rank, named, number_of, place, replicas, rule
from lockstep_audit.rules.loaders import Iteration, iterations

_UNEQUAL = 1.25
"""Shards whose sizes differ by this factor are unequal."""
_OFF = 0.01
"""A short last batch counts if it changes a mean by more than this."""
_WHOLE = 1e-6
_SEVERAL, _DIVISOR = 4, 20
_FEW = 12
"""A file with at most this many lines may have as many as there are samples by chance."""
_WAITS = ("barrier", "monitored_barrier")
"""Collectives that exchange nothing."""


@rule("LS601", "eval-duplicates", "an evaluation counts samples twice or leaves some out", "warning")
def eval_duplicates(history: EventHistory) -> Iterable[Finding] | str:
    """Padding of a sampler that an evaluation counts, unless the script removes duplicates."""
    findings, seen = list[Finding](), False
    for epochs in iterations(history).values():
        whole = (by_rank for by_rank in epochs.values() if all(it.is_complete for it in by_rank.values()))
        for by_rank in itertools.islice(whole, 1):  # Lightning begins with an evaluation of a few batches
            findings += _dropped(by_rank, history)
            its = {rank: it for rank, it in by_rank.items() if it.shards > 1 and it.end and not it.is_training}
            its = {rank: it for rank, it in its.items() if (it.end or {}).get("forwards_eval") and it.is_complete}
            if not its:
                continue
            seen = True
            first = next(iter(its.values()))
            size = first.begin.get("dataset_size")
            given = sum((it.end or {}).get("samples") or 0 for it in its.values())
            if len(its) < first.shards or size is None or given <= size:
                continue
            if any((it.end or {}).get("gathered") for it in its.values()):
                continue
            if _numbers_gathered(history, first):
                continue
            samples = number_of(given, "sample", "was", "were")
            evidence = f"{samples} evaluated on {named(its)}, but the data set has {size}"
            cause = "the sampler repeats samples so that all ranks have equally many"
            remedy = "indices without padding (range(rank, len(dataset), world_size)), or remove the repeated samples"
            at = place(first.begin.get("made_at") or first.begin.get("at"))
            gathers = list(history.of("gather", rank=first.begin["rank"]))
            if any(map(sources.cuts, {at.file if at else "", *((g.get("at") or [""])[0] for g in gathers)})):
                continue
            for gather in gathers:
                if first.begin["number"] < gather["number"] < (first.end or {})["number"]:
                    cause += f", and gather() at {facts.line(gather.get('at'))} keeps them"
                    at, remedy = place(gather.get("at")), "accelerator.gather_for_metrics(...), which removes them"
                    break
            findings.append(Finding("LS601", at, evidence, cause, remedy, tuple(its), first.begin["step"]))
    return findings if seen else "no evaluation of data that a sampler deals to ranks"


def _numbers_gathered(history: EventHistory, it: Iteration) -> bool:
    """True if ranks gathered the numbers of the samples, too: the script can tell which rows are repeated."""
    later = [e for e in history.of("collective", rank=it.begin["rank"]) if e["number"] > it.begin["number"]]
    firsts = [event["first"] for event in later if len(event.get("first") or ()) > 1]
    return any(each == it.indices[: len(each)] for each in firsts)


def _dropped(by_rank: dict[int, Iteration], history: EventHistory) -> list[Finding]:
    """Samples that no rank evaluates, because a sampler or loader drops the last ones."""
    its = [it for it in by_rank.values() if it.is_complete and not it.is_training and it.begin.get("drop_last")]
    its = [it for it in its if (it.end or {}).get("forwards_eval")]
    if not its or len(its) < its[0].shards:
        return []
    first, given = its[0], sum((it.end or {}).get("samples") or 0 for it in its)
    given = given if first.shards > 1 else (first.end or {})["samples"]
    size, dealt = first.begin.get("dataset_size"), first.begin.get("distributed") or {}
    if size is None or not 0 < given < size or first.begin.get("batch_size") is None:
        return []
    rests = [event for event in history.of("loader", rank=first.begin["rank"]) if event.get("subset")]
    if any(e["step"] == first.begin["step"] and e.get("dataset_size") == size - given for e in rests):
        return []  # another loop evaluates the rest
    at = first.begin.get("made_at") or first.begin.get("at")
    at = first.begin.get("sampler_at", at) if dealt.get("drop_last") else at
    evidence = f"{number_of(given, 'sample', 'was', 'were')} evaluated, but the data set has {size}"
    cause = "drop_last=True drops the last samples of a rank, or of the sampler"
    remedy = "set drop_last=False for evaluations"
    return [Finding("LS601", place(at), evidence, cause, remedy, tuple(by_rank), first.begin["step"])]


@rule("LS602", "eval-buffers-differ", "ranks evaluate with different buffers", "warning")
def eval_buffers_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Running statistics that differ between ranks when an evaluation begins."""
    wraps = {(event["rank"], event["model"]): event for event in history.of("wrap")}
    known = facts.keys(history, "wrap", "model", "at")
    by_turn: dict[Any, dict[int, Event]] = {}
    for event in history.of("buffers"):
        wrap = wraps.get((event["rank"], event["model"]))
        if wrap is None or not wrap["how"].startswith(("ddp", "fsdp")):
            continue
        key = known[event["rank"], event["model"]], facts.group_of(history, wrap), event["step"], str(event.get("at"))
        by_turn.setdefault(key, {}).setdefault(event["rank"], event)
    together = {key[:2]: events for key, events in reversed(by_turn.items()) if len(events) > 1}  # the first of each
    findings = []
    for events in together.values():
        digests, first = {rank: event["digests"] for rank, event in events.items()}, next(iter(events.values()))
        of_one = next(iter(digests.values()))
        names = [name for name in of_one if differ({rank: each.get(name) for rank, each in digests.items()})]
        if names:
            evidence = f"{number_of(len(names), 'buffer', 'differs', 'differ')} between {named(digests)}: "
            evidence += facts.some(names)
            cause = "each rank holds the statistics of its batches since the last training forward pass"
            remedy = "broadcast the buffers of rank 0 before an evaluation, or use torch.nn.SyncBatchNorm"
            at, step = place(first.get("at")), first["step"]
            if _are_frozen(names, wraps[first["rank"], first["model"]].get("frozen") or ()):
                cause = "train() of the whole model also sets its frozen part to train mode: its dropout is active and "
                cause += "its statistics change"
                remedy = "call eval() of the frozen part after each train() of the model, or override train() there"
                rows = sources.sets_train(at.file) if at else []
                at = SourceLine(at.file, rows[0], "") if at and rows else at
            findings.append(Finding("LS602", at, evidence, cause, remedy, tuple(digests), step))
    return findings if by_turn else "no wrapped model with buffers was evaluated after training"


def _are_frozen(buffers: list[str], frozen: Iterable[str]) -> bool:
    """True if all of these buffers belong to layers with frozen parameters."""
    layers = {name.rpartition(".")[0] for name in frozen}
    return all(name.rpartition(".")[0] in layers for name in buffers)


@rule("LS606", "buffers-part", "buffers of replicas differ", "warning")
def buffers_part(history: EventHistory) -> Iterable[Finding] | str:
    """A layer's averages, such as a codebook, that each rank computes from its own batches."""
    apart = [wrap for wrap in history.of("wrap") if wrap.get("synced") is False and wrap.get("buffers")]
    local = {(wrap["rank"], str(wrap["model"])): wrap for wrap in apart}
    ends = {event["rank"]: event.get("buffers") or {} for event in history.of("exit")}
    findings = []
    for (rank, model), wrap in local.items():
        group = facts.group_of(history, wrap)
        found = {each: ends.get(each, {}).get(model) or {} for each in group}
        names = [name for name in found[rank] if differ({each: digests.get(name) for each, digests in found.items()})]
        if rank == group[0] and all(found.values()) and names:
            evidence = f"at the end, {number_of(len(names), 'buffer', 'differs', 'differ')} between "
            evidence += f"{named(group)}: {facts.some(names)}"
            cause = "a layer computes them from its rank's batches, and broadcast_buffers=False leaves them different"
            remedy = "all_reduce the layer's sums before it updates the buffers"
            findings.append(Finding("LS606", place(wrap.get("at")), evidence, cause, remedy, group, None))
    is_seen = local or any(history.of("own_buffers")) or any(event.get("outside") for event in history.of("exit"))
    return [*findings, *overwritten(history), *outside(history)] if is_seen else "no layer of the script has buffers"


@rule("LS603", "integer-mean", "a mean of integers is rounded down")
def integer_mean(history: EventHistory) -> Iterable[Finding] | str:
    """A sum over ranks that is divided as an integer."""
    findings: list[Finding] = []
    for event in history.of("collective"):
        if event.get("divided_integer"):
            world = len(history.ranks)
            evidence = f"{event.get('op')} of {event.get('dtype')}: the division by {world} left a remainder"
            cause = "the tensor holds integers, so its mean is an integer, too"
            remedy = "call tensor.float() before the reduction"
            at, ranks = place(event.get("at")), tuple(history.ranks)
            findings.append(Finding("LS603", at, evidence, cause, remedy, ranks, event["step"]))
    for event in history.of("floor_division"):
        if event.get("remainder"):
            evidence = f"a sum over ranks was divided by {event['divisor']} with //, and left a remainder"
            at, ranks = place(event.get("at")), tuple(history.ranks)
            remedy = "divide with /, or add up counts and divide once"
            findings.append(Finding("LS603", at, evidence, "// rounds down", remedy, ranks, event["step"]))
    return findings if any(history.of("collective")) else "no collective was seen in Python"


@rule("LS604", "mean-of-means", "a metric is a mean of unequal means", "warning")
def mean_of_means(history: EventHistory) -> Iterable[Finding] | str:
    """A mean over batches or ranks that gives a small part the same weight as a large one."""
    findings: list[Finding] = []
    turns: dict[tuple[Any, ...], dict[int, Event]] = {}
    numbers: Counter[tuple[Any, ...]] = Counter()
    for event in history.of("collective"):
        if "value" in event:
            key = (*(event.get("at") or ["?", 0, ""]), event["step"])
            turns.setdefault((*key, numbers[key, event["rank"]]), {})[event["rank"]] = event
            numbers[key, event["rank"]] += 1
    by_hand = _unequal_by_hand(turns) if _is_of_one(history) else {}
    for (file, row, function, step, number), firsts in turns.items():
        words = _unequal_means(firsts) or _unequal_ratios(history, firsts)
        words = words or by_hand.get((file, row, function, step, number))
        if words:
            file, row, function = next(iter(firsts.values())).get("given_at") or (file, row, function)
            remedy = "add up the sums and counts of all batches and ranks, and divide once"
            cause = "the parts have unequal sizes, but each mean has the same weight"
            cause = "the metric of all samples is not the mean of those of shards" if "()" in words else cause
            at, ranks = SourceLine(file, row, function), tuple(firsts)
            findings.append(Finding("LS604", at, words, cause, remedy, ranks, step))
    return findings if turns else "ranks exchanged no single number"


def _unequal_means(firsts: dict[int, Event]) -> str | None:
    means = {rank: event["mean_of"] for rank, event in firsts.items() if event.get("mean_of")}
    off = {r for r, m in means.items() if "plain" in m and abs(m["plain"] - m["weighted"]) > _OFF * abs(m["weighted"])}
    uneven = {r: m for r, m in means.items() if m["unequal"] and (m["least"] * _UNEQUAL <= m["most"] or r in off)}
    if uneven:
        rank, mean = next(iter(uneven.items()))
        value = firsts[rank]["value"]
        least = min(mean["least"], mean.get("last", mean["least"]))
        words = f"the number is the mean of {mean['means']} means, each of {least} to {mean['most']} numbers: "
        return words + f"{value:.6g}; weighted it is {mean['weighted']:.6g} on rank {rank}"
    numbers = {rank: mean["numbers"] for rank, mean in means.items()}
    if len(means) == len(firsts) > 1 and min(numbers.values()) * _UNEQUAL < max(numbers.values()):
        return f"each rank contributes its own mean, over this many numbers: {each_rank(numbers)}"
    return None


def _is_of_one(history: EventHistory) -> bool:
    """True if ranks train one model: not one for each fold, or for each rank."""
    return bool(replicas(history)) and not any(history.of("hand_average"))


def _unequal_by_hand(turns: dict[tuple[Any, ...], dict[int, Event]]) -> dict[tuple[Any, ...], str]:
    """Quotients of counts, the same for all ranks and turns of a line, whose divisors differ in a turn, such as F1."""
    lines: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for key, firsts in turns.items():
        is_sum = all(e.get("reduce_op") in ("SUM", "AVG") and "by_hand" in e for e in firsts.values())
        if is_sum and len(firsts) > 1:
            lines[key[:3]].append(key)
    found = {}
    for keys in lines.values():
        told = {key: {rank: event["by_hand"] for rank, event in turns[key].items()} for key in keys}
        ways = set.intersection(*(set(by) for ranks in told.values() for by in ranks.values()))
        values = {(rank, event["value"]) for key in keys for rank, event in turns[key].items()}
        rests = [abs(Fraction(value).limit_denominator(_DIVISOR) - value) for _, value in values]
        if len(values) < _SEVERAL and min(rests) < _WHOLE:
            continue  # by chance, many pairs of counts have the quotient 2 / 3
        apart = {w: [k for k, ranks in told.items() if differ({r: by[w] for r, by in ranks.items()})] for w in ways}
        if apart and all(apart.values()):
            way, unequal = next(iter(apart.items()))
            shown = each_rank({rank: by[way] for rank, by in told[unequal[0]].items()})
            found[unequal[0]] = f"each rank contributes its own quotient of counts, which was divided by {shown}"
    return found


def _unequal_ratios(history: EventHistory, firsts: dict[int, Event]) -> str | None:
    """Accuracies, as numbers between 0 and 1, over unequal numbers of samples."""
    curves = {rank: event["result_of"] for rank, event in firsts.items() if "result_of" in event}
    ops = {event.get("reduce_op") for event in firsts.values()}
    is_of_one = _is_of_one(history) or {*curves.values()} <= {"exp", "sqrt", "std", "var"}
    curves = curves if ops <= {"SUM", "AVG", None} and is_of_one else {}
    if len(curves) == len(firsts) > 1 and differ({rank: event["value"] for rank, event in firsts.items()}):
        name = next(iter(curves.values()))
        return f"each rank contributes {name}() of its shard, and the mean of these is not that of the whole"
    if any(event.get("elements", 1) > 1 for event in firsts.values()):
        return None
    ratios = {r: e["ratio_of"] for r, e in firsts.items() if "ratio_of" in e and e.get("reduce_op") in ("SUM", "AVG")}
    if len(ratios) == len(firsts) and differ(ratios) and any(event["value"] for event in firsts.values()):
        if any(isinstance(by, list) for by in ratios.values()):
            shown = each_rank({rank: f"({facts.some(f'{n:.6g}' for n in by)})" for rank, by in ratios.items()})
            return f"each rank contributes a mean over classes of quotients, with the divisors {shown}"
        shown = each_rank({rank: f"{by:.6g}" for rank, by in ratios.items()})
        return f"each rank contributes its own quotient, which was divided by {shown}"
    counts: dict[int, int] = {}
    for rank, event in firsts.items():
        ends = [e for e in history.of("loader_end", rank=rank) if e["number"] < event["number"]]
        ends = [e for e in ends if not e.get("backwards")]
        count = ends[-1].get("samples") if ends else None
        hits = event["value"] * (count or 0)
        if not count or not 0 < event["value"] < 1 or abs(hits - round(hits)) > _WHOLE * count:
            return None
        counts[rank] = count
    if len(counts) > 1 and differ(counts):
        return f"each rank contributes a fraction of its samples: {each_rank(counts)}"
    return None


@rule("LS605", "metric-of-one-rank", "a metric of one rank's shard is logged", "warning")
def metric_of_one_rank(history: EventHistory) -> Iterable[Finding] | str:
    """self.log in an evaluation, in Lightning without sync_dist, or by a Trainer: a different number on each rank."""
    told: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for event in history.of("log"):
        if not event["exchanged"] and not event.get("only_zero") and not event.get("is_training"):
            key = (*(event.get("at") or ["?", 0, ""]), event["name"])
            told.setdefault(key, {}).setdefault(event["rank"], []).append(event["value"])
    findings, deciding = [], {event["name"] for event in history.of("log") if event.get("decides")}
    of_trainers = {event["name"] for event in history.of("log") if "decides" in event}
    for (file, row, function, name), by_rank in told.items():
        if len(by_rank) > 1 and differ(by_rank):
            turns = [dict(zip(by_rank, turn, strict=True)) for turn in zip(*by_rank.values(), strict=False)]
            firsts: dict[int, float] = next(filter(differ, turns), {})
            evidence = f"the first {name} that differs: {each_rank({r: f'{v:.6g}' for r, v in firsts.items()})}"
            evidence = evidence if firsts else f"ranks logged {name} a different number of times"
            cause = "each rank logs its own shard; logs, the best checkpoint and early stopping use rank 0's value"
            remedy = f'self.log("{name}", ..., sync_dist=True), or a torchmetrics metric'
            if name in of_trainers:
                remedy = "call accelerator.gather_for_metrics on the inputs of the metric"
            if name in deciding:
                cause = "each rank has the metric of its shard, so ranks may choose different best checkpoints"
            at = SourceLine(file, row, function)
            findings.append(Finding("LS605", at, evidence, cause, remedy, tuple(by_rank), None))
    parts, seen = _parts_apart(history)
    parts, is_known = [*parts, *_statistics(history)], seen or any(history.of("log"))
    return [*findings, *parts] if is_known else "no evaluation of data that a sampler deals to ranks"


def _statistics(history: EventHistory) -> list[Finding]:
    """Training statistics that a Trainer logs at the same step, with a different value on each rank."""
    told: dict[tuple[Any, ...], dict[int, float]] = {}
    for event in history.of("log"):
        if event.get("is_training"):
            told.setdefault((*event["at"], event["name"], event["step"]), {})[event["rank"]] = event["value"]
    findings: list[Finding] = []
    to_one = any(event.get("op") in ("reduce", "gather", "gather_object") for event in history.of("collective"))
    for (file, row, function, name, step), by_rank in told.items() if not to_one else ():
        least, most = min(by_rank.values()), max(by_rank.values())
        if len(by_rank) == len(history.ranks) and most - least > _WHOLE * max(abs(least), abs(most)):
            evidence = f"the first {name} that differs: {each_rank({r: f'{v:.6g}' for r, v in by_rank.items()})}"
            cause = "each rank counts its own batches; rank 0's value is shown and kept"
            remedy = 'accelerator.reduce(..., reduction="sum") of the sums and the counts, before dividing'
            at, ranks = SourceLine(file, row, function), tuple(by_rank)
            findings.append(Finding("LS605", at, evidence, cause, remedy, ranks, step))
    return findings


def _parts_apart(history: EventHistory) -> tuple[list[Finding], bool]:
    """Evaluations of a shard on each rank after which nothing is exchanged and no rank writes its own results."""
    findings, seen = list[Finding](), False
    by_trainer = facts.uses(history, "transformers")
    groups = [] if facts.uses(history, "lightning") or facts.uses(history, "pytorch_lightning") else replicas(history)
    for epochs in iterations(history).values():
        turns = [by_rank for by_rank in epochs.values() if _shares_evaluation(by_rank, groups, by_trainer)]
        seen = seen or bool(turns)
        if not turns or any(_exchanged(history, it) for by_rank in turns for it in by_rank.values()):
            continue
        by_rank, first = turns[0], next(iter(turns[0].values()))
        samples = each_rank({rank: (it.end or {}).get("samples") for rank, it in by_rank.items()})
        evidence = f"an evaluation of a shard ({samples} samples), and no collective before training continues"
        cause = "each rank has the metric of its shard; logs, the best checkpoint and early stopping use one shard"
        remedy = "all_reduce the evaluation's sums and counts, and divide once"
        at = place(first.begin.get("at"))
        rows = sources.returns(at.file, at.line) if at else []
        at = at._replace(line=rows[0]) if at and rows else at
        findings.append(Finding("LS605", at, evidence, cause, remedy, tuple(by_rank), first.begin["step"]))
    return findings, seen


def _shares_evaluation(by_rank: dict[int, Iteration], groups: list[tuple[int, ...]], by_trainer: bool) -> bool:
    """True if the ranks of a group each evaluate their own shard with the model that they train."""
    its = list(by_rank.values())
    parts = {rank: (it.begin.get("subset"), it.shards) for rank, it in by_rank.items()}
    is_whole = all(it.is_complete and not it.is_training for it in its)
    is_whole = is_whole and not (by_trainer and any(it.begin.get("by_framework") for it in its))
    is_dealt = all(it.shards > 1 for it in its) or (differ(parts) and all(it.begin.get("subset") for it in its))
    is_used = all((it.end or {}).get("forwards_eval") and it.begin["step"] for it in its)
    return is_whole and is_dealt and is_used and any(set(group) == by_rank.keys() for group in groups)


def _exchanged(history: EventHistory, it: Iteration) -> bool:
    """True if a rank exchanged anything in Python, or wrote a file, between the start of an evaluation and training."""
    later = [e["number"] for e in history.of("step", rank=it.begin["rank"]) if e["number"] > it.begin["number"]]
    end = min(later, default=float("inf"))
    loops = {str(e.get("at")) for e in history.of("loader")}  # there Accelerate exchanges the states of generators
    told = [e for e in history.of("collective", "save", rank=it.begin["rank"]) if str(e.get("at")) not in loops]
    told = [e for e in told if it.begin["number"] < e["number"] < end and e.get("op") not in _WAITS]
    return any(e["kind"] == "collective" or e["rank"] != min(history.ranks) for e in told)  # rank 0 saves checkpoints


@rule("LS607", "predictions-of-one-rank", "a file has the rows of one rank instead of all data", "warning")
def predictions_of_one_rank(history: EventHistory) -> Iterable[Finding] | str:
    """Rows that one rank writes for its own samples, after a loop over data that a sampler deals to ranks."""
    rows = {(text["rank"], text["path"]): text["lines"] for text in history.of("text")}
    saves = {(e["rank"], e["path"]): e for e in history.of("save") if (e["rank"], e.get("path")) in rows}
    turns = [by_rank for epochs in iterations(history).values() for by_rank in epochs.values()]
    turns = [by_rank for by_rank in turns if all(len(by_rank) == it.shards > 1 for it in by_rank.values())]
    findings: list[Finding] = []
    for (rank, path), save in saves.items():
        lines = rows[rank, path]
        for by_rank in turns:
            if rank not in by_rank or not _is_of_part(history, save, lines, by_rank):
                continue
            it = by_rank[rank]
            samples, size = (it.end or {})["samples"], it.begin["dataset_size"]
            evidence = f"{os.path.basename(path)}, which {named([rank])} wrote at {facts.line(save.get('at'))}, has "
            evidence += f"{lines} lines{', one of them a header' * (lines > samples)}: as many as the samples of "
            evidence += f"{named([rank])}, but the data set has {size}"
            cause = "no collective gathers the results of the other ranks, and they wrote no file"
            remedy = "dist.all_gather_object the rows before one rank writes them, or write a file for each rank"
            at = place(it.begin.get("at"))
            findings.append(Finding("LS607", at, evidence, cause, remedy, tuple(by_rank), save["step"]))
    return findings if turns and saves else "no file of rows, or no loop over data that is dealt to ranks"


def _is_of_part(history: EventHistory, save: Event, lines: int, by_rank: dict[int, Iteration]) -> bool:
    """True if one rank wrote as many lines as it had samples, and received nothing from the others."""
    it, rank = by_rank[save["rank"]], save["rank"]
    end, samples, size = it.end or {}, (it.end or {}).get("samples") or 0, it.begin.get("dataset_size") or 0
    is_whole = it.is_complete or end.get("batches") == it.begin.get("batches")
    if it.is_training or end.get("gathered") or save["step"] != it.begin["step"] or not is_whole:
        return False
    if lines - samples not in (0, 1) or not _FEW < lines < size:
        return False
    first, last = sorted((it.begin["number"], save["number"]))
    last = last if last == save["number"] else end.get("number", last)  # a file that was opened before the loop
    loops = {str(e.get("at")) for e in history.of("loader")}
    made = [e for e in history.of("collective", rank=rank) if first < e["number"] < last]
    made = [e for e in made if e.get("op") not in _WAITS and e.get("elements") != 1 and str(e.get("at")) not in loops]
    others = [e for e in history.of("save") if e["rank"] in by_rank and e["rank"] != rank]
    return not made and not any(e["step"] >= save["step"] for e in others)


@rule("LS802", "data-parallel", "torch.nn.DataParallel", "warning")
def data_parallel(history: EventHistory) -> Iterable[Finding] | str:
    """The wrapper of one process for several GPUs."""
    found = [event for event in history.of("wrap") if event["how"] == "data_parallel"]
    remedy = "use DistributedDataParallel with one process per GPU: torchrun --nproc-per-node N"
    cause = "it copies the model to all GPUs in each step, in the threads of one process"
    evidence = "the model is wrapped in DataParallel"
    return [Finding("LS802", place(e.get("at")), evidence, cause, remedy, (e["rank"],), 0) for e in found[:1]]


@rule("LS801", "shared-gpu", "several ranks use one GPU")
def shared_gpu(history: EventHistory) -> Iterable[Finding] | str:
    """Ranks of one group on one host whose models are on the same GPU."""
    hosts = {event["rank"]: event.get("host") for event in history.of("start")}
    by_gpu: dict[tuple[object, str], list[int]] = {}
    places = {}
    for event in history.of("device"):
        if event.get("uuid"):
            by_gpu.setdefault((hosts.get(event["rank"]), event["uuid"]), []).append(event["rank"])
            places[event["rank"]] = event.get("at")
    groups = replicas(history)
    together = {gpu for gpu, ranks in by_gpu.items() if any(len({*ranks} & {*group}) > 1 for group in groups)}
    shared = {gpu: sorted(set(by_gpu[gpu])) for gpu in together}
    findings = []
    for (_, uuid), ranks in shared.items():
        evidence = f"{each_rank(dict.fromkeys(ranks, f'GPU {uuid}'))}"
        cause = "torch.cuda.set_device(local_rank) is missing: every rank uses cuda:0"
        remedy = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything uses the GPU'
        findings.append(Finding("LS801", place(places[ranks[0]]), evidence, cause, remedy, tuple(ranks), 0))
    return findings if by_gpu else "no rank used a GPU"
