"""Rules on files: which ranks write them, and what resumes from them."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding
from lockstep_audit.rules import sources
from lockstep_audit.rules.facts import Key, line, named, number_of, passes, place, rule, some
from lockstep_audit.rules.loaders import Iteration, iterations

_NO_PREVIOUS = "no earlier run to compare with (--previous)"
_STATELESS = ("SGD",)
_FEW = 8
_DRAWN = 3
"""This many steps with the inputs of the earlier run show that a run draws them again."""
_PREFIXES = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "base_model.model.")
_LISTED = 30
"""The most names of missing and unexpected keys in an event."""


def _together(history: EventHistory) -> list[list[Event]]:
    """Writes to one path by several ranks of one host at the same step."""
    hosts = {event["rank"]: event.get("host") for event in history.of("start")}
    found: dict[Any, dict[int, Event]] = defaultdict(dict)
    for event in history.of("save"):
        how, path = str(event.get("how")), str(event.get("path"))
        if "checkpoint" not in how and how != "dcp" and not path.startswith("/dev/"):
            found[hosts.get(event["rank"]), path, event["step"]].setdefault(event["rank"], event)
    return [list(by_rank.values()) for by_rank in found.values() if len(by_rank) > 1]


def _written(history: EventHistory, id: str, saved: bool) -> list[Finding] | str:
    findings: dict[str, Finding] = {}
    for events in _together(history):
        ranks, event = tuple(sorted(each["rank"] for each in events)), events[0]
        path, at = event["path"], str(event.get("at") or event["path"])
        if (event.get("how") != "open") != saved or at in findings:
            continue
        how = event.get("how")
        evidence = f"{named(ranks)} wrote {os.path.basename(path)} at step {event['step']} with {how} ({path})"
        cause = "every rank writes, and the writes may mix" if saved else "every rank truncates the file of the others"
        cause = "every rank appends its own rows" if str(event.get("mode")).startswith("a") else cause
        remedy = "put `if dist.get_rank() == 0:` around the write, and a barrier before others read; or a file per rank"
        findings[at] = Finding(id, place(event.get("at")), evidence, cause, remedy, ranks, event["step"])
    any_save = any((event.get("how") != "open") == saved for event in history.of("save"))
    return list(findings.values()) if any_save else "the script wrote no such file"


@rule("LS701", "save-race", "several ranks write one checkpoint")
def save_race(history: EventHistory) -> Iterable[Finding] | str:
    """torch.save and the like, by several ranks, to the same path."""
    return _written(history, "LS701", saved=True)


@rule("LS702", "text-race", "several ranks write one file", "warning")
def text_race(history: EventHistory) -> Iterable[Finding] | str:
    """open(..., "w") by several ranks, of the same path."""
    return _written(history, "LS702", saved=False)


def _resumed(history: EventHistory) -> list[tuple[Event, Event]]:
    """Loads of files that the earlier run saved: the load and the last save of that path."""
    if history.previous is None:
        return []
    saves = {str(event.get("path")): event for event in history.previous.of("save")}
    for event in history.previous.of("rename"):
        old, new = str(event["path"]), str(event["to"])
        for path in [path for path in saves if path == old or path.startswith(f"{old}/")]:
            saves[new + path.removeprefix(old)] = saves[path]
    return [(event, saves[event["path"]]) for event in history.of("load") if event.get("path") in saves]


def _trained(history: EventHistory, rank: int) -> list[tuple[Key, Iteration]]:
    """The training iterations of a rank, in order."""
    turns = [(key, by_rank) for key, epochs in iterations(history).items() for by_rank in epochs.values()]
    found = [(key, by_rank[rank]) for key, by_rank in turns if rank in by_rank]
    found = [(key, it) for key, it in found if it.is_training or it.end is None]
    return sorted(found, key=lambda each: int(each[1].begin["number"]))


def _within(history: EventHistory) -> EventHistory:
    """A run that resumes in its own process, split where it loads a file that it saved: the rest, after the beginning.

    The file has the number of an epoch or step, and a new optimizer like one before trains after the load.
    """
    saves = {str(e.get("path")): e for e in reversed(list(history.of("save"))) if e["step"]}
    states = [event for event in history.of("state") if event.get("what") == "optimizer"]
    cuts, firsts = dict[int, int](), list[Event]()
    for rank in history.ranks if history.previous is None and saves else ():
        made = list(history.of("optimizer", rank=rank))
        again = [(one, other) for one, other in itertools.pairwise(made) if _is_like(one, other)]
        loads = [e for e in history.of("load", rank=rank) if e.get("path") in saves]
        loads = [e for e in loads if saves[e["path"]]["time"] <= e["time"]]
        found = [e for e in loads for one, other in again[:1] if one["number"] < e["number"] < other["number"]]
        if not found:
            return history
        cuts[rank] = found[-1]["number"]
        firsts += [found[-1]]
    if not cuts:
        return history
    parts = [[e for e in history.events if (e["number"] < cuts[e["rank"]]) == is_before] for is_before in (True, False)]
    split = EventHistory(parts[1], EventHistory(parts[0]))
    dealt = [[it.begin.get("distributed") or {} for _, it in _trained(EventHistory(p), min(cuts))] for p in parts]
    last, first = (side[place].get("epoch") if side else None for side, place in zip(dealt, (-1, 0), strict=True))
    save, restored = saves[firsts[0]["path"]], {e["rank"] for e in states if e["number"] > cuts[e["rank"]]}
    if _is_of_run(save) and first and last is not None and first - last in (0, 1, 2):
        return split
    is_cut = any(it.begin["number"] < save["number"] and not it.is_complete for it in _lasts(split.previous, save))
    return split if is_cut and restored == {*cuts} else history  # else another training


def _lasts(history: EventHistory | None, save: Event) -> list[Iteration]:
    """The last training iteration of the rank that saves."""
    return [it for _, it in _trained(history, save["rank"])][-1:] if history else []


def _is_of_run(save: Event) -> bool:
    """True if a file has the number of an epoch or a step, as that of a run to resume."""
    keys = [str(key).lower() for key in save.get("keys") or ()]
    return any(word in key for key in keys for word in ("epoch", "step", "iter"))


def _is_like(one: Event, other: Event) -> bool:
    """True if two optimizers have one class and the same first learning rates."""
    rates = [[g.get("initial_lr", g.get("lr")) for g in event.get("groups") or ()] for event in (one, other)]
    return one["optimizer"] != other["optimizer"] and one.get("class") == other.get("class") and rates[0] == rates[1]


@rule("LS703", "resume-samples", "a resumed run repeats or skips samples")
def resume_samples(history: EventHistory) -> Iterable[Finding] | str:
    """The samples after a checkpoint was loaded, compared with those that the earlier run used before it was saved."""
    resumed = _resumed(history := _within(history))
    if left_out := _left_out_again(history):
        return left_out
    if history.previous is None or not resumed:
        return _NO_PREVIOUS if history.previous is None else "the run loaded no file of the earlier run"
    load, save = resumed[0]
    writer, rank = save["rank"], load["rank"]
    before = [(key, it) for key, it in _trained(history.previous, writer) if it.begin["number"] < save["number"]]
    after = [(key, it) for key, it in _trained(history, writer if writer in history.ranks else rank)]
    if not before or not after:
        return _drawn_again(history, load, save) or "no training before the save, or none after the load"
    used = _used(history.previous, before[-1][1], save)
    begin = after[0][1].begin
    found = _repeated(before, after[0], save, used, _passed_over(history, after[0][1])[0])
    if found is None and (found := _counted(history.previous, before, [it for _, it in after], save)):
        begin = {"at": begin.get("dataset_at") or begin.get("made_at"), "rank": -1, "number": 0}
    if found is None:
        return []
    evidence, cause = found
    remedy = "save the epoch and the position in it; resume at the next epoch, or skip the batches that were used"
    sets = [e for e in history.of("set_epoch", rank=begin["rank"]) if e["number"] < begin["number"] and e.get("at")]
    at = place((sets[-1]["at"] if sets else None) or begin.get("at") or load.get("at"))
    return [Finding("LS703", at, evidence, cause, remedy, tuple(history.ranks), load["step"])]


def _drawn_again(history: EventHistory, load: Event, save: Event) -> list[Finding]:
    """A resumed run without a loader whose first inputs are those of the first steps of the earlier run."""
    runs = (history, history.previous)
    mine, first = ([e["digest"] for e in run.of("inputs", rank=load["rank"])] if run else [] for run in runs)
    count = min(len(mine), len(first), save["step"])
    if count < _DRAWN or mine[:count] != first[:count] or len(set(mine[:count])) < count:
        return []
    evidence = f"the inputs of the first {count} examined steps equal those of the earlier run's first steps"
    cause = "the generators are seeded again, and the position in the data is not restored"
    remedy = "save and restore the states of the generators, or seed by the step at which the run resumes"
    return [Finding("LS703", place(load.get("at")), evidence, cause, remedy, tuple(history.ranks), load["step"])]


def _repeated(
    before: list[tuple[Key, Iteration]], after: tuple[Key, Iteration], save: Event, batches: int, passed_over: int
) -> tuple[str, str] | None:
    """Evidence and cause if the first epoch of a run uses samples again, after the batches that it skips.

    Args:
        batches: how many of the last iteration before the save steps had used.
    """
    key, again = after
    same = [it for other, it in before if other[1:] == key[1:]] or [it for _, it in before]
    skipped = sum(len(again.batches.get(number, ())) for number in range(passed_over))
    last, fresh = same[-1], again.indices[skipped:]
    is_over = bool(last.end and last.end["number"] < save["number"])
    if is_over:
        for it in same:
            length = min(len(it.indices), len(fresh))
            if _is_shuffled(it) and length >= _FEW and it.indices[:length] == fresh[:length]:
                number = (it.begin.get("distributed") or {}).get("epoch", it.begin.get("epoch"))
                evidence = f"the file was saved after epoch {number}, and its first {length} indices come again"
                return evidence, "the run starts with an epoch that was complete when the checkpoint was saved"
        return _left_out(same, again)
    used = [index for number in range(batches) for index in last.batches.get(number, ())]
    repeated = [index for index in fresh[: len(used)] if index in set(used)]
    if used and len(repeated) > len(used) // 2 and len(last.indices) > len(used):
        evidence = f"of {len(used)} samples before the save, {len(repeated)} come again: {some(map(str, repeated), 5)}"
        return evidence, "the run starts the epoch again: the position in it is not restored"
    rest = last.indices[len(used) :]
    begun = fresh[: len(rest)]
    others = [index for index in begun if index not in set(rest)]
    if used and last.is_complete and len(begun) >= _FEW and 4 * len(others) > len(begun):
        evidence = f"{number_of(len(rest), 'sample', 'was', 'were')} left of the epoch, but the run starts "
        evidence += f"with {len(others)} others"
        epochs: list[Any] = [(it.begin.get("distributed") or {}).get("epoch") for it in (last, again)]
        if not passed_over and None not in epochs and epochs[1] == epochs[0] + 1:
            left = f"with {number_of(len(rest), 'sample')} left, and the run starts with epoch {epochs[1]}"
            return f"the file was saved in epoch {epochs[0]}, {left}", "the rest of the epoch is never trained"
        return evidence, "the position in the epoch is restored, but its order is that of a different epoch"
    return None


def _counted(
    previous: EventHistory, before: list[tuple[Key, Iteration]], after: list[Iteration], save: Event
) -> tuple[str, str] | None:
    """Evidence if the two parts of an epoch have more samples than another epoch, or fewer."""
    (_, last), again = before[-1], after[0]
    steps = [e for e in previous.of("step", rank=save["rank"]) if last.begin["number"] < e["number"] < save["number"]]
    given = [micro for event in steps for micro in event.get("micro_batches") or ()]
    used = sum(micro["samples"] for micro in given if micro["loader"] == last.begin["loader"])
    others = [it for it in [*after[1:], *(it for _, it in before[:-1])] if it.is_complete and it.end]
    others = [it for it in others if it.begin.get("dataset_size") == last.begin.get("dataset_size")]
    sizes = {int((it.end or {})["samples"]) for it in others if it.begin.get("dataset") == last.begin.get("dataset")}
    if not used or last.is_complete or not again.is_complete or len(sizes) != 1 or not again.end:
        return None
    own, whole, batch = used + int(again.end["samples"]), min(sizes), max(micro["samples"] for micro in given)
    if own - whole <= max(2 * batch, whole // 10) or not last.begin.get("is_iterable"):
        return None  # a loop may skip what the loader gives, and later epochs may be longer
    evidence = f"{used} samples of an epoch were used before the save and {again.end['samples']} after the load, "
    return f"{evidence}but another epoch has {whole}", "the run skips fewer samples of the epoch than were used"


def _left_out(before: list[Iteration], again: Iteration) -> tuple[str, str] | None:
    """Evidence if a run resumes after an epoch that was never trained."""
    epochs = [(it.begin.get("distributed") or {}).get("epoch") for it in (*before, again)]
    known = [epoch for epoch in epochs if isinstance(epoch, int)]
    is_counted = len(known) == len(epochs) and len(known) > 2 and known[:-1] == list(range(known[0], known[-2] + 1))
    if not is_counted or known[-1] <= known[-2] + 1:
        return None
    evidence = f"the file was saved after epoch {known[-2]}, and this run starts with epoch {known[-1]}"
    return evidence, "the number of the next epoch is incremented twice"


def _is_shuffled(iteration: Iteration) -> bool:
    return bool((iteration.begin.get("distributed") or {}).get("shuffle") or iteration.begin.get("shuffles"))


def _used(history: EventHistory, it: Iteration, save: Event) -> int:
    """How many batches of an iteration the steps before a save had used. A framework draws one ahead of its use."""
    steps = [e for e in history.of("step", rank=save["rank"]) if it.begin["number"] < e["number"] < save["number"]]
    given = sum(micro["loader"] == it.begin["loader"] for e in steps for micro in e.get("micro_batches") or ())
    trained = sum(len(passes(e)) for e in steps)  # twice as many if two networks train on each batch
    return min(given, trained) or trained


def _left_out_again(history: EventHistory) -> list[Finding]:
    """Batches that a resumed run skips in its first epoch, and again in the next one."""
    first = min((event["step"] for event in history.of("step")), default=0)
    restored = {event.get("what") for event in history.of("state") if event["step"] <= first}
    by_data: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
    turns = [it for _, it in _trained(history, history.ranks[0])] if restored else []
    before = history.previous or EventHistory([])
    known = {_passed_over(before, it)[0] for rank in before.ranks[:1] for _, it in _trained(before, rank)}
    for it in turns:
        data = it.begin.get("sampler", f"loader {it.begin['loader']}")
        own = _passed_over(history, it) if "optimizer" in restored else (0, None)
        by_data[data].append(it.begin.get("skips") or (own if own[0] not in known else (0, None)))
    for (count, at), again in (pair for each in by_data.values() for pair in itertools.pairwise(each)):
        if count > 0 and at and tuple(again) == (count, at):
            evidence = f"the first {count} batches are skipped in two successive epochs"
            cause = "they were trained before the file was saved, but only in one epoch"
            remedy = "skip them only in the epoch that resumes, and use the whole loader in later epochs"
            return [Finding("LS703", place(at), evidence, cause, remedy, tuple(history.ranks), first)]
    return []


def _passed_over(history: EventHistory, it: Iteration) -> tuple[int, Any]:
    """How many batches a loop took before the first one that it trained on, and the `if` that skipped them, if any."""
    end, begin, at = (it.end or {}).get("number", float("inf")), it.begin, it.begin.get("at")
    steps = [e for e in history.of("step", rank=begin["rank"]) if begin["number"] < e["number"] < end][:2]
    given = [[each for each in step.get("micro_batches") or () if each["loader"] == begin["loader"]] for step in steps]
    passes = [step.get("backwards") or [] for step in steps]
    if len(steps) < 2 or not (given[0] and passes[0]) or len(given[1]) != len(passes[1]):
        return 0, None
    count = len(given[0]) - len(passes[0]) - bool(begin.get("by_framework"))  # it draws a batch ahead
    last = passes[0][-1].get("at")
    if not (at and last and (at[0], at[2]) == (last[0], last[2]) and count > 0) or given[0][0]["batch"]:
        return 0, None
    row = sources.condition(at[0], at[1], last[1])
    return count, [at[0], row, at[2]] if row else None


@rule("LS704", "resume-without-state", "a resumed run has lost the state of the optimizer")
def resume_without_state(history: EventHistory) -> Iterable[Finding] | str:
    """A run that loads the model of an earlier run, but not its optimizer or scheduler."""
    resumed = _resumed(history := _within(history))
    if not resumed:
        return _NO_PREVIOUS if history.previous is None else "the run loaded no file of the earlier run"
    load = resumed[0][0]
    restored = {event.get("what") for event in history.of("state")}
    if "model" not in restored:
        return "the run restored no model state"
    made = [event for event in history.of("optimizer") if event.get("class") not in _STATELESS or _has_momentum(event)]
    lost = ["optimizer"] if made and "optimizer" not in restored else []
    lost += ["scheduler"] if any(history.of("scheduler")) and "scheduler" not in restored else []
    if not lost:
        return []
    name, parts = os.path.basename(load["path"]), some(sorted(map(str, restored)))
    evidence = f"{name} was loaded at {line(load.get('at'))} and restored {parts}, but not the {' and the '.join(lost)}"
    keys_saved = [str(key) for key in resumed[0][1].get("keys") or ()]
    cause = f"the file contains {some(keys_saved, 8)}" if keys_saved else None
    remedy = f"also save and load the state_dict() of the {' and the '.join(lost)}"
    return [Finding("LS704", place(load.get("at")), evidence, cause, remedy, tuple(history.ranks), load["step"])]


def _has_momentum(event: Event) -> bool:
    return any(group.get("momentum") for group in [*(event.get("groups") or ()), *(event.get("hyperparameters") or ())])


@rule("LS705", "shards-saved", "a file has the shards of one rank instead of the whole model")
def shards_saved(history: EventHistory) -> Iterable[Finding] | str:
    """A checkpoint of a sharded model that one rank writes from its own shards."""
    sharded = [wrap for wrap in history.of("wrap") if wrap["how"].startswith("fsdp")]
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in history.of("save"):
        if event.get("shards"):
            by_step[event["step"]].append(event)
    for events in by_step.values():
        writers = {event["rank"] for event in events}
        if len(writers) == 1 and len(history.ranks) > 1:
            event = events[0]
            evidence = f"{os.path.basename(event['path'])} has shards of {some(event['shards'])}, and only "
            evidence += f"{named(writers)} wrote its shards"
            cause = "a state_dict() of FSDP2 holds DTensors, and to_local() or torch.save takes this rank's shard"
            remedy = "parameter.full_tensor() on all ranks, get_model_state_dict(model, options="
            remedy += "StateDictOptions(full_state_dict=True)), or torch.distributed.checkpoint"
            at = place(event.get("at"))
            return [Finding("LS705", at, evidence, cause, remedy, tuple(writers), event["step"])]
    return [] if sharded and any(history.of("save")) else "no sharded model was saved"


@rule("LS706", "read-too-early", "a rank reads a file that another rank may not have written yet", "warning")
def read_too_early(history: EventHistory) -> Iterable[Finding] | str:
    """A file of one rank that another rank reads, without anything between that makes it wait."""
    saves = {(str(event.get("path")), event["rank"]): event for event in history.of("save")}
    for event in history.of("rename"):
        saves.setdefault((str(event["to"]), event["rank"]), event)
    writers = {path: [event for (other, _), event in saves.items() if other == path] for path, _ in saves}
    seen = False
    for read in history.of("load", "read"):
        found = writers.get(str(read.get("path")), [])
        if len(found) != 1 or found[0]["rank"] == read["rank"] or found[0]["time"] > read["time"]:
            continue
        seen = True
        if not _waited(history, found[0], read) and not history.previous:
            by = f"{named([found[0]['rank']])} at {line(found[0].get('at'))}"
            evidence = f"{named([read['rank']])} reads {os.path.basename(read['path'])}, which {by} writes"
            cause = "no barrier or other collective separates the two"
            remedy = "call dist.barrier() after the write, on all ranks"
            at, ranks = place(read.get("at")), (found[0]["rank"], read["rank"])
            return [Finding("LS706", at, evidence, cause, remedy, ranks, read["step"])]
    return [] if seen else "no rank read a file that another rank wrote"


def _waited(history: EventHistory, save: Event, read: Event) -> bool:
    """True if a reader took part in a collective that the writer made after its write."""
    if any((event.get("cut") or {}).get("collective") for event in history.of("exit")):
        return True
    made = [e for e in history.of("collective", rank=save["rank"]) if e["number"] > save["number"]]
    after = {str(e.get("group")): e["sequence"] for e in reversed(made)}
    for event in history.of("collective", rank=read["rank"]):
        if event["number"] < read["number"] and event["sequence"] >= after.get(str(event.get("group")), float("inf")):
            return True
    wraps = [sum(w["number"] < e["number"] for w in history.of("wrap", rank=e["rank"])) for e in (save, read)]
    return bool(read["step"] > save["step"] or wraps[1] > wraps[0])


@rule("LS708", "loaded-on-some-ranks", "weights were loaded on some ranks only")
def loaded_on_some_ranks(history: EventHistory) -> Iterable[Finding] | str:
    """A state that only some ranks loaded into a model that FSDP then shards: each rank shards its own weights."""
    wraps = {(e["rank"], e.get("names_digest")): e for e in history.of("wrap") if e["how"].startswith("fsdp")}
    loads: dict[str, dict[int, Event]] = defaultdict(dict)
    for event in history.of("state"):
        if event.get("what") == "model" and (event["rank"], event.get("names_digest")) in wraps:
            loads[event["names_digest"]][event["rank"]] = event
    for digest, by_rank in loads.items():
        group = [rank for rank, other in wraps if other == digest]
        event = next(iter(by_rank.values()))
        calls = [c for c in history.of("collective", rank=event["rank"]) if c["number"] > event["number"]]
        shared = [str(call.get("op")) for call in calls if not call["step"]]
        if len(by_rank) < len(group) and not any(op == "broadcast" or "object" in op for op in shared):
            others = sorted(set(group) - set(by_rank))
            evidence = f"load_state_dict was called on {named(by_rank)}, but not on {named(others)}"
            at = line(wraps[group[0], digest].get("at"))
            cause = f"FSDP at {at} shards each rank's own weights without a broadcast"
            remedy = "load on all ranks, or set_model_state_dict(model, state, options=StateDictOptions("
            remedy += "full_state_dict=True, broadcast_from_rank0=True)) after fully_shard"
            return [Finding("LS708", place(event.get("at")), evidence, cause, remedy, tuple(group), event["step"])]
    return [] if loads else "no state was loaded into a model that FSDP then shards"


@rule("LS707", "nothing-loaded", "a checkpoint was read, but none of it reached the model")
def nothing_loaded(history: EventHistory) -> Iterable[Finding] | str:
    """load_state_dict(..., strict=False) with a prefix such as `module.` in the names, or load_state before prepare."""
    for event in history.of("load_state"):
        later = [wrap for wrap in history.of("wrap") if wrap["rank"] == event["rank"]]
        if not event["objects"] and later and all(wrap["number"] > event["number"] for wrap in later):
            evidence = "Accelerator.load_state was called before any model or optimizer was prepared"
            cause = "it loads only into prepared objects, and does not complain if there are none"
            remedy = "call accelerator.load_state(...) after accelerator.prepare(...)"
            ranks = tuple(history.ranks)
            return [Finding("LS707", place(event.get("at")), evidence, cause, remedy, ranks, event["step"])]
    for event in history.of("state"):
        missing, unexpected = set(event.get("missing") or ()), set(event.get("unexpected") or ())
        for prefix in _PREFIXES:
            renamed = {name.replace(prefix, "") for name in unexpected}, {name.replace(prefix, "") for name in missing}
            common = renamed[0] & renamed[1]
            if missing and 2 * len(common) > len(missing) and 2 * len(missing) > min(_LISTED, event.get("of") or 1):
                evidence = f"{len(missing)} or more names are missing ({some(sorted(missing))}), and as many exist "
                evidence += f"with a different prefix ({some(sorted(unexpected))})"
                cause = f"only one of the two has `{prefix}` in its names, and strict=False hides the difference"
                remedy = "save model.module.state_dict() (unwrapped), and load with strict=True"
                at = place(event.get("at"))
                return [Finding("LS707", at, evidence, cause, remedy, (event["rank"],), event["step"])]
    is_loaded = any(event.get("what") == "model" for event in history.of("state"))
    return [] if is_loaded else "the run loaded no model state"
