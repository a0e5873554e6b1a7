"""Rules on the weights that ranks evaluate with."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.divergence import averages, compared_steps, hooked
from lockstep_audit.rules.facts import (
    differ,
    each_rank,
    group_of,
    keys,
    line,
    named,
    number_of,
    place,
    rule,
    some,
    steps,
)
from lockstep_audit.rules.loaders import Iteration, iterations

Look = dict[int, Event]
"""The `weights` events at one start of an evaluation, by rank."""
_NEAR, _SWAPS = 8, ("swap", "apply", "load", "copy", "average", "ema")
"""A call on one rank changes weights for an evaluation at most this many lines below, if its name has such a word."""


@rule("LS609", "eval-weights-differ", "ranks evaluate with different weights")
def eval_weights_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Weights that only some ranks loaded or exchanged before an evaluation that ranks share."""
    looks = _looks(history)
    if not looks:
        return "no model of DistributedDataParallel was evaluated on several ranks"
    if any(history.of("hand_average")) or averages(history) or hooked(history):
        return "the script averages parameters itself"
    findings: list[Finding] = []
    for look in looks:
        names = _unlike({rank: event["digests"] for rank, event in look.items()})
        its = {rank: _part(history, event) for rank, event in look.items()} if names else {}
        is_dealt = all(it and it.shards > 1 for it in its.values())
        subsets = {rank: it.begin.get("subset") if it else None for rank, it in its.items()}
        is_dealt = is_dealt or (all(subsets.values()) and differ(subsets))
        is_dealt = is_dealt or (not any(its.values()) and _is_of_some(history, look))
        if not names or not is_dealt or not _were_alike(history, look, looks):
            continue
        first = look[min(look)]
        begin = its[min(look)]
        evidence = f"at step {first['step']}, {len(names)} of {len(first['digests'])} parameters differ between "
        evidence += f"{named(look)} ({some(names)}), and each rank evaluates a shard of the data"
        cause, remedy = _cause(history, look)
        at = place(_changed_at(history, look) or (begin.begin.get("at") if begin else None) or first.get("at"))
        findings.append(Finding("LS609", at, evidence, cause, remedy, tuple(look), first["step"]))
    return findings


@rule("LS709", "state-not-copied", "the best weights were kept without a copy")
def state_not_copied(history: EventHistory) -> Iterable[Finding] | str:
    """load_state_dict of the tensors that the model itself has, after steps or loads have changed them."""
    found: dict[str, list[Event]] = {}
    for event in history.of("state") if not any(history.of("hand_average")) else ():
        if event.get("taken"):
            found.setdefault(str(event["taken"][0]), []).append(event)
    findings = []
    for events in found.values():
        (at, count), first = events[0]["taken"], events[0]
        changed = f"{number_of(count, 'step')} of optimizers" if count else "another load_state_dict"
        evidence = f"{line(first.get('at'))} loads a state that has the model's own tensors, which {changed} changed"
        cause = "state_dict() returns references, which follow the training: the load changes nothing"
        remedy = "best = copy.deepcopy(model.state_dict())"
        ranks = tuple(sorted({event["rank"] for event in events}))
        findings.append(Finding("LS709", place(at or first.get("at")), evidence, cause, remedy, ranks, first["step"]))
    return findings if any(e.get("what") == "model" for e in history.of("state")) else "no state of a model was loaded"


def _looks(history: EventHistory) -> list[Look]:
    """The starts of evaluations that all ranks of a group have: by model, step, line, and number there."""
    wraps = {(event["rank"], event["model"]): event for event in history.of("wrap")}
    known, found = keys(history, "wrap", "model", "at"), defaultdict[Any, Look](dict)
    turns: dict[Any, int] = defaultdict(int)
    for event in history.of("weights"):
        owner = event["rank"], event["model"]
        if owner in wraps:
            key = known[owner], group_of(history, wraps[owner]), event["step"], str(event.get("at"))
            found[*key, turns[event["rank"], key]][event["rank"]] = event
            turns[event["rank"], key] += 1
    return [look for key, look in found.items() if len(look) > 1 and {*look} == {*key[1]}]


def _unlike(digests: dict[int, dict[str, Any]]) -> list[str]:
    names = sorted({name for each in digests.values() for name in each})
    return [name for name in names if differ({rank: each.get(name) for rank, each in digests.items()})]


def _part(history: EventHistory, look: Event) -> Iteration | None:
    """The loop over a loader in which an evaluation began, if ranks combine its results."""
    its = [by_rank.get(look["rank"]) for epochs in iterations(history).values() for by_rank in epochs.values()]
    around = [it for it in its if it and it.begin["number"] < look["number"] and not it.is_training]
    around = [it for it in around if it.end is None or look["number"] < it.end["number"]]
    return around[-1] if around and _is_combined(history, look) else None


def _is_of_some(history: EventHistory, look: Look) -> bool:
    """True if only some ranks loaded or wrote weights, and all combine what they compute from their own inputs."""
    writes = [e for e in history.of("write") if (look.get(e["rank"]) or {}).get("step") == e["step"]]
    changed = {rank for rank, event in look.items() if event.get("changed")}
    changed |= {event["rank"] for event in writes if event["number"] < look[event["rank"]]["number"]}
    is_apart = differ({rank: event.get("inputs") for rank, event in look.items()})
    is_combined = all(_is_combined(history, event) for event in look.values())
    return 0 < len(changed) < len(look) and is_apart and is_combined


def _is_combined(history: EventHistory, look: Event) -> bool:
    """True if ranks gather or reduce something between an evaluation and the next step."""
    later = [e["number"] for e in history.of("step", rank=look["rank"]) if e["number"] > look["number"]]
    calls = [e for e in history.of("collective", rank=look["rank"]) if look["number"] < e["number"]]
    calls = [e for e in calls if e["number"] < min(later, default=float("inf"))]
    return any("gather" in str(call.get("op")) or "reduce" in str(call.get("op")) for call in calls)


def _were_alike(history: EventHistory, look: Look, looks: list[Look]) -> bool:
    """True if replicas had not diverged in training: before a load, after the last step, or at any later time."""
    step, ranks = look[min(look)]["step"], tuple(sorted(look))
    together = [by_rank for by_rank in steps(history).values() if {*ranks} <= {*by_rank}]
    pairs = [each for by_rank in together for each in compared_steps(by_rank, ranks, set())]
    if any(pair.parameters and pair.first["step"] < step for pair in pairs):
        return False
    others = [other for other in looks if other is not look and other[min(other)]["step"] >= step]
    found = [{rank: event["digests"] for rank, event in other.items()} for other in others]
    found += [{rank: (event.get("changed") or {}).get("before") or event["digests"] for rank, event in look.items()}]
    if any(not _unlike(each) and {*each} == {*ranks} for each in found):
        return True
    return any(not pair.parameters and pair.first["step"] >= step - 1 for pair in pairs)


def _changed_at(history: EventHistory, look: Look) -> list[Any] | None:
    """The line that leads to a load and not to the evaluation. One that also trains shows nothing."""
    trains = [event["at"][:2] for event in history.of("step") if event.get("at")]
    for event in look.values():
        path = (event.get("changed") or {}).get("at") or ()
        own = [at for at in path if at not in event["path"] and at[:2] not in trains]
        if own:
            return list(own[-1])
    for file, row, function in look[min(look)]["path"]:
        rows = [each for each in sources.for_one_rank(file, _SWAPS) if row - _NEAR <= each < row]
        if rows:
            return [file, rows[-1], function]
    return None


def _cause(history: EventHistory, look: Look) -> tuple[str, str]:
    """The cause and the remedy."""
    files: dict[int, str | None] = {}
    folders: dict[int, str] = {}
    for rank, event in look.items():
        done = [e["number"] for e in history.of("step", rank=rank) if e["number"] < event["number"]]
        loads = [e for e in history.of("load", rank=rank) if max(done, default=-1) < e["number"] < event["number"]]
        files[rank] = loads[-1]["path"] if loads and event.get("changed") else None
        paths = [e["path"] for e in history.of("save", rank=rank) if e["number"] < event["number"]]
        folders |= {rank: os.path.dirname(paths[-1])} if paths else {}
    loaded = [rank for rank, event in look.items() if event.get("changed")]
    cause = "something changed the weights after the last step differently on each rank"
    if loaded and len(loaded) < len(look):
        path = (look[loaded[0]]["changed"].get("at") or [None])[0]
        name = next((f"{os.path.basename(file)} " for file in files.values() if file), "")
        cause = f"load_state_dict {f'of {name}' * bool(name)}at {line(path)} was called on {named(loaded)} only"
    elif differ(files):
        cause = f"ranks loaded different files: {each_rank(files)}"
    if any(files.values()) and len(folders) == len(look) and differ(folders):
        common = os.path.commonpath(folders.values())
        if not differ({rank: os.path.basename(folder) for rank, folder in folders.items()}):
            shown = each_rank({rank: os.path.relpath(folder, common) for rank, folder in folders.items()})
            remedy = "choose the folder's name on rank 0, and dist.broadcast_object_list it to all ranks"
            return f"{cause}; ranks save to different folders: {shown}", remedy
    return cause, "change the weights on all ranks before a shared evaluation, or broadcast them"
