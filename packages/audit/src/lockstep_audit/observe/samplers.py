"""Observes samplers: which one a loader draws from, how samples are dealt to ranks, and where they were made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe import places
from lockstep_audit.observe.objects import Numbers, Registry
from lockstep_audit.observe.recorder import After, recorder

_SHUFFLING = {"RandomSampler": True, "SeedableRandomSampler": True, "WeightedRandomSampler": True}
_SHUFFLING |= {"SubsetRandomSampler": True, "SequentialSampler": False, "LengthGroupedSampler": True}
_numbers = Numbers()
_made_at: Registry[list[str | int] | None] = Registry()
"""Samplers and data sets that the script made."""


def within(loader: Any) -> list[Any]:
    """The samplers of a loader, the innermost last."""
    found: list[Any] = []
    inner = _sampler_in(loader)
    while inner is not None and not any(inner is one for one in found):
        found.append(inner)
        inner = _sampler_in(inner)
    return found


def described(loader: Any, samplers: list[Any]) -> dict[str, Any]:
    """What the samplers of a loader are, and how they deal samples to ranks: keys of the event `loader`."""
    inner = samplers[-1] if samplers else None
    shares = [told for told in map(_distribution, samplers) if told]
    distributed = shares[0] if shares else None
    kind = type(inner).__name__ if inner is not None else None
    shuffles = distributed.get("shuffle") if distributed else None
    shuffles = shuffles if shuffles is not None else _SHUFFLING.get(kind or "")
    made = (at for one in reversed(samplers) if _distribution(one) and (at := made_at(one)))
    size = loader.batch_size or next((s.batch_size for s in samplers if hasattr(s, "batch_size")), None)
    is_twice = sum((told.get("replicas") or 1) > 1 for told in shares) > 1
    drops = loader.drop_last or any(getattr(s, "drop_last", False) for s in samplers)
    replacement = next((bool(s.replacement) for s in samplers if hasattr(s, "replacement")), None)
    told: dict[str, Any] = {"sampler": None if inner is None else weak(_numbers.of, inner), "sampler_kind": kind}
    told |= {"sampler_at": next(made, None), "shuffles": shuffles, "distributed": distributed}
    own = next((one for one in samplers if places.file_of(type(one))), None) if distributed is None else None
    held = {name: each for name, each in vars(own).items() if type(each) is int} if own is not None else {}
    told |= {"held": held or None, "sampler_in": places.file_of(type(own)) if own is not None else None}
    told |= {"shared_twice": is_twice or None, "replacement": replacement}
    return told | {"batch_size": size, "drop_last": bool(drops)}


def _distribution(sampler: Any) -> dict[str, Any] | None:
    """How a sampler deals samples to ranks: torch's DistributedSampler and those like it, Accelerate's shards."""
    names = {"replicas": "num_replicas", "rank": "rank", "shuffle": "shuffle", "epoch": "epoch", "seed": "seed"}
    names |= {"drop_last": "drop_last", "total_size": "total_size"}
    if not hasattr(sampler, "num_replicas"):
        names = {"replicas": "num_processes", "rank": "process_index", "even_batches": "even_batches"}
        names |= {"split_batches": "split_batches"}
        if not hasattr(sampler, "num_processes"):
            names = {"replicas": "world_size", "rank": "rank", "shuffle": "shuffle", "epoch": "epoch", "seed": "seed"}
        if not all(isinstance(getattr(sampler, names[key], None), int) for key in ("replicas", "rank")):
            return None
    told = {key: getattr(sampler, name) for key, name in names.items() if hasattr(sampler, name)}
    return {"kind": type(sampler).__name__} | {k: v for k, v in told.items() if isinstance(v, (bool, int))}


def _sampler_in(thing: Any) -> Any:
    """The sampler that a loader or a sampler draws from. A sampler without a length has no truth value."""
    batches = getattr(thing, "batch_sampler", None)
    found = getattr(thing, "sampler", None) if batches is None else batches
    if found is None and isinstance(thing, torch.utils.data.Sampler):
        return next((one for one in vars(thing).values() if isinstance(one, torch.utils.data.Sampler)), None)
    return found


def watch_made(name: str, module: Any) -> None:
    """Record where the script makes objects of a class: samplers, data sets."""
    base = getattr(module, name)

    def made(kind: Any, *arguments: Any, **named: Any) -> Any:
        outer = super(base, kind).__new__
        one = outer(kind) if outer is object.__new__ else outer(kind, *arguments, **named)
        if places.is_by_user(sys._getframe(1)):
            recorder.guard(f"making of {name}", weak, _made_at.put, one, places.here(sys._getframe(1)))
        return one

    base.__new__ = made


def made_at(sampler: Any) -> list[str | int] | None:
    found: list[str | int] | None = weak(_made_at.get, sampler)
    return found


def length_of(thing: Any) -> int | None:
    """The length of a loader, a data set or an array. None: it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def weak(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TypeError:  # a list has no weak references
        return None


def epoch_set(sampler: Any, epoch: Any) -> After:
    """DistributedSampler.set_epoch."""
    recorder.emit("set_epoch", limit=2000, at=places.here(), sampler=_numbers.of(sampler), epoch=int(epoch))
    return None
