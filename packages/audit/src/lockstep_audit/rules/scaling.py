"""Rules on what a script does to gradients between the backward pass and the step, and on the model's mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import differ, each_rank, named, passes, place, replicas, rule, steps, uses

_SAME = 0.01
_LINES, _DIFFERENTIABLE = 8, "torch.distributed.nn.functional.all_reduce, whose backward pass also sums"
_WORDS = {"samples": "samples", "valid": "labels that count", "shifted": "labels that count after the first"}
_MEANS = ("NllLoss", "Mean", "CrossEntropy", "MseLoss", "L1Loss", "SmoothL1Loss", "BinaryCrossEntropy", "HuberLoss")


@rule("LS208", "shards-scaled-apart", "shards of one gradient are scaled by different factors")
def shards_scaled_apart(history: EventHistory) -> Iterable[Finding] | str:
    """Clipping with a norm that each rank computes from its own shards."""
    findings, seen = [], False
    for by_rank in steps(history).values():
        for group in replicas(history, "fsdp1", "fsdp2"):
            ranks = tuple(rank for rank in group if rank in by_rank)
            for index in sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks))) if len(ranks) > 1 else ():
                events = {rank: by_rank[rank][index] for rank in ranks}
                factors = {rank: event["scaling"] for rank, event in events.items() if event.get("scaling")}
                seen = seen or len(factors) > 1
                if len(factors) > 1 and min(factors.values()) < (1 - _SAME) * max(factors.values()):
                    first = events[ranks[0]]
                    clips = [{"at": first["norm_at"]}] if first.get("norm_at") else first.get("clips") or [first]
                    shown = each_rank({rank: f"{factor:.4g}" for rank, factor in factors.items()})
                    evidence = f"between the backward pass and step {index}, shards were multiplied by {shown}"
                    cause = "each rank clips by the norm of its shards instead of the norm of the whole gradient"
                    remedy = "use torch.nn.utils.clip_grad_norm_ with FSDP2, FSDP.clip_grad_norm_ with FSDP1, or "
                    remedy += "all_reduce the sum of squares before taking its root"
                    findings.append(Finding("LS208", place(clips[0].get("at")), evidence, cause, remedy, ranks, index))
                    break
    return findings if seen else "no sharded gradients were followed from the backward pass to the step"


@rule("LS215", "labels-of-rank-0", "labels of gathered features lack the offset of the rank")
def labels_of_rank_0(history: EventHistory) -> Iterable[Finding] | str:
    """A contrastive loss with the features of all ranks as columns, but labels 0, 1, 2, ... on every rank."""
    told = list(history.of("labels"))
    for event in told:
        if event["rank"] and not event["first"]:
            evidence = f"rank {event['rank']} has labels from 0 for its {event['rows']} rows, like rank 0, and the "
            evidence += f"loss has {event['rows'] * len(history.ranks)} columns"
            cause = "the columns of a rank start at rank * rows, so its labels point at the features of rank 0"
            remedy = "labels = torch.arange(rows) + rank * rows"
            ranks = tuple(history.ranks)
            return [Finding("LS215", place(event.get("at")), evidence, cause, remedy, ranks, event["step"])]
    return [] if told else "no loss compared rows of a rank with columns of all ranks"


@rule("LS216", "gathered-constant", "gathered features carry no gradient", "warning")
def gathered_constant(history: EventHistory) -> Iterable[Finding] | str:
    """all_gather of features that need a gradient: the loss treats the result as constants."""
    own = "or put the rank's own features back into the result"
    cause = "the gather copies values: gathered features, including the local ones, carry no gradient"
    evidence, ranks = "the loss multiplies features that were gathered from all ranks", tuple(history.ranks)
    found = []
    for event in history.of("gathered"):
        remedy = f"{event.get('remedy', 'torch.distributed.nn.functional.all_gather')}, {own}"
        found.append(Finding("LS216", place(event.get("at")), evidence, cause, remedy, ranks, event["step"]))
    return found or "no features that need a gradient were gathered and multiplied in a loss"


@rule("LS209", "sum-not-awaited", "gradients are used before their sum is complete")
def sum_not_awaited(history: EventHistory) -> Iterable[Finding] | str:
    """all_reduce(gradient, async_op=True) without wait() before the step."""
    findings: list[Finding] = []
    for event in history.of("hand_reduce"):
        if event.get("unwaited"):
            evidence = f"the step began before the script waited for the sum of {event.get('parameters')} gradients"
            cause = "all_reduce with async_op=True returns at once; the step may use gradients of this rank only"
            remedy = "keep the handles that all_reduce returns, and call wait() on each before optimizer.step()"
            at, ranks = place(event.get("at")), tuple(history.ranks)
            findings.append(Finding("LS209", at, evidence, cause, remedy, ranks, event["step"]))
    return findings if any(history.of("hand_reduce")) else "the script does not reduce gradients itself"


@rule("LS210", "evaluation-mode", "the model is trained in evaluation mode", "warning")
def evaluation_mode(history: EventHistory) -> Iterable[Finding] | str:
    """model.train() that is missing after an evaluation, or on some ranks."""
    modal = {(event["rank"], event["model"]) for event in history.of("wrap") if event.get("modal")}
    findings, seen = [], False
    for by_rank in steps(history).values():
        modes: dict[int, list[tuple[bool, Event]]] = {}
        for rank, by_index in by_rank.items():
            for index in sorted(by_index):
                for each in by_index[index].get("backwards") or ():
                    if "synced" in each and (rank, by_index[index].get("model", 0)) in modal:
                        modes.setdefault(rank, []).append((bool(each.get("evaluating")), each))
        seen = seen or bool(modes)
        for rank, told in modes.items():
            turn = next((number for number, (is_on, _) in enumerate(told) if is_on), None)
            stays = turn is not None and len(told) > turn + 1 and all(is_on for is_on, _ in told[turn:])
            others = [mode[turn][0] for mode in modes.values() if turn is not None and len(mode) > turn]
            if turn is not None and ((turn and stays) or not all(others)):
                evidence = f"from backward pass {turn} on, the model was in evaluation mode on rank {rank}"
                evidence += "" if all(others) else ", and in training mode on others"
                cause = "model.eval() was called without model.train() after it"
                remedy = "call model.train() at the start of each epoch, on all ranks"
                since = told[turn][1]["evaluating"]
                at = place(since if isinstance(since, list) else told[turn][1].get("at"))
                findings.append(Finding("LS210", at, evidence, cause, remedy, (rank,), None))
                break
    return findings if seen else "no wrapped model with dropout or batch normalization was trained"


@rule("LS211", "divided-twice", "the loss is divided once too often")
def divided_twice(history: EventHistory) -> Iterable[Finding] | str:
    """loss / world_size under a wrapper that averages, or loss / accumulation in a framework that also divides."""
    groups = [] if any(history.of("hook", "hand_reduce")) else replicas(history, "ddp", "fsdp2", "fsdp1")
    findings: list[Finding] = []
    seen = any(history.of("hand_reduce"))
    by_micro_batches = any(len(passes(event)) == len(history.ranks) for event in history.of("step"))
    for event in history.of("hand_reduce") if not by_micro_batches else ():
        if abs(event.get("factor", 0.0) * len(history.ranks) ** 2 - 1) < _SAME and len(history.ranks) > 1:
            evidence = f"gradients were summed over {len(history.ranks)} ranks and divided by that number twice"
            remedy = "divide once: before the sum, after it, or by ReduceOp.AVG"
            at, ranks = place(event.get("at")), tuple(history.ranks)
            findings.append(Finding("LS211", at, evidence, None, remedy, ranks, event["step"]))
    for group in groups:
        for event in history.of("step"):
            backwards = passes(event)
            if event["rank"] not in group or not backwards or "divisor" not in backwards[0]:
                continue
            seen, ops, at = True, backwards[0].get("ops") or [""], backwards[0].get("at")
            found = _squared(backwards)
            if found:
                findings.append(Finding("LS211", place(at), *found, group, event["step"]))
            if summed := _summed_in_loss(backwards, group):
                findings.append(summed)
                continue
            is_mean = len(ops) > 1 and ops[1].startswith(_MEANS)
            is_by_ranks = backwards[0]["divisor"] == len(group) and backwards[0].get("by_ranks")
            is_by_ranks = is_by_ranks and (backwards[0].get("divided_at") or not uses(history, "accelerate"))
            is_by_ranks = is_by_ranks and _may_be_ranks(backwards[0])
            if is_by_ranks and len(backwards) == 1 and ops[0].startswith("Div") and is_mean:
                evidence = f"a mean loss was divided by {len(group)}, the number of ranks"
                cause = "the wrapper already averages gradients over ranks"
                remedy = "call loss.backward() on the mean over this rank's batch"
                findings.append(Finding("LS211", place(at), evidence, cause, remedy, group, event["step"]))
        findings += (_by_all_ranks(history, group) or _by_sums(history, group)) if len(group) > 1 else []
    return findings if seen else "no wrapped model was trained, or a communication hook exchanges in its own way"


def _may_be_ranks(backward: Event) -> bool:
    """False if the source divides the loss only by a constant, or by the accumulation."""
    at, loss_at = backward.get("divided_at"), backward.get("loss_at")
    last = at or backward.get("at") or ["", 0]
    first = last[1] if at else loss_at[1] if loss_at else last[1] - _LINES
    return sources.may_be_ranks(last[0], first, last[1])


def _summed_in_loss(backwards: list[Event], group: tuple[int, ...]) -> Finding | None:
    """An all_reduce between the loss and the model, whose backward pass gives each rank its own gradient only."""
    told, world, cause = backwards[0].get("reduced"), len(group), "all_reduce passes gradients through unchanged, "
    if backwards[0].get("one_of") == world > 1:
        told = {"at": backwards[0].get("divided_at") or backwards[0].get("at"), "elements": 1, "divisor": world}
        cause = "a gather carries no gradient, so the mean over ranks passes 1 part of it to this rank, "
    if told is None or tuple(sorted(told.get("ranks") or group)) != group:
        return None
    is_loss = told["elements"] == 1
    by = told["divisor"] / world
    if is_loss and not any(abs(by - count) < _SAME for count in (1, len(backwards))):
        return None
    if not is_loss and abs(told["times"] / world - 1) < _SAME:
        return None
    what = "the loss" if is_loss else f"a tensor of {told['elements']} elements in the loss"
    evidence = f"{what} was summed over {world} ranks before the backward pass"
    evidence += f", and then divided by {told['divisor']:g}" if is_loss else ""
    cause += f"and the wrapper averages them: they are {world} times too small"
    remedy = "backward() on this rank's loss, and all_reduce a detached clone" if is_loss else _DIFFERENTIABLE
    return Finding("LS211", place(told["at"]), evidence, cause, remedy, group, None)


def _by_all_ranks(history: EventHistory, group: tuple[int, ...]) -> list[Finding]:
    """Losses that each step divides by what all ranks received in it: not only by chance, or in one step."""
    told: dict[tuple[str, str], list[tuple[Event, Event, float]]] = {}
    given = _given(history)
    for event in history.of("step", rank=group[0]):
        backward = next(iter(passes(event)), {})
        ops = backward.get("ops") or [""]
        of_one = list(itertools.takewhile(lambda op: not op.startswith(("Sum", *_MEANS)), ops))
        is_multiplied = any(op.startswith("MulBackward0") for op in of_one)  # others may be masks, or weights
        is_multiplied |= abs((event.get("rescaled") or 1.0) - len(group)) < _SAME
        for what in _WORDS if "divisor" in backward and ops[0].startswith("Div") and not is_multiplied else ():
            count = given.get((event["optimizer"], event["index"], what))
            if count:
                told.setdefault((str(backward.get("at")), what), []).append((event, backward, count))
    for (_, what), turns in told.items():
        fitting = [turn for turn in turns if turn[1]["divisor"] == turn[2]]
        event, backward, count = (fitting or turns)[0]
        is_once = not any(op.startswith("Div") for op in backward["ops"][1:2])
        is_of_more = is_once and 0 < (backward.get("sum_of") or backward.get("summed", 0)) < count
        is_always = len(fitting) == len(turns) > 1 and is_of_more
        if is_always or len({number for *_, number in fitting}) > 1:  # else a coincidence of numbers
            evidence = f"a loss was divided by {count:.6g}, the {_WORDS[what]} in this step on all ranks, "
            evidence += f"as in {len(fitting)} of {len(turns)} examined steps"
            cause = f"the wrapper averages gradients over {len(group)} ranks, which divides once more"
            remedy = "divide by the count of this rank's batch, or multiply the loss by the number of ranks"
            at = backward.get("at")
            at = backward.get("divided_at") or _division(backward.get("loss_at"), at) or at
            return [Finding("LS211", place(at), evidence, cause, remedy, group, event["step"])]
    return []


def _by_sums(history: EventHistory, group: tuple[int, ...]) -> list[Finding]:
    """Sums over this rank's numbers, divided by a count that exactly these ranks added up."""
    lines, world = dict[str, list[tuple[Event, Event, Event]]](), len(group)
    for event in history.of("step", rank=group[0]):
        backward = next(iter(passes(event)), {})
        is_rescaled = abs((event.get("rescaled") or 1.0) - world) < _SAME
        for term in backward.get("terms") or () if not is_rescaled else ():
            by = [*term["factors"], math.prod(term["factors"])]
            is_multiplied = any(number > 1 and abs(number / world - round(number / world)) < _SAME for number in by)
            if not is_multiplied and sorted(term["ranks"] or history.ranks) == [*group]:
                lines.setdefault(str(term.get("at")), []).append((event, backward, term))
    for turns in lines.values():
        (event, backward, first), numbers = turns[0], {term["divisor"] for *_, term in turns}
        is_always = len(turns) > 1 and all(t.get("is_once") and 0 < t["of"] < t["divisor"] for *_, t in turns)
        if len(numbers) > 1 or is_always:  # else a coincidence of numbers
            evidence = f"a sum was divided by {first['divisor']:.6g}, the sum of the counts in this step on all ranks"
            cause = f"the wrapper averages gradients over {world} ranks, which divides once more"
            remedy = "divide by the sum / world_size, or multiply the loss by the number of ranks"
            at = first.get("at") or _division(backward.get("loss_at"), backward.get("at")) or backward.get("at")
            return [Finding("LS211", place(at), evidence, cause, remedy, group, event["step"])]
    return []


def _division(loss_at: Any, at: Any) -> Any:
    """The one line that divides between a loss and its backward pass in the same function, or the line of the loss."""
    is_same = loss_at and at and (loss_at[0], loss_at[2]) == (at[0], at[2])
    rows = sorted({row for row, _ in sources.divisions(at[0], loss_at[1], at[1])}) if is_same else []
    return [at[0], rows[0], at[2]] if len(rows) == 1 else loss_at


def _given(history: EventHistory) -> dict[tuple[int, int, str], float]:
    """By optimizer, step and what is counted: how much all ranks together received in this step."""
    sums: dict[tuple[int, int, str], dict[int, int]] = {}
    for (event, batches), what in itertools.product(_fed(history), _WORDS):
        counts = [each[what] for each in batches if what in each]
        if counts and len(counts) == len(batches):
            sums.setdefault((event["optimizer"], event["index"], what), {})[event["rank"]] = sum(counts)
    full = {key: by_rank for key, by_rank in sums.items() if len(by_rank) == len(history.ranks) > 1}
    return {key: float(sum(by_rank.values())) for key, by_rank in full.items()}


def _fed(history: EventHistory) -> Iterator[tuple[Event, list[Event]]]:
    """Steps, and the batches of each. If a framework draws batches ahead, each backward pass has one, in order."""
    waiting: dict[tuple[int, int], list[Event]] = {}
    for event in history.of("step"):
        key, batches, count = (event["rank"], event["optimizer"]), event.get("micro_batches") or [], len(passes(event))
        if key in waiting or len(batches) == count + 1:
            waiting[key] = [*waiting.get(key, ()), *batches]
            batches, waiting[key] = waiting[key][:count], waiting[key][count:]
        yield event, batches


def _squared(backwards: list[Event]) -> tuple[str, str, str] | None:
    """Evidence, cause and remedy if each micro-batch's mean is divided by their number twice."""
    count, ops = len(backwards), backwards[0].get("ops") or []
    is_twice = len(ops) > 2 and all(op.startswith("Div") for op in ops[:2]) and ops[2].startswith(_MEANS)
    if count < 2 or not is_twice or abs(backwards[0]["divisor"] - count * count) > _SAME:
        return None
    evidence = f"a mean loss was divided by {count * count} in each of {count} backward passes of a step"
    cause = "the script divides by the number of micro-batches, and the framework does so again"
    return evidence, cause, "do not divide: accelerator.backward and the Trainer already do"


@rule("LS218", "multiplied-mean", "a mean loss is multiplied by the number of ranks")
def multiplied_mean(history: EventHistory) -> Iterable[Finding] | str:
    """A loss that ignores num_items_in_batch, in a transformers Trainer that expects a sum divided by all items."""
    told = list(history.of("scaled_loss"))
    for event in told:
        if event["mean"]:
            evidence = f"{event['op']}, a mean over the batch of this rank, was multiplied by {event['by']}"
            ignores = f"the loss of {event['model']}" if event.get("model") else f"{event['at'][2]}()"
            cause = f"{ignores} ignores num_items_in_batch, but the Trainer treats the loss as a sum divided by it"
            remedy = "return losses.sum() / num_items_in_batch"
            if event.get("model"):
                remedy = "TrainingArguments(average_tokens_across_devices=False), or a compute_loss_func that divides"
            ranks = tuple(history.ranks)
            return [Finding("LS218", place(event.get("at")), evidence, cause, remedy, ranks, event["step"])]
    return [] if told else "no Trainer of transformers multiplied a loss by the number of ranks"


@rule("LS213", "class-weights-differ", "ranks weight classes differently")
def class_weights_differ(history: EventHistory) -> Iterable[Finding] | str:
    """Class weights of a loss that each rank computes from its own shard of the data."""
    lines: dict[tuple[str, int], dict[int, Event]] = {}
    for event in history.of("class_weights"):
        lines.setdefault(tuple(event["at"][:2]), {})[event["rank"]] = event
    findings = []
    for by_rank in lines.values():
        for group in replicas(history):
            found = {rank: by_rank[rank] for rank in group if rank in by_rank}
            if len(found) > 1 and differ({rank: event["digest"] for rank, event in found.items()}):
                event = next(iter(found.values()))
                evidence = f"the weights of {event['classes']} classes in this loss differ between {named(found)}"
                cause = "each rank counted the classes of its shard of the data"
                remedy = "count on all ranks together: all_reduce the counts, or count the whole data set"
                at, ranks = place(event["at"]), tuple(found)
                findings.append(Finding("LS213", at, evidence, cause, remedy, ranks, event["step"]))
    return findings if lines else "no loss had class weights"


@rule("LS212", "clip-before-average", "each rank clips its own gradient before ranks average", "warning")
def clip_before_average(history: EventHistory) -> Iterable[Finding] | str:
    """Clipping before the script's all_reduce: the limit applies to gradients that no step uses."""
    reduced = {(e["rank"], e["step"]) for e in history.of("hand_reduce")}
    findings: list[Finding] = []
    for event in history.of("step"):
        clips = event.get("clips") or [] if (event["rank"], event["step"]) in reduced else []
        if clips and not any(each.get("reduced_before") for each in clips):
            at = clips[0].get("at")
            evidence = "gradients were clipped before they were summed over ranks"
            cause = "each rank scales by its own gradient norm, so ranks have unequal weights in the average"
            remedy = "all_reduce the gradients first, then clip"
            ranks = tuple(history.ranks)
            findings.append(Finding("LS212", place(at), evidence, cause, remedy, ranks, event["step"]))
    return findings if reduced else "the script does not reduce gradients itself"
