"""Where replicas of a model diverge: queries of several rules on gradients and parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.rules.facts import differ, named, replicas, some, steps
from lockstep_audit.rules.loaders import iterations

_AVERAGING = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor")
_FEW = 8
"""A tensor with at most this many elements may hold metrics. A larger one may hold parameters."""


Indexed = dict[int, dict[int, Event]]
"""The steps of an optimizer, by rank and index."""


@dataclass(frozen=True)
class Divergence:
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


def divergences(history: EventHistory) -> tuple[list[Divergence], bool]:
    """The first divergence of each optimizer's model, and whether any step was compared.

    Replicas that are equal again later, or that the script averages itself, diverge on purpose.
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
            apart = {name for each in pairs for name in each.parameters}
            if pairs and not (apart and apart <= unwrapped(history)):  # the end covers wrapped models only
                pairs += _at_the_end(history, by_rank, ranks, ignored)
            compared = compared or bool(pairs)
            first = next((divergence for divergence in pairs if divergence.gradients or divergence.parameters), None)
            begin = next((turn for turn, each in enumerate(pairs) if each.parameters), len(pairs))  # not at a rate of 0
            together = begin == len(pairs) or any(not each.parameters for each in pairs[begin:])
            if first and not averaged and not together and not hooked(history) and not _meet(history, first):
                found.append(first)
    return found, compared


def own_from_the_start(history: EventHistory) -> set[str]:
    """Parameters that each rank has for itself, such as experts: they start unequal, and nothing exchanges them.

    The model's other parameters must be equal, and the script must exchange by hand or with an all-to-all. Or each
    rank has its own data and saves its own model.
    """
    if _keep_their_own(history):
        told = [event for event in history.of("optimizer") if not event.get("owned")]
        return {name for event in told for name in event.get("initial") or ()}
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


def _keep_their_own(history: EventHistory) -> bool:
    """True if a wrapper exists, no sampler deals data to ranks, and each rank saves files that no other rank saves."""
    if not any(history.of("wrap")) or any(history.of("hand_reduce")):
        return False
    saved = {r: {e.get("path") for e in history.of("save", rank=r) if e.get("how") != "open"} for r in history.ranks}
    own = [paths - set().union(*(saved[other] for other in saved if other != r)) for r, paths in saved.items()]
    dealt = any((event.get("distributed") or {}).get("replicas", 1) > 1 for event in history.of("loader"))
    return len(saved) > 1 and all(own) and not dealt


def compared_steps(by_rank: Indexed, ranks: tuple[int, ...], ignored: set[str]) -> Iterator[Divergence]:
    for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
        events = {rank: by_rank[rank][index] for rank in ranks}
        if all("parameters" in event for event in events.values()):
            names = set.intersection(*(set(event["parameters"]) for event in events.values())) - ignored
            kinds: list[list[str]] = []
            for kind in ("gradients", "parameters"):
                told = {rank: event.get(kind) or {} for rank, event in events.items()}
                kinds += [[name for name in sorted(names) if differ({r: each.get(name) for r, each in told.items()})]]
            yield Divergence(ranks, events, kinds[0], kinds[1], len(names))


def _at_the_end(history: EventHistory, by_rank: Indexed, ranks: tuple[int, ...], ignored: set[str]) -> list[Divergence]:
    """The parameters of a model of DDP at the end of the script, as if the last step had been looked at."""
    ends = {event["rank"]: event.get("parameters") or {} for event in history.of("exit") if event["rank"] in ranks}
    lasts = {rank: by_rank[rank][max(by_rank[rank])] for rank in ranks}
    loads = [event for event in history.of("state") if event["rank"] in ranks and "model" in event]
    if any(event["step"] > lasts[event["rank"]]["step"] for event in loads):  # the end shows a loaded file
        return []
    now = {rank: ends.get(rank, {}).get(str(last.get("model", 0))) for rank, last in lasts.items()}
    if differ({rank: len(by_rank[rank]) for rank in ranks}) or not all(isinstance(each, dict) for each in now.values()):
        return []
    events = {rank: {**last, "parameters": now[rank], "gradients": None} for rank, last in lasts.items()}
    return list(compared_steps({rank: {0: event} for rank, event in events.items()}, ranks, ignored))


def after_joins(history: EventHistory) -> Iterator[Divergence]:
    """The first steps of later epochs in which parameters differ although gradients do not, after uneven joins.

    A join makes parameters equal, but not the states of optimizers: a rank that ran out of data missed some steps.
    """
    if any(history.of("hand_average", "hook")) or not any(history.of("join")):
        return
    turns = [by_rank for epochs in iterations(history).values() for epoch, by_rank in epochs.items() if epoch]
    groups = replicas(history, "ddp")
    for by_rank, group, its in itertools.product(steps(history).values(), groups, turns):
        firsts = dict[int, Event]()
        for rank in group if {*group} <= {*by_rank} & {*its} else ():
            later = [e for e in by_rank[rank].values() if e["number"] > its[rank].begin["number"]]
            firsts |= {rank: min(later, key=lambda e: int(e["number"]))} if later else {}
        if len(firsts) == len(group) and differ({rank: event["index"] for rank, event in firsts.items()}):
            pairs = compared_steps({rank: {0: event} for rank, event in firsts.items()}, group, set())
            yield from (pair for pair in pairs if pair.parameters and not pair.gradients)


def averages(history: EventHistory) -> bool:
    """True if the script exchanges tensors itself between steps: perhaps parameters."""
    shapes: dict[tuple[str, int], set[str]] = {}
    of_gradients, evaluations = {str(event.get("at")) for event in history.of("hand_reduce")}, _evaluations(history)
    for call in history.of("collective"):
        is_metric = any(first < call["number"] < last for first, last in evaluations.get(call["rank"], ()))
        if str(call.get("at")) in of_gradients or (is_metric and "gather" in str(call.get("op"))):
            continue
        if call["step"] > 0 and "float" in str(call.get("dtype")) and call.get("op") in _AVERAGING:
            shapes.setdefault((str(call.get("at")), call["step"]), set()).add(str(call.get("shape")))
            if elements(call) > _FEW:
                return True
    return any(len(each) > 1 for each in shapes.values())


def _evaluations(history: EventHistory) -> dict[int, list[tuple[int, int]]]:
    """For each rank: the numbers of the events at which evaluation-only iterations begin and end."""
    found: dict[int, list[tuple[int, int]]] = {}
    for epochs in iterations(history).values():
        for rank, it in (pair for by_rank in epochs.values() for pair in by_rank.items()):
            if it.end and it.end.get("forwards_eval") and not it.is_training:
                found.setdefault(rank, []).append((it.begin["number"], it.end["number"]))
    return found


def hooked(history: EventHistory) -> bool:
    """True if a communication hook (local SGD, compression) exchanges in its own way."""
    return any(event.get("hook") for event in history.of("wrap", "step")) or any(history.of("hook"))


def _meet(history: EventHistory, divergence: Divergence) -> bool:
    """True if the parameters of wrapped models are equal at the end of the script, and some of them had diverged."""
    ends = {e["rank"]: e.get("parameters") for e in history.of("exit") if e["rank"] in divergence.ranks}
    models = [each for told in ends.values() for each in (told or {}).values()]
    known = {name for each in models if isinstance(each, dict) for name in each}
    is_other = known and divergence.parameters and not known & {*divergence.parameters}
    return len(ends) == len(divergence.ranks) and all(ends.values()) and not differ(ends) and not is_other


def unwrapped(history: EventHistory) -> set[str]:
    """Names of parameters in optimizers that belong to no wrapped model, next to those of a wrapped model."""
    return {name for event in history.of("optimizer") for name in event.get("unwrapped") or ()}


def elements(call: Event) -> int:
    product = 1
    for size in call.get("shape") or ():
        product *= size
    return product
