"""Rules on gradient accumulation: what the micro-batches of a step add up to."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import each_rank, line, number_of, passes, place, replicas, rule, steps, uses
from lockstep_audit.rules.loaders import Iteration, iterations

_NONE = "no step took several backward passes"
_UNEQUAL = 1.25
"""Micro-batches whose label counts differ by at least this factor are unequal."""
_SAME = 0.01
_EACH = 0.75
"""At least this share of the backward passes have a batch of their loader."""
_OFTEN = 3
_OTHER = ("Add", "Sub")
"""Last operations of a loss that is not only a mean."""


def _usual(events: Iterable[Event]) -> int:
    """The usual number of backward passes before a step; 0 without steps."""
    counts = Counter(len(passes(event)) for event in events)
    return counts.most_common(1)[0][0] if counts else 0


def _accumulating(history: EventHistory) -> list[tuple[int, int, list[Event]]]:
    """Optimizers of each rank that usually step after several micro-batches: rank, number, steps in order."""
    found = []
    for by_rank in steps(history).values():
        for rank, by_index in by_rank.items():
            events = [by_index[index] for index in sorted(by_index)]
            if (usual := _usual(events)) > 1 and _only_optimizer(history, rank) and _has_micro_batches(events):
                found.append((rank, usual, events))
    return found


def _has_micro_batches(events: list[Event]) -> bool:
    """True if backward passes belong to micro-batches: not to several losses of one batch, closures or perturbations.

    Each pass has its own batch of one loader, or waits for the last to exchange gradients, or the script says so.
    """
    told = [each for event in events for each in passes(event)]
    lines = {str(each.get("at")) for each in told}
    if len(lines) > 2 or any(each.get("began_clear") and "discarded" not in each for each in told):
        return False  # gradients were cleared, and parameters changed, between the passes of a step
    given = Counter(micro["loader"] for event in events for micro in event.get("micro_batches") or ())
    at: Any = told[0].get("at") if len(lines) == 1 else None
    is_named = bool(at) and any(word in sources.names_around(*at[:2]) for word in ("accum", "micro"))
    is_waiting = any(each.get("unsynced_by_user") for each in told)
    return is_named or is_waiting or max(given.values(), default=0) >= _EACH * len(told)


def _divides_gradients(event: Event) -> bool:
    """True if the script scales the gradients of a step after the last backward pass, other than back from a scaler."""
    factor = event["rescaled"] * (passes(event)[-1].get("factor") or 1.0) if "rescaled" in event else 1.0
    return bool(abs(factor - 1) > _SAME)


def is_divided(backward: Event) -> bool:
    """True if the last operations of a loss divide it, or multiply it by a number."""
    if backward.get("divisor") is not None:
        return bool(backward["divisor"] != 1)
    return any(name.startswith(("Div", "Mul")) for name in backward.get("ops", ()))


def _is_mean(ops: Sequence[str]) -> bool:
    """True if the loss is a mean that the loss function computes, undivided or divided by the accumulation."""
    return any(name.startswith(("NllLoss", "Mean", "CrossEntropy")) for name in ops[:2])


@rule("LS401", "leftover-micro-batches", "the last micro-batches of an epoch make no step")
def leftover_micro_batches(history: EventHistory) -> Iterable[Finding] | str:
    """Gradients at the end of an epoch that are dropped, or added to the first step of the next epoch."""
    accumulating = _accumulating(history)
    if not accumulating:
        return _NONE
    trained: dict[int, list[Iteration]] = {}
    for epochs in iterations(history).values():
        for by_rank in epochs.values():
            for rank, it in by_rank.items():
                if it.end and it.is_complete and it.end.get("backwards"):
                    trained.setdefault(rank, []).append(it)
    for its in trained.values():
        its.sort(key=lambda it: int(it.begin["number"]))
    found = [_leftover(rank, usual, events, trained.get(rank, [])) for rank, usual, events in accumulating]
    return [each for each in found if each]


def _only_optimizer(history: EventHistory, rank: int) -> bool:
    return len({event["optimizer"] for event in history.of("step", rank=rank)}) == 1


def _leftover(rank: int, usual: int, events: list[Event], its: list[Iteration]) -> Finding | None:
    remedy = "also step at the last batch of an epoch: `if (i + 1) % accumulation == 0 or i + 1 == len(loader)`, and "
    remedy += "divide the loss by the number of micro-batches of this step"
    cause = "the number of batches is not a multiple of the accumulation, and nothing steps at the end of the epoch"
    for number, it in enumerate(its):
        end: Any = it.end
        within = [e for e in events if it.begin["number"] < e["number"] < end["number"]]
        later = [e for e in events if e["number"] > end["number"]]
        left = end["backwards"] - sum(len(passes(e)) for e in within)
        if number == 0 and left > 0:
            count = len(passes(later[0])) if later else 0
            what = f"{number_of(end['backwards'], 'backward pass')} in an epoch, a step after every {usual}, "
            what += f"and {left} left over"
            if later and count == usual:
                return None  # steps span the ends of epochs
            if not later or any(each.get("discarded") for each in passes(later[0])):
                what += ": no step used their gradients"
            elif count > usual:
                what += f": the next step added them to its own and used {count}"
            else:
                return None
            at = next((e.get("at") for e in reversed(within)), it.begin.get("at"))
            return Finding("LS401", place(at), what, cause, remedy, (rank,), end["step"])
    return None


@rule("LS402", "undivided-loss", "the losses of micro-batches are not divided", "warning")
def undivided_loss(history: EventHistory) -> Iterable[Finding] | str:
    """Accumulated losses that nothing divides: the gradient grows with the number of micro-batches."""
    findings: list[Finding] = []
    accumulating = _accumulating(history)
    for rank, usual, events in accumulating:
        backwards = [each for event in events for each in passes(event)]
        known = [each for each in backwards if "ops" in each]
        if not known or any(is_divided(each) for each in known) or any(map(_divides_gradients, events)):
            continue
        at = backwards[0].get("loss_at") or backwards[0].get("at")
        evidence = f"a step adds up {usual} backward passes, and no loss is divided at the end"
        cause = "the sum of the means is that many times their mean, unless the learning rate allows for it"
        remedy = "(loss / accumulation).backward(), or divide a summed loss by the number of all labels of the step"
        findings.append(Finding("LS402", place(at), evidence, cause, remedy, (rank,), events[0]["step"]))
    return findings if accumulating else _NONE


@rule("LS403", "unequal-weights", "the labels of one step have unequal weights", "warning")
def unequal_weights(history: EventHistory) -> Iterable[Finding] | str:
    """Means over unequal numbers of labels that are then averaged as if the numbers were equal."""
    known = False
    groups = replicas(history) or [(rank,) for rank in history.ranks]
    factors = [event.get("factor", 0.0) * len(history.ranks) for event in history.of("hand_reduce")]
    averages = not any(history.of("hook")) and all(abs(factor - 1) < _SAME for factor in factors)
    for by_rank in steps(history).values():
        for group in groups:
            ranks = [rank for rank in group if rank in by_rank]
            selected: list[tuple[Event, list[Event], dict[int, list[Any]]]] = []
            for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))) if ranks else ():
                events = {rank: by_rank[rank][index] for rank in ranks}
                micro = {rank: event.get("micro_batches") or () for rank, event in events.items()}
                counts = {rank: [m["valid"] for m in each if "valid" in m] for rank, each in micro.items()}
                backwards = [each for event in events.values() for each in passes(event)]
                by_hand = {r: [_count(each) for each in passes(e)] for r, e in events.items()}
                given = {r: [m.get("samples") for m in e.get("micro_batches") or ()] for r, e in events.items()}
                is_by_hand = len(backwards) > 1 and all(all(each) for each in by_hand.values())
                is_by_hand = is_by_hand and by_hand != given and not any(history.of("hand_reduce", "hook"))
                told: dict[int, list[Any]] = by_hand if is_by_hand else counts
                rows = {r: _rows(passes(e)) for r, e in events.items()}
                weights = [each.get("factor", 1.0) for each in backwards if not _is_quotient(each)]
                if weights and max(weights) - min(weights) > _SAME * abs(max(weights)):
                    known = True
                    continue  # the script weights the means
                weighed = {r: _weights(passes(e)) for r, e in events.items()}
                if all(weighed.values()) and not any(history.of("hand_reduce", "hook")):
                    selected.append((events[ranks[0]], backwards, weighed))
                elif averages and all(rows.values()) and len(backwards) > 1 and rows != given:
                    selected.append((events[ranks[0]], backwards, rows))
                known = known or bool(selected) or sum(map(len, told.values())) > 1
                means = [_is_mean(each.get("ops") or ()) and not each.get("summed") for each in backwards]
                is_plain = is_by_hand or all(means)
                if _differ(told) and is_plain and backwards:
                    return [_unequal(events[ranks[0]], backwards, told, tuple(ranks))]
            unequal = [each for each in selected if _differ(each[2])]
            if len(unequal) > 1 and 2 * len(unequal) > len(selected):  # only a last batch may be short
                return [_unequal(*unequal[0], tuple(ranks))]
    return [] if known else "no step had several micro-batches with masked or selected labels"


def _differ(counts: dict[int, list[Any]]) -> bool:
    """True if some label counts are unequal."""
    flat = [count for each in counts.values() for count in each if count]
    return bool(flat) and min(flat) * _UNEQUAL < max(flat)


def _rows(backwards: list[Event]) -> list[int]:
    """For each backward pass, the number of labels in its mean, if the loss is only a mean; else empty."""
    found = [each.get("rows", 0) if _is_mean(each.get("ops") or ()) else 0 for each in backwards]
    first = {each["ops"][0] for each in backwards if each.get("ops")}
    return [] if any(op.startswith(_OTHER) for op in first) or not all(found) else found


def _weights(backwards: list[Event]) -> list[float]:
    """For each of several backward passes, the class weights that a mean was divided by; empty if one has none."""
    found = [each.get("weights", 0.0) if _is_mean(each.get("ops") or ()) else 0.0 for each in backwards]
    return found if len(found) > 1 and all(found) else []


def _count(backward: Event) -> int | None:
    """The number of labels that a loss averages: in a mean that ignores some, or in a sum that is divided."""
    divisor = backward.get("divisor") or 0
    if _is_quotient(backward) and divisor > 1 and divisor == int(divisor):
        return int(divisor)
    return backward.get("labels") if _is_mean(backward.get("ops") or []) else None


def _is_quotient(backward: Event) -> bool:
    """True if the loss is a sum that is divided, and nothing else."""
    ops = backward.get("ops") or []
    is_sum = len(ops) > 1 and (ops[1].startswith("Sum") or (backward.get("summed") and ops[1].startswith("NllLoss")))
    return bool(is_sum and ops[0].startswith("Div"))


def _unequal(event: Event, backwards: list[Event], counts: dict[int, list[Any]], ranks: tuple[int, ...]) -> Finding:
    is_weighted = "weights" in backwards[0]
    what = "weights of the labels" if is_weighted else "labels that count"
    evidence = f"{what}, by micro-batch: {each_rank(counts)}; each mean has the same weight in step {event['step']}"
    cause = "a mean over unmasked labels weights a label in a short batch more than one in a long batch"
    if is_weighted:
        cause = "a weighted mean is divided by the class weights of its labels, so micro-batches of light "
        cause += "classes count too much"
    unit = "weights of the labels" if is_weighted else "number of labels"
    remedy = f"sum the loss and divide by the {unit} in the step on all ranks (with DDP, multiply by world_size)"
    return Finding("LS403", place(backwards[0].get("at")), evidence, cause, remedy, ranks, event["step"])


@rule("LS404", "sync-each-micro-batch", "every micro-batch exchanges gradients", "warning")
def sync_each_micro_batch(history: EventHistory) -> Iterable[Finding] | str:
    """Accumulation without no_sync(): the same result at several times the communication."""
    findings: list[Finding] = []
    accumulating = _accumulating(history)
    for rank, usual, events in accumulating:
        full = [passes(event) for event in events if len(passes(event)) == usual]
        if any(each.get("synced") is not True for backwards in full for each in backwards):
            continue
        at = full[0][0].get("at")
        evidence = f"all {usual} backward passes before a step exchange gradients"
        remedy = "`with model.no_sync():` around forward and backward of all micro-batches but the last of a step"
        cause = "each backward pass of DistributedDataParallel exchanges gradients unless no_sync() is active"
        findings.append(Finding("LS404", place(at), evidence, cause, remedy, (rank,), events[0]["step"]))
    return findings if accumulating else _NONE


@rule("LS405", "clip-each-micro-batch", "gradients are clipped before all micro-batches are added", "warning")
def clip_each_micro_batch(history: EventHistory) -> Iterable[Finding] | str:
    """Clipping inside the accumulation: the limit then applies to a partial gradient."""
    accumulating, seen = _accumulating(history), False
    for _, _, events in accumulating:
        for event in events:
            clips, total = event.get("clips") or [], len(event.get("backwards") or ())
            seen = seen or bool(clips)
            early = [clip for clip in clips if clip.get("backwards_before", total) < total]
            if early:
                evidence = f"clipped after {early[0]['backwards_before']} of {total} backward passes of this step"
                remedy = "clip once, after the last backward pass and before optimizer.step()"
                cause = "clip_grad_norm_ is called for each micro-batch"
                at = place(early[0].get("at"))
                return [Finding("LS405", at, evidence, cause, remedy, tuple(history.ranks), event["step"])]
    return [] if seen else "no step with several micro-batches clipped gradients"


@rule("LS407", "average-each-micro-batch", "an average of the weights is updated for each micro-batch", "warning")
def average_each_micro_batch(history: EventHistory) -> Iterable[Finding] | str:
    """An exponential average that is updated several times with the same weights, so it decays too fast."""
    accumulating = _accumulating(history)
    for rank, usual, events in accumulating:
        at = next((event["at"] for event in events if event.get("at")), None)
        rows = sources.averaged_outside(at[0], at[1]) if at else []
        if rows:
            evidence = f"the average is updated after each of {usual} backward passes, but the optimizer steps once"
            cause = "the update is outside the `if` that decides about the step, so its decay applies too often"
            remedy = "update the average right after optimizer.step()"
            where = place([at[0], rows[0], ""] if at else None)
            return [Finding("LS407", where, evidence, cause, remedy, (rank,), events[0]["step"])]
    return [] if accumulating else _NONE


@rule("LS406", "discarded-gradients", "gradients of micro-batches are thrown away")
def discarded_gradients(history: EventHistory) -> Iterable[Finding] | str:
    """Steps whose gradients are cleared between backward passes, so that only the last passes count."""
    findings: list[Finding] = []
    seen = False
    for by_rank in steps(history).values():
        for rank, by_index in by_rank.items():
            events = [by_index[index] for index in sorted(by_index)]
            looked = [e for e in events if any("discarded" in each for each in e.get("backwards") or ())]
            seen = seen or bool(looked)
            if _usual(events) < 2 or len(looked) < 2 or not all(map(_discards, looked)):
                continue
            backwards = looked[0]["backwards"]
            last = next(n for n in range(len(backwards) - 1, 0, -1) if backwards[n].get("discarded"))
            at = backwards[last].get("cleared_at") or _cleared_at(backwards[last].get("at"))
            evidence = f"gradients of {last} of {len(backwards)} backward passes of a step were gone when the next "
            evidence += f"began, with no optimizer step between, in {number_of(len(looked), 'examined step')}"
            cause = "gradients are cleared before each micro-batch, or before the last one, instead of after a step"
            if uses(history, "accelerate") and len(backwards) - last == 1:
                cause += ": inside accumulate(), Accelerate's zero_grad() acts only at the last micro-batch"
            remedy = "call optimizer.zero_grad() right after optimizer.step(), and nowhere else"
            findings.append(Finding("LS406", place(at), evidence, cause, remedy, (rank,), looked[0]["step"]))
    return findings if seen else "no examined step took several backward passes"


@rule("LS408", "mixed-gradients", "a step adds gradients of another optimizer's loss", "warning")
def mixed_gradients(history: EventHistory) -> Iterable[Finding] | str:
    """A backward pass for one optimizer that leaves gradients in the parameters of another, such as a GAN's critic."""
    findings: dict[Any, Finding] = {}
    seen = False
    for by_rank in steps(history).values():
        for rank, by_index in by_rank.items():
            events = [by_index[index] for index in sorted(by_index)]
            known = [event for event in events if event.get("mixed") is not None]
            told = [event["mixed"] for event in known]
            seen = seen or bool(told)
            is_always = len(told) >= _OFTEN and all(told)
            is_first_clean = bool(events) and events[0].get("mixed") is None  # else all passes may belong to the step
            if is_always and (is_first_clean or all(each.get("alone") for each in told)):
                first, at = told[0], place(told[0]["own_at"])
                evidence = f"in {number_of(len(told), 'step')}, the gradients held those of the backward pass at "
                evidence += f"{line(first['at'])}, which the optimizer that steps at {line(first['used_at'])} had used"
                cause = "that pass also reaches this optimizer's parameters, and nothing clears them afterwards"
                remedy = "call this optimizer's zero_grad() right before its backward pass, or freeze its parameters "
                remedy += "with requires_grad_(False) during the other one"
                ranks = (*findings[at].ranks, rank) if at in findings else (rank,)
                findings[at] = Finding("LS408", at, evidence, cause, remedy, ranks, known[0]["step"])
    return list(findings.values()) if seen else "no backward pass reached the parameters of two optimizers"


def _discards(event: Event) -> bool:
    """True if micro-batches of a step lost their gradients before anything read them."""
    backwards = event["backwards"]
    lost = [(one, other) for one, other in pairwise(backwards) if other.get("discarded")]
    alike = any(one.get("at") == other.get("at") or one.get("unsynced_by_user") for one, other in lost)
    last = max((number for number, each in enumerate(backwards) if each.get("discarded")), default=0)
    is_read = any(clip.get("backwards_before", len(backwards)) <= last for clip in event.get("clips") or ())
    places = [at for each in backwards for at in (each.get("at"), each.get("cleared_at")) if at]
    is_read = is_read or event.get("rewritten") or any(_reads_gradients(at[0]) for at in places)
    return alike and not is_read


def _gradients(path: str, context: type[ast.expr_context]) -> list[ast.AST]:
    """`x.grad` in a file, if it is read or set there."""
    found = [n for n in sources.nodes(path) if isinstance(n, ast.Attribute) and n.attr == "grad"]
    return [n for n in found if isinstance(n.ctx, context) and getattr(n.value, "attr", "") != "autograd"]


def _reads_gradients(path: str) -> bool:
    """True if a file uses gradients for more than clearing them or checking that they exist."""
    harmless = set[int]()
    for node in sources.nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in ("zero_", "detach_"):
            harmless.add(id(node.value))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            harmless.add(id(node.left))
    return any(id(node) not in harmless for node in _gradients(path, ast.Load))


def _cleared_at(at: Any) -> Any:
    """The one line of a file that sets a gradient that no zero_grad() cleared; else a given place in that file."""
    rows = sorted({getattr(node, "lineno", 0) for node in _gradients(at[0], ast.Store)}) if at else []
    return [at[0], rows[0], ""] if len(rows) == 1 else at
