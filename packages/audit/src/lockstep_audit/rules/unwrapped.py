"""Rules on models without a wrapper: trained by each rank for itself, or copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import facts, sources
from lockstep_audit.rules.divergence import averages, compared_steps, divergences, hooked, own_from_the_start, unwrapped
from lockstep_audit.rules.facts import number_of

_SUMMING = {"all_reduce", "barrier", "broadcast", "all_gather", "all_gather_into_tensor"}


@facts.rule("LS207", "never-exchanged", "ranks train on shards of the data, but nothing exchanges gradients")
def never_exchanged(history: EventHistory) -> Iterable[Finding] | str:
    """An optimizer of a model without a wrapper: each rank trains its own model on its shard of the data."""
    trained = _reads_a_part(history)
    if len(trained) < 2:
        return "no training on data that a sampler deals to ranks"
    alone = [w for w in history.of("wrap") if len(facts.group_of(history, w)) == 1 and w["how"] != "data_parallel"]
    exchanged = any(history.of("hand_reduce", "hand_average")) or averages(history) or hooked(history)
    if exchanged or facts.uses(history, "deepspeed"):
        return []
    own = own_from_the_start(history)
    known, findings, beside = facts.keys(history, "optimizer", "optimizer"), [], unwrapped(history)
    ignored = {name: wrap.get("at") for wrap in history.of("wrap") for name in wrap.get("ignored") or ()}
    ignored = {} if any("all_to_all" in str(call.get("op")) for call in history.of("collective")) else ignored
    owned = {known[event["rank"], event["optimizer"]] for event in history.of("optimizer") if event.get("owned")}
    for key, by_rank in facts.steps(history).items():
        ranks = tuple(sorted(trained & by_rank.keys()))
        pairs = list(compared_steps(by_rank, ranks, set())) if len(ranks) > 1 else []
        pairs = [each for each in pairs if not {*each.parameters} <= own]
        if pairs and alone and key in owned and all(each.gradients and each.parameters for each in pairs):
            at, words = facts.place(alone[0].get("at")), "the wrapper's process group contains only this rank"
            remedy = "use DistributedDataParallel(model) with the group of all ranks that train the model"
            findings.append(Finding("LS207", at, pairs[0].evidence, words, remedy, ranks, pairs[0].first["step"]))
            continue
        wrong = [{*each.gradients} if key not in owned else {*each.gradients} & {*beside, *ignored} for each in pairs]
        if pairs and all(names and each.parameters for names, each in zip(wrong, pairs, strict=True)):
            cause = "no wrapper contains this optimizer's model, and the script does not reduce its gradients"
            if key in owned:
                cause = f"{facts.some(sorted(wrong[0]))} of the optimizer are in no wrapped model, and stay local"
            remedy = "train through DistributedDataParallel(model); in a framework, do not unwrap the model first"
            made = next((event for event in history.of("optimizer") if known.get(_id(event)) == key), {})
            at = facts.place(facts.optimizer_at(history, key))
            if key in owned and wrong[0] <= ignored.keys():
                at = facts.place(ignored[min(wrong[0])])
                cause = f"the wrapper ignores {facts.some(sorted(wrong[0]))} on request, and nothing else reduces them"
                remedy = "let the wrapper have these parameters, or all_reduce their gradients and divide by world_size"
            elif key in owned:
                parts = made.get("partly_at")
                cause += f"; {facts.line(parts)} wraps other parts of their model" if parts else ""
                at = facts.place(parts or sources.outside_factories(made.get("unwrapped_from") or [])) or at
            findings.append(Finding("LS207", at, pairs[0].evidence, cause, remedy, ranks, pairs[0].first["step"]))
    return findings


@facts.rule("LS217", "partial-gradient", "equal parameters get partial gradients", "warning")
def partial_gradient(history: EventHistory) -> Iterable[Finding] | str:
    """A model whose layers are split across ranks by hand, without the sum on the way back to earlier layers."""
    exchanged = any(history.of("wrap", "hook", "hand_reduce", "hand_average"))
    is_sum = any(call.get("op") == "all_reduce" and not call["step"] for call in history.of("collective"))
    if exchanged or not is_sum or not {call.get("op") for call in history.of("collective")} <= _SUMMING:
        return "no model without a wrapper whose ranks add up activations"
    findings, told = [], {_id(event): event for event in reversed(list(history.of("optimizer")))}
    known = facts.keys(history, "optimizer", "optimizer")
    for key, by_rank in facts.steps(history).items():
        made = {event["rank"]: event for id, event in told.items() if known.get(id) == key}
        pairs = list(compared_steps(by_rank, tuple(history.ranks), set())) if len(by_rank) == len(history.ranks) else []
        initial = {rank: event.get("initial") or {} for rank, event in made.items()}
        if not pairs or pairs[0].first["index"] or len(initial) < 2:
            continue
        step, names = pairs[0].first, set.intersection(*map(set, initial.values()))
        equal = {name for name in names if not facts.differ({rank: each[name] for rank, each in initial.items()})}
        moved = {name for name in equal if step["parameters"].get(name) != initial[step["rank"]][name]}
        same = [n for n in moved if step["gradients"].get(n) and n not in pairs[0].gradients]
        constant = {name for event in made.values() for name in event.get("constant") or ()}
        parts = sorted(equal & {*pairs[0].gradients} - constant)
        if equal < names and same and parts:
            evidence = "at the first step, gradients differ by rank for "
            evidence += f"{number_of(len(parts), 'parameter', 'that is', 'that are')} equal on all ranks "
            evidence += f"({facts.some(parts)}) "
            evidence += f"and are the same for {len(same)} ({facts.some(sorted(same))})"
            cause = "the gradient that comes back from split layers is that of one rank's shard"
            remedy = "before the split layers, a function whose forward is the identity and whose backward all_reduces"
            at = (passes[-1] if (passes := step.get("backwards")) else step).get("at")
            ranks = tuple(history.ranks)
            findings.append(Finding("LS217", facts.place(at), evidence, cause, remedy, ranks, step["step"]))
    return findings


def _id(event: Event) -> tuple[int, int]:
    return event["rank"], event["optimizer"]


def _reads_a_part(history: EventHistory) -> set[int]:
    """Ranks that train on a shard of the data: dealt by a sampler, or as different batches or inputs of a wrapper."""
    trained, first = set(), dict[tuple[Any, ...], dict[int, Any]]()
    loaders = [e for e in history.of("loader") if (e.get("distributed") or {}).get("replicas", 1) > 1]
    dealt = {(event["rank"], event["loader"]) for event in loaders}
    for event in history.of("loader_end"):
        if event.get("backwards") and (event["rank"], event["loader"]) in dealt:
            trained.add(event["rank"])
    for event in history.of("batch") if any(history.of("wrap")) else ():
        first.setdefault((event["loader"], event.get("epoch"), event["batch"]), {})[event["rank"]] = event.get("digest")
    inputs = dict[tuple[Any, ...], dict[int, Any]]()
    for event in history.of("inputs"):
        inputs.setdefault((event["model"], event["step"]), {})[event["rank"]] = event["digest"]
    for told in (first, inputs):
        others = [by_rank for by_rank in told.values() if len(set(by_rank.values())) > 1]
        trained |= {rank for by_rank in others for rank in by_rank} if len(others) == len(told) else set()
    return trained


def _copied(history: EventHistory, copies: dict[int, Event]) -> tuple[SourceLine | None, str]:
    """Why copies differ: made of unequal models, or updated only on some ranks."""
    copy, changes = next(iter(copies.values())), {rank: each.get("changes") for rank, each in copies.items()}
    if copy.get("is_early") and facts.differ({event["rank"]: event.get("before") for event in history.of("wrap")}):
        at = sources.outside_factories(copy.get("made_from") or [])
        return facts.place(at), "each rank made or copied its own model, before the wrapper made the models equal"
    rows = sources.for_one_rank(copy["at"][0]) if copy.get("at") else []
    if facts.differ(changes):
        at = SourceLine(copy["at"][0], rows[0], "") if rows else facts.place(copy.get("at"))
        return at, f"only some ranks update it: changes of its weights are {facts.each_rank(changes)}"
    return facts.place(copy.get("at")), "each rank made it before the models were equal, or only some ranks update it"


@facts.rule("LS214", "copies-part", "copies of a model differ between ranks", "warning")
def copies_part(history: EventHistory) -> Iterable[Finding] | str:
    """An average or a teacher that ranks call, whose weights differ between ranks."""
    told: dict[str, dict[int, Event]] = {}
    for event in history.of("exit"):
        for number, copy in (event.get("copies") or {}).items():
            told.setdefault(number, {})[event["rank"]] = copy
    findings = []
    for by_rank in told.values() if not any(divergences(history)[0]) else ():
        for group in facts.replicas(history):
            found = {rank: by_rank[rank] for rank in group if rank in by_rank}
            if len(found) == len(group) and facts.differ({rank: copy["digest"] for rank, copy in found.items()}):
                copy = next(iter(found.values()))
                evidence = f"the {copy['class']} that {facts.line(copy['at'])} calls differs at the end"
                evidence += f" on {facts.named(found)}"
                at, cause = _copied(history, found)
                remedy = "copy the model after DistributedDataParallel(...) made it equal, and update on all ranks"
                findings.append(Finding("LS214", at, evidence, cause, remedy, tuple(found), None))
    seen = bool(told) or any(history.of("frozen", "frozen_part"))
    copied = {str(copy["at"]) for by_rank in told.values() for copy in by_rank.values()}
    findings += [*_frozen(history, copied), *_frozen_parts(history)]
    return findings if seen else "no copy of a wrapped model was called"


def _frozen(history: EventHistory, copied: set[str]) -> list[Finding]:
    """Other modules that nothing trains, and whose weights differ from their first call on."""
    told, findings = dict[tuple[Any, ...], dict[int, list[Event]]](), list[Finding]()
    for event in history.of("frozen"):  # experts of a rank have different names, or are called elsewhere
        key = (str(event.get("at")), event["class"], event["names_digest"], event["step"])
        told.setdefault(key, {}).setdefault(event["rank"], []).append(event)
    for by_rank in (each for key, each in told.items() if key[0] not in copied):
        for group in facts.replicas(history, "ddp"):
            found = {rank: by_rank[rank] for rank in group if rank in by_rank}
            digests = {rank: [event["digest"] for event in events] for rank, events in found.items()}
            if len(found) < len(group) or len({*map(len, digests.values())}) > 1 or not facts.differ(digests):
                continue
            firsts = {rank: events[0] for rank, events in found.items()}
            first = firsts[group[0]]
            evidence = f"the {first['class']} that {facts.line(first.get('at'))} calls, and that no wrapper or "
            evidence += f"optimizer contains, has different weights on {facts.named(found)} from its first call on"
            at, cause = _copied(history, firsts)
            if not facts.differ({rank: event["changes"] for rank, event in firsts.items()}):
                at = facts.place(sources.outside_factories(first.get("made_from") or [])) or at
            remedy = "copy the model after DistributedDataParallel(...) made it equal, or broadcast the weights"
            findings.append(Finding("LS214", at, evidence, cause, remedy, tuple(found), first["step"]))
    return findings


def _frozen_parts(history: EventHistory) -> list[Finding]:
    """Parts of a wrapped model, such as a teacher, that all ranks call, and that not all ranks update alike."""
    parts, ends = dict[int, dict[int, Event]](), {e["rank"]: e.get("parameters") or {} for e in history.of("exit")}
    for event in history.of("frozen_part"):
        parts.setdefault(event["model"], {}).setdefault(event["rank"], event)
    for model, by_rank in parts.items() if not any(divergences(history)[0]) else ():
        for group in (each for each in facts.replicas(history, "ddp") if {*each} <= by_rank.keys()):
            last = {rank: ends.get(rank, {}).get(str(model)) for rank in group}
            calls = [call for call in history.of("collective") if call.get("op") in ("broadcast", "all_reduce")]
            if not all(last.values()) and any(call["step"] and "float" in str(call["dtype"]) for call in calls):
                continue  # ranks may exchange what one has updated
            for name in by_rank[group[0]]["names"]:
                writes = {rank: [e for e in history.of("write", rank=rank) if e["name"] == name] for rank in group}
                ends_of = {rank: held and held.get(name) for rank, held in last.items()}
                told = {rank: [(event["step"], event["digest"]) for event in writes[rank]] for rank in group}
                if facts.differ(ends_of) or (None in ends_of.values() and facts.differ(told)):
                    first = min((each[0] for each in writes.values() if each), key=lambda e: e["step"], default=None)
                    at = (first or by_rank[group[0]])["at"]
                    at = [at[0], sources.decorated_for_one_rank(at[0], at[1]) or at[1], at[2]]
                    evidence = f"{name} is a frozen parameter of the model that ranks train, and it differs on "
                    evidence += f"{facts.named(group)}; all of them use it at {facts.line(by_rank[group[0]]['at'])}"
                    only = {rank for rank in group if told[rank]}
                    cause = f"only {facts.named(only)} updates it" if 0 < len(only) < len(group) else None
                    remedy = "update it on all ranks: their weights are equal after each step"
                    step = first["step"] if first else None
                    return [Finding("LS214", facts.place(at), evidence, cause, remedy, group, step)]
    return []
