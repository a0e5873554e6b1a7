"""Rules on evaluations and metrics."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.audit.events import Event, History
from lockstep.audit.findings import Finding
from lockstep.audit.rules.facts import differ, each_rank, group_of, keys, named, place, replicas, rule, some
from lockstep.audit.rules.loaders import iterations


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
    return list(findings.values()) if any(history.of("collective")) else "no collective was seen in Python"


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
