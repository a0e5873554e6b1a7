"""Observes sample orders that the script chose: samplers that a framework may replace, and states of generators."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from lockstep_audit.observe import places
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import recorder

_DRAWS = ("shuffle", "perm", "choice", "multinomial", "rand", "rng", "generator")
_RANDOM = ("RandomSampler", "SeedableRandomSampler")
_chosen: Registry[dict[str, Any]] = Registry()
"""By data set: the sampler of the script's loader over it."""


def chosen(dataset: Any, samplers: Sequence[Any], given: Any, made_at: Callable[[Any], Any]) -> None:
    """A loader of the script: remember a sampler with its own order, and where the script made it."""
    inner = samplers[-1] if samplers else None
    is_own = inner is not None and (inner is given or not type(inner).__module__.startswith("torch."))
    is_own = is_own and not hasattr(inner, "num_replicas") and _has_order(type(inner))
    kind = type(inner).__name__ if is_own else None
    known = _chosen.get(dataset)
    if known is not None and known["kind"] != kind:
        kind = None  # two loaders over one data set: unknown which one a framework took
    _chosen.put(dataset, {"kind": kind, "at": made_at(inner) if kind else None})


def lost(dataset: Any, samplers: Sequence[Any]) -> dict[str, Any] | None:
    """The script's sampler of a data set, if the samplers of a loader yield its indices in random order."""
    known = _chosen.get(dataset)
    kinds = [type(each).__name__ for each in samplers]
    is_shuffled = any(hasattr(each, "num_replicas") and getattr(each, "shuffle", None) is True for each in samplers)
    if known is None or not known["kind"] or not (is_shuffled or set(kinds[-1:]) & set(_RANDOM)):
        return None
    return known


def _has_order(kind: type) -> bool:
    """True if a sampler's source draws no numbers where it yields indices, or sorts them. Nothing is drawn here."""
    own = {name: each.__code__ for name, each in vars(kind).items() if hasattr(each, "__code__")}
    words = _words(code) if (code := getattr(getattr(kind, "__iter__", None), "__code__", None)) else set(_DRAWS)
    words |= {word for name in words & set(own) for word in _words(own[name])}
    sorts = {word for code in own.values() for word in _words(code)} & {"argsort", "key"}  # sorted(..., key=...)
    return bool(sorts) or not any(part in word.lower() for word in words for part in _DRAWS)


def _words(code: CodeType) -> set[str]:
    found = {*code.co_names}
    for const in code.co_consts:
        found |= _words(const) if isinstance(const, CodeType) else set()
        found |= {each for each in const if isinstance(each, str)} if isinstance(const, tuple) else set()
    return found


def generators(*owners: Any) -> str | None:
    """A digest of the generator states that objects hold; nothing is drawn. None: they hold no generators."""
    held = [each for owner in owners for each in getattr(owner, "__dict__", {}).values()]
    states: list[Any] = [each.get_state().tolist() for each in held if isinstance(each, torch.Generator)]
    states += [each.getstate() for each in held if isinstance(each, random.Random)]
    states += [each.bit_generator.state for each in held if hasattr(each, "bit_generator")]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16] if states else None


def restored(state: Any, *_: Any, **__: Any) -> None:
    """torch.set_rng_state, random.setstate and numpy.random.set_state by the script."""
    if places.is_by_user(sys._getframe(3)):
        value = state.tolist() if isinstance(state, torch.Tensor) else state
        digest = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        recorder.emit("generator", limit=20, at=places.here(), digest=digest)
