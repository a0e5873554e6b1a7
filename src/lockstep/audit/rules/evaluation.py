"""Rules on evaluations and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep.audit.events import Event, History
from lockstep.audit.findings import Finding, Place
from lockstep.audit.rules import sources
from lockstep.audit.rules.facts import differ, each_rank, group_of, keys, line, named, place, replicas, rule, some
from lockstep.audit.rules.loaders import iterations

_UNEQUAL = 1.25
"""Parts whose sizes differ by this factor are unequal."""
_WHOLE = 1e-6


@rule("LS601", "eval-duplicates", "an evaluation counts samples twice", "warning")
def eval_duplicates(history: History) -> Iterable[Finding] | str:
    """Padding of a sampler that an evaluation counts, unless the script takes duplicates out."""
    findings, seen = [], False
    for epochs in iterations(history).values():
        for by_rank in list(epochs.values())[:1]:
            its = {rank: it for rank, it in by_rank.items() if it.shards > 1 and it.end and not it.is_training}
            its = {rank: it for rank, it in its.items() if (it.end or {}).get("forwards_eval") and it.is_complete}
            if not its:
                continue
            seen = True
            first = next(iter(its.values()))
            size, given = (
                first.begin.get("dataset_size"),
                sum((it.end or {}).get("samples") or 0 for it in its.values()),
            )
            if len(its) < first.shards or size is None or given <= size:
                continue
            if any((it.end or {}).get("gathered") for it in its.values()):
                continue
            evidence = f"{given} samples were evaluated on {named(its)}, and the data set has {size}"
            cause = "the sampler repeats samples until all ranks have equally many"
            remedy = "indices without padding (range(rank, len(dataset), world_size)), or take the repeated samples out"
            at = place(first.begin.get("made_at") or first.begin.get("at"))
            for gather in history.of("gather", rank=first.begin["rank"]):
                if sources.cuts((gather.get("at") or [""])[0]):
                    at = None
                    break
                if first.begin["number"] < gather["number"] < (first.end or {})["number"]:
                    cause += f", and gather() at {line(gather.get('at'))} keeps them"
                    at, remedy = place(gather.get("at")), "accelerator.gather_for_metrics(...), which takes them out"
                    break
            if at is not None:
                findings.append(Finding("LS601", at, evidence, cause, remedy, tuple(its), first.begin["step"]))
    return findings if seen else "no evaluation on data that a sampler deals to ranks"


@rule("LS602", "eval-buffers-differ", "ranks evaluate with different buffers", "warning")
def eval_buffers_differ(history: History) -> Iterable[Finding] | str:
    """Running statistics that differ between ranks when an evaluation begins."""
    wraps = {(event["rank"], event["model"]): event for event in history.of("wrap")}
    known = keys(history, "wrap", "model", "at")
    by_model: dict[object, dict[int, dict[str, str]]] = {}
    places: dict[object, Event] = {}
    seen = False
    for event in history.of("buffers"):
        wrap = wraps.get((event["rank"], event["model"]))
        if wrap is None or not wrap["how"].startswith(("ddp", "fsdp")):
            continue
        seen = True
        key = known[event["rank"], event["model"]], group_of(history, wrap)
        by_model.setdefault(key, {}).setdefault(event["rank"], event["digests"])
        places.setdefault(key, event)
    findings = []
    for model, digests in by_model.items():
        names = [
            name
            for name in next(iter(digests.values()))
            if differ({rank: each.get(name) for rank, each in digests.items()})
        ]
        if names and len(digests) > 1:
            evidence = f"{len(names)} buffers differ between {named(digests)}: {some(names)}"
            cause = "each rank has the statistics of its own batches since the last forward pass in training"
            remedy = "broadcast the buffers of rank 0 before an evaluation, or torch.nn.SyncBatchNorm"
            at, step = place(places[model].get("at")), places[model]["step"]
            findings.append(Finding("LS602", at, evidence, cause, remedy, tuple(digests), step))
    return findings if seen else "no wrapped model with buffers was evaluated after training"


@rule("LS606", "buffers-part", "buffers of replicas differ", "warning")
def buffers_part(history: History) -> Iterable[Finding] | str:
    """Averages of a layer's own, such as a codebook, that each rank computes from its own batches."""
    local = {
        (w["rank"], str(w["model"])): w for w in history.of("wrap") if w.get("synced") is False and w.get("buffers")
    }
    ends = {event["rank"]: event.get("buffers") or {} for event in history.of("exit")}
    findings = []
    for (rank, model), wrap in local.items():
        group = group_of(history, wrap)
        found = {each: ends.get(each, {}).get(model) or {} for each in group}
        names = [name for name in found[rank] if differ({each: digests.get(name) for each, digests in found.items()})]
        if rank == group[0] and all(found.values()) and names:
            evidence = f"at the end, {len(names)} buffers differ between {named(group)}: {some(names)}"
            cause = "a layer computes them from the batches of its rank, and broadcast_buffers=False leaves them so"
            remedy = "all_reduce what the layer adds up, before it changes the buffers"
            findings.append(Finding("LS606", place(wrap.get("at")), evidence, cause, remedy, group, None))
    return findings if local else "no model with buffers was wrapped with broadcast_buffers=False"


@rule("LS603", "integer-mean", "a mean of whole numbers is rounded down")
def integer_mean(history: History) -> Iterable[Finding] | str:
    """A sum over ranks that is divided as a whole number."""
    calls, findings = [event for event in history.of("collective") if "divided_integer" in event], {}
    for event in calls:
        if event["divided_integer"] and str(event.get("at")) not in findings:
            world = len(history.ranks)
            evidence = f"{event.get('op')} of {event.get('dtype')}: the division by {world} left a remainder"
            cause = "the tensor holds whole numbers, so its mean does, too"
            remedy = "tensor.float() before the reduction"
            ranks = tuple(history.ranks)
            at = place(event.get("at"))
            findings[str(event.get("at"))] = Finding("LS603", at, evidence, cause, remedy, ranks, event["step"])
    for event in history.of("floor_division"):
        if event.get("remainder"):
            evidence = f"a sum over ranks was divided by {event['divisor']} with //, and left a remainder"
            at, ranks, remedy = (
                place(event.get("at")),
                tuple(history.ranks),
                "divide with /, or add counts and divide once",
            )
            findings[str(at)] = Finding("LS603", at, evidence, "// rounds down", remedy, ranks, event["step"])
    return list(findings.values()) if any(history.of("collective")) else "no collective was seen in Python"


@rule("LS604", "mean-of-means", "a metric is a mean of unequal means", "warning")
def mean_of_means(history: History) -> Iterable[Finding] | str:
    """A mean over batches or ranks that gives a small part the weight of a large one."""
    findings: dict[str, Finding] = {}
    turns: dict[tuple[Any, ...], dict[int, list[Event]]] = {}
    for event in history.of("collective"):
        if "value" in event:
            key = (*(event.get("at") or ["?", 0, ""]), event["step"])
            turns.setdefault(key, {}).setdefault(event["rank"], []).append(event)
    for (file, row, function, step), by_rank in turns.items():
        firsts = {rank: events[0] for rank, events in by_rank.items()}
        words = _unequal_means(firsts) or _unequal_ratios(history, firsts)
        if words:
            file, row, function = next(iter(firsts.values())).get("given_at") or (file, row, function)
            remedy = "add the sums and the counts of all batches and ranks, and divide once"
            cause = "the parts have unequal sizes, and each mean has the same weight"
            found = Finding("LS604", Place(file, row, function), words, cause, remedy, tuple(by_rank), step)
            findings.setdefault(f"{file}:{row}", found)
    return list(findings.values()) if turns else "no single number was exchanged by ranks"


def _unequal_means(firsts: dict[int, Event]) -> str | None:
    means = {rank: event["mean_of"] for rank, event in firsts.items() if event.get("mean_of")}
    uneven = {r: m for r, m in means.items() if m["unequal"] and m["least"] * _UNEQUAL <= m["most"]}
    if uneven:
        rank, mean = next(iter(uneven.items()))
        value = firsts[rank]["value"]
        return (
            f"the number is the mean of {mean['means']} means, each of {mean['least']} to {mean['most']} numbers: "
            f"{value:.6g}; weighted it is {mean['weighted']:.6g} on rank {rank}"
        )
    numbers = {rank: mean["numbers"] for rank, mean in means.items()}
    if len(means) == len(firsts) > 1 and min(numbers.values()) * _UNEQUAL < max(numbers.values()):
        return f"each rank gives a mean of its own, of so many numbers: {each_rank(numbers)}"
    return None


def _unequal_ratios(history: History, firsts: dict[int, Event]) -> str | None:
    """Shares of right answers, as numbers between 0 and 1, of unequal numbers of samples."""
    ratios = {r: e["ratio_of"] for r, e in firsts.items() if "ratio_of" in e and e.get("reduce_op") in ("SUM", "AVG")}
    if len(ratios) == len(firsts) and differ(ratios) and any(event["value"] for event in firsts.values()):
        shown = each_rank({rank: f"{by:.6g}" for rank, by in ratios.items()})
        return f"each rank gives a quotient of its own, which was divided by {shown}"
    counts: dict[int, int] = {}
    for rank, event in firsts.items():
        ends = [
            e for e in history.of("loader_end", rank=rank) if e["number"] < event["number"] and not e.get("backwards")
        ]
        count = ends[-1].get("samples") if ends else None
        hits = event["value"] * (count or 0)
        if not count or not 0 < event["value"] < 1 or abs(hits - round(hits)) > _WHOLE * count:
            return None
        counts[rank] = count
    if len(counts) > 1 and differ(counts):
        return f"each rank gives a share of its own samples, of {each_rank(counts)}"
    return None


@rule("LS605", "metric-of-one-rank", "a metric of one rank's part is logged", "warning")
def metric_of_one_rank(history: History) -> Iterable[Finding] | str:
    """Lightning's self.log without sync_dist in an evaluation: rank 0's part, and another number on each rank."""
    told: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for event in history.of("log"):
        if not event["exchanged"] and not event.get("only_zero"):
            key = (*(event.get("at") or ["?", 0, ""]), event["name"])
            told.setdefault(key, {}).setdefault(event["rank"], []).append(event["value"])
    findings = []
    for (file, row, function, name), by_rank in told.items():
        if len(by_rank) > 1 and differ(by_rank):
            firsts = {rank: f"{values[0]:.6g}" for rank, values in by_rank.items()}
            evidence = f"the first {name}: {each_rank(firsts)}"
            cause = "each rank logs its own part; what is shown, kept as the best or stopped by is that of rank 0"
            remedy = f'self.log("{name}", ..., sync_dist=True), or a metric of torchmetrics'
            findings.append(Finding("LS605", Place(file, row, function), evidence, cause, remedy, tuple(by_rank), None))
    return findings if any(history.of("log")) else "no Lightning module logged in an evaluation on several ranks"


@rule("LS802", "data-parallel", "torch.nn.DataParallel", "warning")
def data_parallel(history: History) -> Iterable[Finding] | str:
    """The wrapper of one process for several GPUs."""
    found = [event for event in history.of("wrap") if event["how"] == "data_parallel"]
    remedy = "DistributedDataParallel with a process for each GPU: torchrun --nproc-per-node N"
    cause = "it copies the model to all GPUs in each step, in threads of one process"
    return [
        Finding(
            "LS802", place(event.get("at")), "the model is wrapped in DataParallel", cause, remedy, (event["rank"],), 0
        )
        for event in found[:1]
    ]


@rule("LS801", "shared-gpu", "several ranks use one GPU")
def shared_gpu(history: History) -> Iterable[Finding] | str:
    """Ranks of one group on one host whose models are on the same GPU."""
    hosts = {event["rank"]: event.get("host") for event in history.of("start")}
    by_gpu: dict[tuple[object, str], list[int]] = {}
    places = {}
    for event in history.of("device"):
        if event.get("uuid"):
            by_gpu.setdefault((hosts.get(event["rank"]), event["uuid"]), []).append(event["rank"])
            places[event["rank"]] = event.get("at")
    groups = replicas(history)
    shared = {
        gpu: sorted(set(ranks))
        for gpu, ranks in by_gpu.items()
        if any(len({*ranks} & {*group}) > 1 for group in groups)
    }
    findings = []
    for (_, uuid), ranks in shared.items():
        evidence = f"{each_rank(dict.fromkeys(ranks, f'GPU {uuid}'))}"
        cause = "no torch.cuda.set_device(local_rank): every rank takes cuda:0"
        remedy = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything uses the GPU'
        findings.append(Finding("LS801", place(places[ranks[0]]), evidence, cause, remedy, tuple(ranks), 0))
    return findings if by_gpu else "no rank used a GPU"
