"""What a run showed of a script, and what it did not, so that a report without findings says what it means."""

from __future__ import annotations

from lockstep_audit.events import EventHistory
from lockstep_audit.rules.facts import number_of
from lockstep_audit.rules.loaders import Iteration, iterations


def seen(history: EventHistory) -> str:
    """`2 ranks, 40 steps, 2 loaders, 1 evaluation, DDP with 161 parameters`."""
    found = [number_of(len(history.ranks), "rank")]
    found += [number_of(max((sum(1 for _ in history.of("step", rank=r)) for r in history.ranks), default=0), "step")]
    turns = [by_rank for epochs in iterations(history).values() for by_rank in epochs.values()]
    found += [number_of(len(iterations(history)), "loader"), number_of(_evaluations(turns), "evaluation")]
    for wrap in list(history.of("wrap", rank=min(history.ranks, default=0)))[:3]:
        found.append(f"{wrap['how'].upper()} with {number_of(wrap.get('parameters', 0), 'parameter')}")
    return ", ".join(found)


def _evaluations(turns: list[dict[int, Iteration]]) -> int:
    its = [next(iter(by_rank.values())) for by_rank in turns]
    return sum(bool((it.end or {}).get("forwards_eval")) and not it.is_training for it in its)


def unseen(history: EventHistory) -> str:
    """What a run did not reach, so that no rule could judge it."""
    turns = [by_rank for epochs in iterations(history).values() for by_rank in epochs.values()]
    epochs = [it for by_rank in turns for it in by_rank.values() if it.is_training and it.is_complete]
    missing = {
        "what ranks do differently (one rank ran)": len(history.ranks) > 1,
        "ends of epochs (no loader was exhausted in training)": bool(epochs) or not turns,
        "the order of epochs (fewer than two)": any(it.begin.get("epoch") for it in epochs) or not turns,
        "evaluation (none was seen)": _evaluations(turns) > 0,
        "saving (no file was written)": any(history.of("save")),
        "resuming (--previous)": history.previous is not None,
    }
    return ", ".join(what for what, is_there in missing.items() if not is_there)
