"""Rules on optimizers, schedulers and scalers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import facts, sources
from lockstep_audit.rules.facts import number_of

_NO_STEPS = "no ranks of one group made steps of one optimizer"
_PLATEAU = "ReduceLROnPlateau"
_LEFT, _TURNS = 0.9, 3
_OF_TORCH = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax")
"""Optimizers that keep no copy of the weights in higher precision."""


def _shared(history: EventHistory) -> list[tuple[facts.Key, tuple[int, ...], dict[int, dict[int, Event]]]]:
    """Optimizers that several ranks of one group step: key, ranks, steps."""
    found = []
    for key, by_rank in facts.steps(history).items():
        for group in facts.replicas(history):
            ranks = tuple(rank for rank in group if rank in by_rank)
            if len(ranks) > 1:
                found.append((key, ranks, by_rank))
    return found


@facts.rule("LS301", "rates-differ", "hyperparameters of an optimizer differ between ranks")
def rates_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Learning rates and the like that differ at the same step."""
    shared, findings = _shared(history), []
    plateaus = _plateaus(history)
    joined = any(event.get("joined") for event in history.of("loader_end", "exit"))
    for key, ranks, by_rank in shared:
        found = _first_difference(ranks, by_rank)
        if found is None or plateaus or (joined and not facts.differ({r: _in_turn(by_rank[r]) for r in ranks})):
            continue
        index, name, values = found
        schedulers = {e["rank"]: e for e in history.of("scheduler") if e["rank"] in ranks and e["step"] <= index + 1}
        evidence = f"{name} at step {index}: {facts.each_rank(values)}"
        at, cause = by_rank[ranks[0]][index].get("at"), None
        rows = sources.sets_rates(at[0]) if at else []
        if index == 0:
            at = facts.optimizer_at(history, key)
            cause = f"each rank computes {name} from its own values before the first step"
        elif schedulers:
            at = next(iter(schedulers.values())).get("at") or at
            cause = f"the scheduler of {facts.line(at)} has a different state on each rank"
        elif at and rows:
            at, cause = [at[0], rows[0], ""], "the script sets the rate from something that differs between ranks"
        remedy = f"compute {name} from values that all ranks share, such as world_size and the step"
        findings.append(Finding("LS301", facts.place(at), evidence, cause, remedy, ranks, index))
    return findings if shared else _NO_STEPS


def _in_turn(steps: dict[int, Event]) -> list[Any]:
    """The hyperparameters of a rank, in order. With Join, ranks may have different numbers of steps."""
    return [told for index in sorted(steps) if (told := steps[index].get("hyperparameters"))]


def _first_difference(ranks: tuple[int, ...], by_rank: dict[int, dict[int, Event]]) -> tuple[int, str, Any] | None:
    """The first step, name and values by rank of a hyperparameter that differs."""
    now: dict[int, list[dict[str, Any]]] = {}
    for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
        for rank in ranks:
            now[rank] = by_rank[rank][index].get("hyperparameters") or now.get(rank) or []
        if facts.differ({rank: len(groups) for rank, groups in now.items()}) or not facts.differ(now):
            continue
        for number in range(len(now[ranks[0]])):
            for name in now[ranks[0]][number]:
                values = {rank: now[rank][number].get(name) for rank in ranks}
                if facts.differ(values):
                    return index, name, values
    return None


def _plateaus(history: EventHistory) -> list[tuple[Event, dict[int, Any]]]:
    """Steps of ReduceLROnPlateau whose metric differs by rank: an event, and the metric by rank."""
    known = facts.keys(history, "scheduler", "scheduler", "at")
    found: dict[Any, dict[int, Event]] = {}
    for event in history.of("scheduler"):
        if event.get("metric") is not None and event.get("class", _PLATEAU) == _PLATEAU:
            key = known[event["rank"], event["scheduler"]], event["step"]
            found.setdefault(key, {})[event["rank"]] = event
    groups = facts.replicas(history)
    told = [(next(iter(e.values())), {rank: event["metric"] for rank, event in e.items()}) for e in found.values()]
    return [each for each in told if facts.differ(each[1]) and any(set(each[1]) <= set(group) for group in groups)]


@facts.rule("LS302", "local-plateau", "ReduceLROnPlateau decides from the metric of one rank")
def local_plateau(history: EventHistory) -> Iterable[Finding] | str:
    """A metric that differs between ranks. Their learning rates will differ, too."""
    findings = []
    for event, metrics in _plateaus(history)[:1]:
        evidence = f"scheduler.step got {facts.each_rank(metrics)}"
        rates = [found for _, ranks, by_rank in _shared(history) if (found := _first_difference(ranks, by_rank))]
        evidence += f"; {rates[0][1]} then differs: {facts.each_rank(rates[0][2])}" if rates else ""
        cause = "each rank passes its own metric, so each decides for itself when to lower the learning rate"
        remedy = "all_reduce the metric (mean) before scheduler.step(metric)"
        at = facts.place(event.get("at"))
        findings.append(Finding("LS302", at, evidence, cause, remedy, tuple(metrics), event["step"]))
    has_plateau = any(event.get("metric") is not None for event in history.of("scheduler"))
    return findings if has_plateau else "no ReduceLROnPlateau"


@facts.rule("LS303", "optimizer-owns-nothing", "the optimizer has no parameter of the trained model")
def optimizer_owns_nothing(history: EventHistory) -> Iterable[Finding] | str:
    """An optimizer that was made before the model was sharded or replaced: its steps have no effect."""
    wrapped = {(event["rank"], event["model"]): event for event in history.of("wrap")}
    if not wrapped:
        return "no wrapped model"
    made = list(history.of("optimizer"))
    findings: list[Finding] = []
    for event in made:
        held = sum(int(group.get("parameters") or 0) for group in event.get("groups") or ())
        is_dead = event.get("owned") == 0 and held > 0 and (event.get("gradients_none") or 0) >= held
        missing = {str(model): names for model, names in (event.get("missing") or {}).items() if names}
        if not (is_dead and missing):
            continue
        at = event.get("made_at") or event.get("at")
        wraps = [w for (rank, model), w in wrapped.items() if rank == event["rank"] and str(model) in missing]
        names = next(iter(missing.values()))
        evidence = f"no gradient for its {number_of(held, 'parameter')}; the model has {facts.some(names)}, which no "
        evidence += "optimizer has"
        cause = None
        if wraps:
            how, wrapped_at = wraps[0]["how"], facts.line(wraps[0].get("at"))
            cause = f"{how} at {wrapped_at} made new parameters after the optimizer took the old ones"
        remedy = "make the optimizer after the model is wrapped, sharded and moved"
        findings.append(Finding("LS303", facts.place(at), evidence, cause, remedy, (event["rank"],), event["step"]))
    return findings if made else "no optimizer made a step"


@facts.rule("LS304", "clip-before-unscale", "gradients are clipped while they are scaled")
def clip_before_unscale(history: EventHistory) -> Iterable[Finding] | str:
    """clip_grad_norm_ before scaler.unscale_: the limit applies to gradients that are thousands of times too large."""
    findings, seen = list[Finding](), False
    for event in history.of("step"):
        scaler, clips = event.get("scaler") or {}, event.get("clips") or []
        seen = seen or bool(scaler and clips)
        if scaler.get("unscaled_before_clip") is not False or not clips or scaler.get("scale") in (None, 1, 1.0):
            continue
        at = clips[0].get("at")
        evidence = f"gradients were multiplied by {scaler['scale']:g} when they were clipped to {clips[0].get('limit')}"
        cause = "scaler.unscale_(optimizer) was not called before"
        remedy = "call scaler.unscale_(optimizer) between scaler.scale(loss).backward() and clip_grad_norm_"
        findings.append(Finding("LS304", facts.place(at), evidence, cause, remedy, (event["rank"],), event["step"]))
    return findings if seen else "no step clipped gradients under a GradScaler"


@facts.rule("LS305", "scalers-differ", "loss scales differ between ranks")
def scalers_differ(history: EventHistory) -> Iterable[Finding] | str:
    """A GradScaler that skips a step only on some ranks, or whose scale differs."""
    findings, seen = [], False
    for _, ranks, by_rank in _shared(history):
        for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))):
            events = {rank: by_rank[rank][index] for rank in ranks}
            if not all(event.get("scaler") for event in events.values()):
                continue
            seen = True
            scales = {rank: event["scaler"].get("scale") for rank, event in events.items()}
            skipped = {rank: bool(event.get("skipped")) for rank, event in events.items()}
            if facts.differ(scales) or facts.differ(skipped):
                words = {rank: "skipped" if skips else "made" for rank, skips in skipped.items()}
                is_skipped = facts.differ(skipped)
                evidence = f"scale: {facts.each_rank(scales)}"
                evidence = f"step {index}: {facts.each_rank(words)}" if is_skipped else evidence
                cause = "each rank looks for inf in its own gradients or shards, and decides for itself"
                remedy = "use ShardedGradScaler for shards; otherwise unscale after gradients are exchanged"
                at = events[ranks[0]].get("at")
                findings.append(Finding("LS305", facts.place(at), evidence, cause, remedy, ranks, index))
                break
    return findings if seen else "no GradScaler on several ranks"


@facts.rule("LS306", "scheduler-too-fast", "the scheduler steps several times for each optimizer step", "warning")
def scheduler_too_fast(history: EventHistory) -> Iterable[Finding] | str:
    """A learning rate that falls N times too fast. Accelerate does this by design, and is excluded."""
    stepped = [event for event in history.of("scheduler") if event.get("per_step") is not None]
    if facts.uses(history, "accelerate"):
        return "Accelerate steps schedulers once for each rank by design"
    findings = {}
    for event in stepped:
        at = event.get("at")
        if event["per_step"] >= 2 and event["step"] > 0 and str(at) not in findings:
            evidence = f"{number_of(event['per_step'], 'step')} of {event.get('class', 'a scheduler')} since "
            evidence += "the last optimizer step"
            world, told = len(history.ranks), [e["per_step"] for e in stepped if e.get("at") == at]
            cause = f"the factor is the number of ranks, {world}" if len(told) > world and {*told} == {world} else None
            remedy, ranks = "call scheduler.step() once, after optimizer.step()", (event["rank"],)
            findings[str(at)] = Finding("LS306", facts.place(at), evidence, cause, remedy, ranks, event["step"])
        elif event["per_step"] == 1:
            findings.pop(str(at), None)
    return list(findings.values()) if stepped else "no scheduler"


@facts.rule("LS311", "rounded-away", "updates of 16-bit weights are rounded away", "warning")
def rounded_away(history: EventHistory) -> Iterable[Finding] | str:
    """Weights that are bfloat16 themselves: steps smaller than their precision change nothing."""
    seen, turns = False, dict[tuple[int, str], list[bool]]()
    for event in history.of("step", rank=min(history.ranks, default=0)):
        for name, (given, left) in (event.get("rounded") or {}).items():
            seen = True
            if given:
                turns.setdefault((event["optimizer"], name), []).append(left > _LEFT * given)
    made = {event["optimizer"]: event for event in reversed(list(history.of("optimizer")))}
    for number, event in made.items():
        lost = [name for (of, name), each in turns.items() if of == number and len(each) >= _TURNS and all(each)]
        if lost and event.get("class") in _OF_TORCH:
            evidence = f"in all examined steps, at least {_LEFT:.0%} of the values of {facts.some(lost)} that had a "
            evidence += "gradient were the same after the step"
            cause = "the weights themselves are 16-bit: a step that is smaller than their precision changes nothing"
            remedy = "keep float32 weights, and compute in bfloat16: torch.autocast, or fully_shard(..., "
            remedy += "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            at: Any = event.get("made_at") or event.get("at")
            rows = sources.lowers(at[0]) if at else []
            where = facts.place([at[0], rows[0], ""] if rows else at)
            return [Finding("LS311", where, evidence, cause, remedy, tuple(history.ranks), event["step"])]
    return [] if seen else "no optimizer stepped 16-bit weights"
