"""Rules on gradients and parameters: replicas that diverge, and why."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.divergence import Divergence, after_joins, divergences, unwrapped
from lockstep_audit.rules.facts import differ, each_rank, line, named, place, rule, some

_NOTHING = "no steps of replicas were compared"
_WRITES = "write before DistributedDataParallel(...), all_reduce values from a rank's own batch or random numbers, "
_WRITES += "or broadcast the parameters of rank 0 afterwards"


_UNUSED = (
    "the loss does not use some parameters, and the wrapper waits for their gradients",
    "set find_unused_parameters=True, or wrap each network that is trained separately",
)


def _waits_for_unused(history: EventHistory) -> bool:
    """True if a rank ended with DDP's error about parameters without a gradient."""
    errors = [event.get("error") or {} for event in history.of("exit")]
    return any("find_unused_parameters" in str(error.get("message")) for error in errors)


def _backwards(divergence: Divergence) -> list[Event]:
    return [each for event in divergence.events.values() for each in event.get("backwards") or ()]


def _wrapped_at(history: EventHistory, divergence: Divergence) -> Any:
    return next((wrap.get("at") for wrap in history.of("wrap", rank=divergence.ranks[0])), None)


def _caused(history: EventHistory, kind: str, divergence: Divergence) -> list[Event]:
    """Events of a kind on the ranks of a divergence, before it."""
    last = {rank: divergence.events[rank]["number"] for rank in divergence.ranks}
    return [e for e in history.of(kind) if e["number"] <= last.get(e["rank"], -1)]


def _bypasses(history: EventHistory, divergence: Divergence) -> list[Event]:
    """Calls past the wrapper on these ranks before a divergence; any such call, if no pass came from the wrapper.

    Calls of submodules matter only in that case: next to a wrapped pass, their gradients are exchanged.
    """
    if not _is_past(divergence):
        return [event for event in _caused(history, "bypass", divergence) if not event.get("part")]
    number = divergence.first.get("model")
    return [e for e in history.of("bypass") if e["rank"] in divergence.ranks and number in (None, e.get("model"))]


def _is_past(divergence: Divergence) -> bool:
    """True if no forward pass of the wrapper came before any backward pass of a step."""
    backwards = _backwards(divergence)
    return bool(backwards) and all(each.get("forwards") == 0 for each in backwards)


def _without_sync(divergence: Divergence) -> bool:
    """True if no backward pass before the step exchanged gradients."""
    backwards = _backwards(divergence)
    return bool(backwards) and all(each.get("synced") is False for each in backwards)


@rule("LS201", "replicas-part", "parameters of replicas differ")
def replicas_part(history: EventHistory) -> Iterable[Finding] | str:
    """Replicas that diverge for a reason that no other rule of this group names."""
    found, compared = divergences(history)
    findings = []
    for divergence in found:
        if _caused(history, "unfrozen", divergence) or (divergence.gradients and _bypasses(history, divergence)):
            continue
        if _without_sync(divergence) and divergence.gradients:
            continue
        if {*divergence.gradients, *divergence.parameters} <= unwrapped(history):
            continue  # LS207
        if not divergence.gradients and _other_rates(divergence):
            continue  # LS301
        findings.append(_parted(history, divergence))
    for divergence in [] if findings else list(after_joins(history))[:1]:
        done = each_rank({rank: event["index"] for rank, event in divergence.events.items()})
        cause = f"a join makes parameters equal, but not the states of optimizers, which made {done} steps before"
        remedy = "an optimizer without a state in joins, equally many batches on all ranks, or broadcast its state"
        joins = [*history.of("join", rank=divergence.ranks[0]), divergence.first]
        at, ranks, step = joins[0].get("at"), divergence.ranks, divergence.first["step"]
        findings.append(Finding("LS201", place(at), divergence.evidence, cause, remedy, ranks, step))
    return findings if compared else _NOTHING


def _restored_apart(history: EventHistory, divergence: Divergence) -> tuple[Any, str, set[int]] | None:
    """A state that some ranks loaded before a divergence, and others did not: place, what, ranks."""
    for what in ("optimizer", "model", "scheduler"):
        events = [event for event in _caused(history, "state", divergence) if event.get("what") == what]
        if what == "model":  # before the wrapping: the wrapper broadcasts rank 0's model
            wraps = {event["rank"]: event["number"] for event in history.of("wrap")}
            events = [event for event in events if event["number"] > wraps.get(event["rank"], -1)]
        ranks = {event["rank"] for event in events}
        if events and ranks < set(divergence.ranks):
            return events[0].get("at"), what, ranks
    return None


def _written_apart(history: EventHistory, divergence: Divergence) -> tuple[Any, str, set[int]] | None:
    """The first write to a diverged parameter that not all ranks made alike: place, name, ranks that wrote."""
    parted = {name.rpartition(":")[2] for name in divergence.parameters}
    writes: dict[tuple[Any, ...], dict[int, Event]] = {}
    turns: Counter[tuple[Any, ...]] = Counter()
    for event in _caused(history, "write", divergence):
        where = (*event["at"], event["name"])
        writes.setdefault((where, turns[where, event["rank"]]), {})[event["rank"]] = event
        turns[where, event["rank"]] += 1
    for (where, _), by_rank in writes.items():
        ranks = {*by_rank} & {*divergence.ranks}
        told = {rank: by_rank[rank]["digest"] if rank in ranks else None for rank in divergence.ranks}
        if where[-1] in parted and ranks and differ(told):
            return where[:3], where[-1], ranks
    return None


def gives_data(path: str, names: Iterable[str]) -> list[int]:
    """Lines outside constructors that set the values of one of these parameters: `self.scale.data = ...`."""
    ends = tuple("." + ".".join(name.split(".")[-2 if name.endswith(("weight", "bias")) else -1 :]) for name in names)
    made = [n for n in sources.nodes(path) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    assigned = [n for n in sources.nodes(path) if isinstance(n, ast.Assign)]
    given = [(n.lineno, t) for n in assigned for t in n.targets if getattr(t, "attr", "") == "data"]
    found = [row for row, t in given if isinstance(t, ast.Attribute) and ast.unparse(t.value).endswith(ends)]
    return sorted(row for row in found if not any(f.lineno <= row <= (f.end_lineno or 0) for f in made))


def _other_rates(divergence: Divergence) -> bool:
    known = {r: e["hyperparameters"] for r, e in divergence.events.items() if e.get("hyperparameters")}
    return differ(known)


def _optimizers(history: EventHistory, divergence: Divergence) -> dict[int, Event]:
    """The first events of the optimizer whose step diverged, by rank."""
    own = divergence.events
    told = [e for e in history.of("optimizer") if e["optimizer"] == own.get(e["rank"], {}).get("optimizer")]
    return {event["rank"]: event for event in reversed(told)}


def _parted(history: EventHistory, divergence: Divergence) -> Finding:
    at, cause = divergence.first.get("at"), None
    remedy = "compare the ranks around this step; every rank must treat its model in the same way"
    backwards, restored = _backwards(divergence), _restored_apart(history, divergence)
    reduced, optimizers = next(history.of("hand_reduce"), None), _optimizers(history, divergence)
    told = {rank: optimizers.get(rank, {}).get("initial") for rank in divergence.ranks}
    initial = {rank: each and [each.get(name) for name in divergence.parameters] for rank, each in told.items()}
    is_early = divergence.first.get("index") == 0
    if reduced and divergence.gradients:
        at, cause = reduced.get("at"), "the script's all_reduce left these gradients unequal: ranks exchange others"
        remedy = "all_reduce the gradients of all parameters in the same order on all ranks; use zeros for missing ones"
    elif restored:
        at, what, ranks = restored
        cause = f"the state of the {what} was loaded on {named(ranks)} only"
        remedy = "call load_state_dict on all ranks; only writing belongs to rank 0"
    elif divergence.gradients and any(each.get("synced") is False for each in backwards[-1:]):
        last = backwards[-1]
        at = (last.get("unsynced_by_user") and last.get("unsynced_at")) or last.get("at")
        cause = f"the last backward pass before the step, at {line(last.get('at'))}, did not exchange gradients"
    elif not divergence.gradients and (write := _written_apart(history, divergence)):
        at, name, ranks = write
        cause = f"{line(_wrapped_at(history, divergence))} had made the ranks equal, and then this line gave {name} "
        cause += f"different values on {named(ranks) if ranks < {*divergence.ranks} else 'each rank'}"
        remedy = _WRITES
    elif not divergence.gradients and is_early and (differ(initial) or None in initial.values()):
        cause = "at the first step, gradients are equal and parameters are not: they differed before training"
        remedy = "build the models from the same seed, or broadcast the parameters of rank 0 before the first step"
        made = optimizers.get(divergence.ranks[0], {})
        made_at = sources.outside_factories(made.get("unwrapped_from") or []) or made.get("made_at")
        at = _wrapped_at(history, divergence) or (made_at if differ(initial) else None) or at
        if at and _wrapped_at(history, divergence) and (rows := gives_data(at[0], divergence.parameters)):
            cause = f"{line(at)} had made the ranks equal; later writes to `.data` make them diverge"
            at, remedy = [at[0], rows[0], ""], _WRITES
    elif not divergence.gradients:
        cause = "gradients are equal: something other than the optimizer changed parameters on one rank"
        rows = sources.changes_in_place(at[0]) if at else []
        at = [at[0], rows[0], ""] if at and len(rows) == 1 else at
    if _waits_for_unused(history):
        at, (cause, remedy) = _wrapped_at(history, divergence), _UNUSED
    return Finding("LS201", place(at), divergence.evidence, cause, remedy, divergence.ranks, divergence.first["step"])


@rule("LS202", "wrapper-bypassed", "the model is called without its wrapper")
def wrapper_bypassed(history: EventHistory) -> Iterable[Finding] | str:
    """`model.module(...)` in training, with gradients that differ because of it."""
    found, compared = divergences(history)
    findings = []
    for divergence in found:
        for event in _bypasses(history, divergence)[:1]:
            if divergence.gradients:
                what = "uses of parts of model.module" if event.get("part") else "a forward pass of model.module"
                cause = f"DistributedDataParallel does not see {what}, and exchanges no gradients"
                remedy = "call the wrapped model itself: model(inputs), not model.module(inputs)"
                remedy += "; move the code that uses its submodules into its forward()" if event.get("part") else ""
                at, ranks, step = place(event.get("at")), divergence.ranks, divergence.first["step"]
                findings.append(Finding("LS202", at, divergence.evidence, cause, remedy, ranks, step))
    return findings if compared else _NOTHING


@rule("LS203", "unfrozen-late", "parameters were unfrozen after the model was wrapped")
def unfrozen_late(history: EventHistory) -> Iterable[Finding] | str:
    """Parameters whose requires_grad changed after DDP(...), and whose gradients are not exchanged."""
    found, compared = divergences(history)
    findings = []
    for divergence in found:
        for event in _caused(history, "unfrozen", divergence)[:1]:
            names = sorted(set(event["names"]) & {*divergence.gradients, *divergence.parameters})
            if names:
                added = set(event.get("added") or ()) & set(names)
                wrapped_at = _wrapped_at(history, divergence)
                wrapped, at = line(wrapped_at), place(wrapped_at if added else _unfrozen_at(event, wrapped_at))
                cause = f"{some(names)} did not require gradients at {wrapped}, so the wrapper does not exchange them"
                if added:
                    cause = f"{some(names)} joined the model after {wrapped}, so the wrapper does not exchange them"
                remedy = "unfreeze and add layers before DistributedDataParallel(...), or wrap the model again"
                step = divergence.first["step"]
                findings.append(Finding("LS203", at, divergence.evidence, cause, remedy, divergence.ranks, step))
    for event in history.of("unfrozen") if compared and not findings else ():
        if event.get("unowned"):
            evidence = f"{some(event['unowned'])} need gradients since step {event['step']}, but no optimizer has them"
            cause = "the wrapper and the optimizer were made while these parameters were frozen"
            remedy = "unfreeze before wrapping the model and making the optimizer, or make both again"
            wrapped_at = next((wrap.get("at") for wrap in history.of("wrap")), None)
            at, ranks = place(_unfrozen_at(event, wrapped_at)), tuple(history.ranks)
            return [Finding("LS203", at, evidence, cause, remedy, ranks, event["step"])]
    return findings if compared else _NOTHING


def _unfrozen_at(event: Event, wrapped_at: Any) -> Any:
    """Where parameters were unfrozen: by a call, or by the one line of the file that sets requires_grad later."""
    at = event.get("at")
    file, row = (wrapped_at or at or ("", 0))[:2]
    found = sources.unfreezes(file, row) if event.get("at_step") else None
    return [file, found, ""] if found else at


@rule("LS204", "step-without-sync", "the optimizer steps on gradients that were not exchanged")
def step_without_sync(history: EventHistory) -> Iterable[Finding] | str:
    """Steps whose backward passes were all under no_sync, or whose flag was set too late."""
    found, compared = divergences(history)
    findings = []
    for divergence in found:
        if not (_without_sync(divergence) and divergence.gradients) or _bypasses(history, divergence):
            continue
        last = _backwards(divergence)[-1]
        at = last.get("unsynced_at") if last.get("unsynced_by_user") else last.get("at")
        bare = [e for e in history.of("optimizer") if e["optimizer"] == divergence.first["optimizer"]]
        if "unsynced_at" in last and not last["unsynced_by_user"] and bare and not bare[0].get("prepared"):
            at = bare[0].get("made_at")
            cause = "Accelerate did not prepare this optimizer: it steps after each backward"
            remedy = "also pass the optimizer to accelerator.prepare"
        elif any(each.get("flag_set_late") for each in _backwards(divergence)):
            cause = "the forward pass decides whether gradients are exchanged, and no_sync() or the flag came later"
            remedy = "end no_sync(), or set require_backward_grad_sync, before the forward pass of the last micro-batch"
        elif _waits_for_unused(history):
            at, (cause, remedy) = _wrapped_at(history, divergence), _UNUSED
        elif _is_past(divergence):
            at, cause = last.get("loss_at") or at, "no forward pass of the wrapper came before these backward passes"
            remedy = "call the wrapped model itself: model(inputs), not a method or submodule of model.module"
        else:
            cause = "all backward passes before this step were under no_sync()"
            remedy = "run forward and backward of the last micro-batch before each step outside no_sync()"
        step = divergence.first["step"]
        findings.append(Finding("LS204", place(at), divergence.evidence, cause, remedy, divergence.ranks, step))
    return findings if compared else _NOTHING
