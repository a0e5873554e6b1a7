"""Rules on files: who writes them, and what goes on from them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lockstep.audit.events import Event, History
from lockstep.audit.findings import Finding
from lockstep.audit.rules.facts import Key, line, named, place, rule, some
from lockstep.audit.rules.loaders import Iteration, iterations

_NO_PREVIOUS = "no earlier run to compare with (--previous)"
_STATELESS = ("SGD",)
_FEW = 8


def _together(history: History) -> list[list[Event]]:
    """Writes of one path by several ranks of one host at the same step."""
    hosts = {event["rank"]: event.get("host") for event in history.of("start")}
    found: dict[Any, dict[int, Event]] = defaultdict(dict)
    for event in history.of("save"):
        how, path = str(event.get("how")), str(event.get("path"))
        if "checkpoint" not in how and how != "dcp" and not path.startswith("/dev/"):
            found[hosts.get(event["rank"]), path, event["step"]].setdefault(event["rank"], event)
    return [list(by_rank.values()) for by_rank in found.values() if len(by_rank) > 1]


def _written(history: History, id: str, saved: bool) -> list[Finding] | str:
    findings: dict[str, Finding] = {}
    for events in _together(history):
        ranks, event = tuple(sorted(each["rank"] for each in events)), events[0]
        path, at = event["path"], str(event.get("at") or event["path"])
        if (event.get("how") != "open") != saved or at in findings:
            continue
        how = event.get("how")
        evidence = f"{named(ranks)} wrote {os.path.basename(path)} at step {event['step']} with {how} ({path})"
        cause = "each rank writes, and the writes may mix" if saved else "each rank empties the file of the others"
        remedy = (
            "`if dist.get_rank() == 0:` around the write, and a barrier before others read; or the rank in the name"
        )
        findings[at] = Finding(id, place(event.get("at")), evidence, cause, remedy, ranks, event["step"])
    any_save = any((event.get("how") != "open") == saved for event in history.of("save"))
    return list(findings.values()) if any_save else "the script wrote no such file"


@rule("LS701", "save-race", "several ranks write one checkpoint")
def save_race(history: History) -> Iterable[Finding] | str:
    """torch.save and the like, by several ranks, to the same path."""
    return _written(history, "LS701", saved=True)


@rule("LS702", "text-race", "several ranks write one file", "warning")
def text_race(history: History) -> Iterable[Finding] | str:
    """open(..., "w") by several ranks, of the same path."""
    return _written(history, "LS702", saved=False)


def _resumed(history: History) -> list[tuple[Event, Event]]:
    """Loads of files that the earlier run has saved: the load and the last save of that path."""
    if history.previous is None:
        return []
    saves = {str(event.get("path")): event for event in history.previous.of("save")}
    return [(event, saves[event["path"]]) for event in history.of("load") if event.get("path") in saves]


def _trained(history: History, rank: int) -> list[tuple[Key, Iteration]]:
    """The training iterations of a rank, in their order."""
    found = [
        (key, by_rank[rank])
        for key, epochs in iterations(history).items()
        for by_rank in epochs.values()
        if rank in by_rank and (by_rank[rank].is_training or by_rank[rank].end is None)
    ]
    return sorted(found, key=lambda each: int(each[1].begin["number"]))


@rule("LS703", "resume-samples", "a resumed run repeats samples or leaves some out")
def resume_samples(history: History) -> Iterable[Finding] | str:
    """The samples after a checkpoint was loaded, against those that the earlier run used before it was saved."""
    resumed = _resumed(history)
    if history.previous is None or not resumed:
        return _NO_PREVIOUS if history.previous is None else "no file of the earlier run was loaded"
    load, save = resumed[0]
    writer, rank = save["rank"], load["rank"]
    before = [(key, it) for key, it in _trained(history.previous, writer) if it.begin["number"] < save["number"]]
    after = [(key, it) for key, it in _trained(history, writer if writer in history.ranks else rank)]
    if not before or not after:
        return "no training before the save, or none after the load"
    found = _repeated(before, after[0], save)
    if found is None:
        return []
    evidence, cause = found
    remedy = "save the epoch and the position in it, go on from the next epoch, or skip the batches that were used"
    at = place(after[0][1].begin.get("at") or load.get("at"))
    return [Finding("LS703", at, evidence, cause, remedy, tuple(history.ranks), load["step"])]


def _repeated(before: list[tuple[Key, Iteration]], after: tuple[Key, Iteration], save: Event) -> tuple[str, str] | None:
    """Evidence and cause where the first epoch of a run uses samples again."""
    key, again = after
    same = [it for other, it in before if other[1:] == key[1:]] or [it for _, it in before]
    last, fresh = same[-1], again.indices
    is_over = bool(last.end and last.end["number"] < save["number"])
    if is_over:
        for it in same:
            length = min(len(it.indices), len(fresh))
            if _is_shuffled(it) and length >= _FEW and it.indices[:length] == fresh[:length]:
                number = (it.begin.get("distributed") or {}).get("epoch", it.begin.get("epoch"))
                evidence = (
                    f"the file was saved after epoch {number}, and the first {length} indices of this run are its own"
                )
                return evidence, "the run begins with an epoch that was over when the checkpoint was saved"
        return None
    used = _used_before(last, save)
    repeated = [index for index in fresh[: len(used)] if index in set(used)]
    if used and len(repeated) > len(used) // 2 and len(last.indices) > len(used):
        evidence = f"of {len(used)} samples before the save, {len(repeated)} come again: {some(map(str, repeated), 5)}"
        return evidence, "the run begins the epoch anew, and the position in it is not restored"
    return None


def _is_shuffled(iteration: Iteration) -> bool:
    return bool((iteration.begin.get("distributed") or {}).get("shuffle") or iteration.begin.get("shuffles"))


def _used_before(iteration: Iteration, save: Event) -> list[str]:
    """Indices of the batches that were used in steps before the save."""
    count = save["step"] - iteration.begin["step"]
    return [index for number in range(count) for index in iteration.batches.get(number, ())]


@rule("LS704", "resume-without-state", "a resumed run has lost the state of the optimizer")
def resume_without_state(history: History) -> Iterable[Finding] | str:
    """A run that loads the model of an earlier run, and not its optimizer or scheduler."""
    resumed = _resumed(history)
    if not resumed:
        return _NO_PREVIOUS if history.previous is None else "no file of the earlier run was loaded"
    load = resumed[0][0]
    restored = {event.get("what") for event in history.of("state")}
    if "model" not in restored:
        return "no state of a model was restored"
    made = [event for event in history.of("optimizer") if event.get("class") not in _STATELESS or _has_momentum(event)]
    lost = ["optimizer"] if made and "optimizer" not in restored else []
    lost += ["scheduler"] if any(history.of("scheduler")) and "scheduler" not in restored else []
    if not lost:
        return []
    name, parts = os.path.basename(load["path"]), some(sorted(map(str, restored)))
    evidence = f"{name} was loaded at {line(load.get('at'))} and restored {parts}, not the {' and the '.join(lost)}"
    keys_saved = [str(key) for key in resumed[0][1].get("keys") or ()]
    cause = f"the file has {some(keys_saved, 8)}" if keys_saved else None
    remedy = f"save and load the state_dict() of the {' and the '.join(lost)}, too"
    return [Finding("LS704", place(load.get("at")), evidence, cause, remedy, tuple(history.ranks), load["step"])]


def _has_momentum(event: Event) -> bool:
    return any(group.get("momentum") for group in [*(event.get("groups") or ()), *(event.get("hyperparameters") or ())])
