"""Rules on gradients and parameters: replicas that part, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.audit.events import Event, History
from lockstep.audit.findings import Finding
from lockstep.audit.rules import sources
from lockstep.audit.rules.facts import Key, differ, each_rank, line, named, place, replicas, rule, some, steps

_NOTHING = "no step of replicas was compared"
_AVERAGING = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor")
_NUMBERS = 4
_CLOSE = 0.05
"""So far may a sum be off that ranks exchange with half the bits."""
_FEW = 8
"""A tensor with no more elements may hold metrics. A larger one may hold parameters."""


Indexed = dict[int, dict[int, Event]]
"""The steps of an optimizer, by rank and index."""


@dataclass(frozen=True)
class Parting:
    """The first step after which replicas of a model differ."""

    ranks: tuple[int, ...]
    events: dict[int, Event]
    gradients: list[str]
    """Names of the gradients that differ."""
    parameters: list[str]
    of: int

    @property
    def first(self) -> Event:
        """The step on the first rank."""
        return self.events[self.ranks[0]]

    @property
    def evidence(self) -> str:
        both = (("gradients", self.gradients), ("parameters", self.parameters))
        what = [f"{len(names)} of {self.of} {kind} differ ({some(names)})" for kind, names in both if names]
        return f"at step {self.first['step']}, {' and '.join(what)} between {named(self.ranks)}"


def partings(history: History) -> tuple[list[Parting], bool]:
    """The first partings of each optimizer's model, and whether any step was compared.

    Replicas that are together again later, or that the script averages itself, part on purpose.
    """
    groups, found, compared = replicas(history, "ddp"), [], False
    if not groups and not any(history.of("wrap")):
        groups = replicas(history)
    averaged = any(history.of("hand_average")) or averages(history)
    ignored = {name for wrap in history.of("wrap") for name in wrap.get("ignored") or ()} | own_from_the_start(history)
    for by_rank in steps(history).values():
        for group in groups:
            ranks = tuple(rank for rank in group if rank in by_rank)
            pairs = list(compared_steps(by_rank, ranks, ignored)) if len(ranks) > 1 else []
            pairs += _at_the_end(history, by_rank, ranks, ignored) if pairs else []
            compared = compared or bool(pairs)
            first = next((parting for parting in pairs if parting.gradients or parting.parameters), None)
            together = any(not each.parameters for each in pairs[pairs.index(first) :]) if first else True
            if first and not averaged and not together and not hooked(history) and not _meet(history, ranks):
                found.append(first)
    return found, compared


def own_from_the_start(history: History) -> set[str]:
    """Parameters that each rank has for itself, such as experts: they begin unequal, and nothing exchanges them.

    Others of the model must be equal, and the script must know how to exchange: by hand, or with an all-to-all.
    """
    is_known = any(str(call.get("op")).startswith("all_to_all") for call in history.of("collective"))
    if not is_known and (any(history.of("wrap")) or not any(history.of("hand_reduce"))):
        return set()
    first = {event["rank"]: event.get("initial") or {} for event in reversed(list(history.of("optimizer")))}
    names = set.union(*map(set, first.values())) if first else set()
    apart = {name for name in names if differ({rank: each.get(name) for rank, each in first.items()})}
    for by_rank in steps(history).values() if len(apart) < len(names) else ():
        for each in list(compared_steps(by_rank, tuple(by_rank), set()))[:1]:
            return apart & {*each.gradients}
    return set()


def compared_steps(by_rank: Indexed, ranks: tuple[int, ...], ignored: set[str]) -> Iterator[Parting]:
    for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
        events = {rank: by_rank[rank][index] for rank in ranks}
        if all("parameters" in event for event in events.values()):
            names = set.intersection(*(set(event["parameters"]) for event in events.values())) - ignored
            kinds: list[list[str]] = []
            for kind in ("gradients", "parameters"):
                told = {rank: event.get(kind) or {} for rank, event in events.items()}
                kinds += [[name for name in sorted(names) if differ({r: each.get(name) for r, each in told.items()})]]
            yield Parting(ranks, events, kinds[0], kinds[1], len(names))


def _at_the_end(history: History, by_rank: Indexed, ranks: tuple[int, ...], ignored: set[str]) -> list[Parting]:
    """The parameters of a model of DDP at the end of the script, as if the last step had been looked at."""
    ends = {event["rank"]: event.get("parameters") or {} for event in history.of("exit") if event["rank"] in ranks}
    lasts = {rank: by_rank[rank][max(by_rank[rank])] for rank in ranks}
    now = {rank: ends.get(rank, {}).get(str(last.get("model", 0))) for rank, last in lasts.items()}
    if differ({rank: len(by_rank[rank]) for rank in ranks}) or not all(isinstance(each, dict) for each in now.values()):
        return []
    events = {rank: {**last, "parameters": now[rank], "gradients": None} for rank, last in lasts.items()}
    return list(compared_steps({rank: {0: event} for rank, event in events.items()}, ranks, ignored))


def averages(history: History) -> bool:
    """True if the script exchanges tensors itself between steps: perhaps parameters."""
    shapes: dict[tuple[str, int], set[str]] = {}
    of_gradients = {str(event.get("at")) for event in history.of("hand_reduce")}
    for call in history.of("collective"):
        if str(call.get("at")) in of_gradients:
            continue
        if call["step"] > 0 and "float" in str(call.get("dtype")) and call.get("op") in _AVERAGING:
            shapes.setdefault((str(call.get("at")), call["step"]), set()).add(str(call.get("shape")))
            if _elements(call) > _FEW:
                return True
    return any(len(each) > 1 for each in shapes.values())


def hooked(history: History) -> bool:
    """True if a communication hook (local SGD, compression) exchanges in its own way."""
    return any(event.get("hook") for event in history.of("wrap", "step")) or any(history.of("hook"))


def _meet(history: History, ranks: tuple[int, ...]) -> bool:
    """True if the parameters are equal at the end of the script."""
    ends = {event["rank"]: event.get("parameters") for event in history.of("exit") if event["rank"] in ranks}
    return len(ends) == len(ranks) and all(ends.values()) and not differ(ends)


def _backwards(parting: Parting) -> list[Event]:
    return [each for event in parting.events.values() for each in event.get("backwards") or ()]


def _wrapped_at(history: History, parting: Parting) -> Any:
    return next((wrap.get("at") for wrap in history.of("wrap", rank=parting.ranks[0])), None)


def _caused(history: History, kind: str, parting: Parting) -> list[Event]:
    """Events of a kind that the ranks of a parting saw before it."""
    last = {rank: parting.events[rank]["number"] for rank in parting.ranks}
    return [e for e in history.of(kind) if e["number"] <= last.get(e["rank"], -1)]


def _without_sync(parting: Parting) -> bool:
    """True if no backward pass before the step exchanged gradients."""
    backwards = _backwards(parting)
    return bool(backwards) and all(each.get("synced") is False for each in backwards)


@rule("LS201", "replicas-part", "parameters of replicas differ")
def replicas_part(history: History) -> Iterable[Finding] | str:
    """Replicas that part for a reason that no other rule of this group names."""
    found, compared = partings(history)
    findings = []
    for parting in found:
        if _caused(history, "unfrozen", parting) or (parting.gradients and _caused(history, "bypass", parting)):
            continue
        if _without_sync(parting) and parting.gradients:
            continue
        if {*parting.gradients, *parting.parameters} <= unwrapped(history):
            continue  # LS207
        if not parting.gradients and _other_rates(parting):
            continue  # LS301
        findings.append(_parted(history, parting))
    return findings if compared else _NOTHING


def _restored_apart(history: History, parting: Parting) -> tuple[Any, str, set[int]] | None:
    """A state that some ranks loaded before a parting, and others did not: place, what, ranks."""
    for what in ("optimizer", "model", "scheduler"):
        events = [event for event in _caused(history, "state", parting) if event.get("what") == what]
        if what == "model":  # before the wrapping, the wrapper gives the model of rank 0 to all
            wraps = {event["rank"]: event["number"] for event in history.of("wrap")}
            events = [event for event in events if event["number"] > wraps.get(event["rank"], -1)]
        ranks = {event["rank"] for event in events}
        if events and ranks < set(parting.ranks):
            return events[0].get("at"), what, ranks
    return None


def unwrapped(history: History) -> set[str]:
    """Names of parameters that optimizers have beside those of a wrapped model."""
    return {name for event in history.of("optimizer") for name in event.get("unwrapped") or ()}


def _other_rates(parting: Parting) -> bool:
    known = {r: e["hyperparameters"] for r, e in parting.events.items() if e.get("hyperparameters")}
    return differ(known)


def _parted(history: History, parting: Parting) -> Finding:
    at, cause = parting.first.get("at"), None
    remedy = "compare the ranks around this step; every rank must do the same to its model"
    backwards, restored = _backwards(parting), _restored_apart(history, parting)
    reduced = next(history.of("hand_reduce"), None)
    if reduced and parting.gradients:
        at, cause = reduced.get("at"), "the script's own all_reduce left these gradients unequal: ranks exchange others"
        remedy = "all_reduce the gradients of all parameters in one order on all ranks; zeros for those without"
    elif restored:
        at, what, ranks = restored
        cause = f"the state of the {what} was loaded on {named(ranks)} only"
        remedy = "load_state_dict on all ranks; only writing is for rank 0"
    elif parting.gradients and any(each.get("synced") is False for each in backwards[-1:]):
        at, cause = backwards[-1].get("at"), "the last backward pass before the step did not exchange gradients"
    elif not parting.gradients and parting.first.get("index") == 0:
        cause = "gradients are equal and parameters are not, at the first step: they differed before training"
        remedy = "make the models from the same seed, or broadcast the parameters of rank 0 before the first step"
        at = _wrapped_at(history, parting) or at
    elif not parting.gradients:
        cause = "gradients are equal: something else than the optimizer has changed parameters on one rank"
        rows = sources.changes_in_place(at[0]) if at else []
        at = [at[0], rows[0], ""] if at and len(rows) == 1 else at
    if any("find_unused_parameters" in str((e.get("error") or {}).get("message")) for e in history.of("exit")):
        at, cause = _wrapped_at(history, parting), "the loss leaves out parameters, and the wrapper waits for theirs"
    return Finding("LS201", place(at), parting.evidence, cause, remedy, parting.ranks, parting.first["step"])


@rule("LS202", "wrapper-bypassed", "the model is called without its wrapper")
def wrapper_bypassed(history: History) -> Iterable[Finding] | str:
    """`model.module(...)` in training, and gradients that differ because of it."""
    found, compared = partings(history)
    findings = []
    for parting in found:
        for event in _caused(history, "bypass", parting)[:1]:
            if parting.gradients:
                cause = "DistributedDataParallel does not see a forward pass of model.module, and exchanges nothing"
                remedy = "call the wrapped model itself: model(inputs), not model.module(inputs)"
                at, ranks = place(event.get("at")), parting.ranks
                findings.append(Finding("LS202", at, parting.evidence, cause, remedy, ranks, parting.first["step"]))
    return findings if compared else _NOTHING


@rule("LS203", "unfrozen-late", "parameters were unfrozen after the model was wrapped")
def unfrozen_late(history: History) -> Iterable[Finding] | str:
    """Parameters whose requires_grad changed after DDP(...), and whose gradients nobody exchanges."""
    found, compared = partings(history)
    findings = []
    for parting in found:
        for event in _caused(history, "unfrozen", parting)[:1]:
            names = sorted(set(event["names"]) & {*parting.gradients, *parting.parameters})
            if names:
                added = set(event.get("added") or ()) & set(names)
                at = place((event.get("at") if not added else None) or _wrapped_at(history, parting))
                wrapped = line(_wrapped_at(history, parting))
                cause = f"{some(names)} did not require gradients at {wrapped}, so the wrapper does not exchange them"
                if added:
                    cause = f"{some(names)} came to the model after {wrapped}, so the wrapper does not know them"
                remedy = "unfreeze, and add layers, before DistributedDataParallel(...), or wrap the model anew"
                step = parting.first["step"]
                findings.append(Finding("LS203", at, parting.evidence, cause, remedy, parting.ranks, step))
    for event in history.of("unfrozen") if compared and not findings else ():
        if event.get("unowned"):
            evidence = f"{some(event['unowned'])} need gradients since step {event['step']}, and no optimizer has them"
            cause = "the wrapper and the optimizer were made while these parameters were frozen"
            remedy = "unfreeze before the model is wrapped and the optimizer is made, or make both anew"
            at, ranks = place(event.get("at")), tuple(history.ranks)
            return [Finding("LS203", at, evidence, cause, remedy, ranks, event["step"])]
    return findings if compared else _NOTHING


@rule("LS204", "step-without-sync", "the optimizer steps on gradients that were not exchanged")
def step_without_sync(history: History) -> Iterable[Finding] | str:
    """Steps whose backward passes were all under no_sync, or for which the flag came too late."""
    found, compared = partings(history)
    findings = []
    for parting in found:
        if not (_without_sync(parting) and parting.gradients) or _caused(history, "bypass", parting):
            continue
        last = _backwards(parting)[-1]
        at = last.get("unsynced_at") if last.get("unsynced_by_user") else last.get("at")
        bare = [e for e in history.of("optimizer") if e["optimizer"] == parting.first["optimizer"]]
        if "unsynced_at" in last and not last["unsynced_by_user"] and bare and not bare[0].get("prepared"):
            at, cause = bare[0].get("made_at"), "Accelerate has not prepared this optimizer, which steps at each pass"
            remedy = "give the optimizer to accelerator.prepare, too"
        elif any(each.get("flag_set_late") for each in _backwards(parting)):
            cause = "the forward pass decides whether gradients are exchanged, and no_sync() or the flag was off later"
            remedy = "end no_sync(), or set require_backward_grad_sync, before the forward pass of the last micro-batch"
        else:
            cause = "all backward passes before this step were under no_sync()"
            remedy = "leave no_sync() for forward and backward of the last micro-batch before each step"
        step = parting.first["step"]
        findings.append(Finding("LS204", place(at), parting.evidence, cause, remedy, parting.ranks, step))
    return findings if compared else _NOTHING


@rule("LS205", "sum-not-divided", "gradients are summed over ranks and not divided")
def sum_not_divided(history: History) -> Iterable[Finding] | str:
    """all_reduce(SUM) of gradients by the script, without a division by the number of ranks."""
    reduced = list(history.of("hand_reduce"))
    findings, seen = [], set()
    for event in reduced:
        at = tuple((event.get("at") or ["?", 0])[:2])
        if event.get("op", "").upper() != "SUM" or event.get("divided") is not False or at in seen:
            continue
        if _counts_before(history, event) or _divided_loss(history, event):
            continue
        if event.get("factor", 1.0) * len(history.ranks) < 1:
            continue  # LS211
        seen.add(at)
        count, world = event.get("parameters"), len(history.ranks)
        evidence = f"{count} gradients were summed over {world} ranks, and the step took the sum"
        cause = "the loss is a mean over the batch of a rank, and a sum of means grows with the number of ranks"
        remedy = "divide by world_size after all_reduce, use op=ReduceOp.AVG, or divide the loss by the global batch"
        told = (evidence, cause, remedy, tuple(history.ranks), event["step"])
        findings.append(Finding("LS205", place(event.get("at")), *told))
    for event, made in _sums_of_hooks(history):
        if not _counts_before(history, event) and not _divided_loss(history, event):
            evidence = f"what the communication hook gives is the sum over {len(history.ranks)} ranks of what they gave"
            cause = "DistributedDataParallel leaves the division to the hook, and the hook does not divide"
            remedy = "divide the buffer of the bucket by the number of ranks in the hook"
            findings.append(Finding("LS205", place(made), evidence, cause, remedy, tuple(history.ranks), event["step"]))
    is_seen = reduced or any(history.of("hook_sums"))
    return findings if is_seen else "the script does not reduce gradients itself"


def _sums_of_hooks(history: History) -> Iterator[tuple[Event, Any]]:
    """Hooks of DDP that give the sum of all ranks' gradients: an event of the first rank, and where it was made."""
    for model, at in {event["model"]: event.get("at") for event in history.of("hook")}.items():
        told: dict[int, dict[int, Event]] = {}
        for event in (each for each in history.of("hook_sums") if each["model"] == model):
            told.setdefault(event["step"], {})[event["rank"]] = event
        full = [by_rank for by_rank in told.values() if len(by_rank) == len(history.ranks) > 1]
        if len(full) > 1 and all(map(_is_sum, full)):
            yield full[0][min(full[0])], at


def _is_sum(by_rank: dict[int, Event]) -> bool:
    """True if what a hook gave is the sum of what the ranks gave, for all parameters together."""
    sums = [event["sums"] for event in by_rank.values()]
    totals = {name: sum(each[name][0] for each in sums if name in each) for name in sums[0]}
    return bool(sum(abs(sums[0][n][1] - t) for n, t in totals.items()) < _CLOSE * sum(map(abs, totals.values())))


def _counts_before(history: History, event: Event) -> bool:
    """True if a number was summed over ranks before the gradients were: a loss over the global batch."""
    calls = [call for call in history.of("collective", rank=event["rank"]) if call.get("op") == "all_reduce"]
    calls = [call for call in calls if call["number"] < event["number"] and call["step"] == event["step"]]
    at = (event.get("at") or [])[:2]
    return any(_elements(call) <= _NUMBERS and (call.get("at") or [])[:2] != at for call in calls)


def _elements(call: Event) -> int:
    product = 1
    for size in call.get("shape") or ():
        product *= size
    return product


def _divided_loss(history: History, event: Event) -> bool:
    """True if the loss was divided: by a multiple of the number of ranks, or by an unknown number."""
    for step in history.of("step", rank=event["rank"]):
        for each in step.get("backwards") or ():
            divisor = each.get("divisor")
            if divisor is not None and divisor != 1 and divisor % len(history.ranks) == 0:
                return True
            if divisor is None and any(name.startswith(("Div", "Mul")) for name in each.get("ops", ())[:2]):
                return True
    return False


@rule("LS206", "steps-differ", "ranks make different numbers of steps or backward passes")
def steps_differ(history: History) -> Iterable[Finding] | str:
    """A rank that leaves out a step, or a backward pass that exchanges gradients."""
    groups, findings, seen = replicas(history), [], False
    joined = any(event.get("joined") for event in history.of("loader_end", "exit"))
    for key, by_rank in steps(history).items():
        for group in groups:
            ranks = tuple(rank for rank in group if rank in by_rank)
            findings += _idle(history, group, by_rank)
            if len(ranks) < 2 or joined:
                continue
            seen = True
            findings += filter(None, [_left_out(history, key, ranks, by_rank)])
    return findings if seen or findings else "no ranks of one group made steps of one optimizer"


def _idle(history: History, group: tuple[int, ...], by_rank: Indexed) -> list[Finding]:
    """A rank that makes backward passes, and no step of any optimizer."""
    passes_of = {event["rank"]: event.get("backwards_left") for event in history.of("exit")}
    idle = [rank for rank in group if passes_of.get(rank) and not any(history.of("step", rank=rank))]
    first = next((events[min(events)] for rank, events in sorted(by_rank.items()) if rank in group), None)
    if not idle or first is None:
        return []
    evidence = f"{named(idle)} made {passes_of[idle[0]]} backward passes and no step, and others made steps"
    remedy = "every rank steps: their parameters are equal because all do the same"
    return [Finding("LS206", place(first.get("at")), evidence, None, remedy, group, first["step"])]


def _left_out(history: History, key: Key, ranks: tuple[int, ...], by_rank: Indexed) -> Finding | None:
    remedy = "decide on all ranks together: all_reduce the flag (MAX) before `continue` or a skipped step"
    sums = dict.fromkeys(ranks, 0)
    for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
        for rank in ranks:
            backwards = by_rank[rank][index].get("backwards") or ()
            sums[rank] += sum(each.get("synced") is True for each in backwards)
        if differ(sums):
            event = by_rank[max(sums, key=lambda rank: sums[rank])][index]
            backwards = event.get("backwards") or [{}]
            evidence = f"before step {index} of this optimizer, backward passes with an exchange: {each_rank(sums)}"
            cause = "a rank left out a step after a backward pass: its gradients are then paired with other steps'"
            at = place(backwards[0].get("at") or event.get("at"))
            step_at = place(event.get("at"))
            if at and step_at and at.file == step_at.file:
                at = at._replace(line=sources.condition(at.file, at.line, step_at.line) or at.line)
            return Finding("LS206", at, evidence, cause, remedy, ranks, index)
    counts = {rank: len(by_rank[rank]) for rank in ranks}
    exits = {event["rank"]: event for event in history.of("exit")}
    is_over = all(rank in exits and not exits[rank].get("code") and not exits[rank].get("error") for rank in ranks)
    if not (is_over and differ(counts)) or not _exchanges(by_rank):
        return None
    event = by_rank[ranks[0]][max(by_rank[ranks[0]])]
    evidence = f"steps of this optimizer until the end: {each_rank(counts)}"
    return Finding("LS206", place(event.get("at")), evidence, None, remedy, ranks, min(counts.values()))


def _exchanges(by_rank: Indexed) -> bool:
    events = [event for by_index in by_rank.values() for event in by_index.values()]
    return any(each.get("synced") for event in events for each in event.get("backwards") or ())
