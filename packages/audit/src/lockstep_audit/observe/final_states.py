"""Observes the final state of models, and parameters that are frozen, unfrozen or added after the wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe import buffers, calls, digests, models, module_creation, places
from lockstep_audit.observe.models import parameters_of
from lockstep_audit.observe.recorder import After, recorder

_NAMES = 50
_last: dict[int, dict[str, str | None]] = {}
_last_buffers: dict[int, dict[str, str | None]] = {}
_copied: dict[int, dict[str, Any]] = {}
_outside: dict[str, dict[str, Any]] = {}


def note_parameters(*_: Any, **__: Any) -> After:
    """Remember digests of the parameters of replicas: before the process group ends, and at exit."""
    for model in models.told():
        parameters = {name: parameter.detach() for name, parameter in parameters_of(model)}
        if model.how == "ddp" and parameters:
            _last[model.number] = digests.of_tensors(parameters)
            _last_buffers[model.number] = digests.of_tensors({n: b for n, (_, b) in buffers.own(model.inner()).items()})
    _outside.update(_buffers_outside())
    moved = {name for inner in models.inner_of_told() for name in _normalizations(inner, False)}
    first = {model.before for model in models.told()}
    for copy, (number, at, before) in calls.copies.items():
        made_from, is_early = module_creation.modules.get(copy) or (None, None)
        changes = sum(0 if parameter.is_inference() else parameter._version for parameter in copy.parameters())
        _copied[number] = {"class": type(copy).__name__, "at": at, "digest": models.weights_of(copy)}
        _copied[number] |= {"made_from": made_from, "is_early": is_early, "changes": changes}
        if _copied[number]["digest"] not in {*first, before}:
            _copied[number]["initial"] = [name for name in _normalizations(copy, True) if name in moved] or None
    return None


def _normalizations(module: Any, is_initial: bool) -> list[str]:
    """Names of normalizations whose running statistics are those of a new layer, or are not."""
    kind = torch.nn.modules.batchnorm._NormBase
    own: list[tuple[str, Any]] = [(name, each) for name, each in module.named_modules() if isinstance(each, kind)]
    own = [(name, each) for name, each in own if each.running_mean is not None]
    return [n for n, m in own if (not m.running_mean.any() and bool((m.running_var == 1).all())) is is_initial]


def _buffers_outside() -> dict[str, dict[str, Any]]:
    """Buffers of the script's modules that no wrapper contains, by where the module was made."""
    inside = {id(part) for inner in models.inner_of_told() for part in inner.modules()}
    found = dict[str, dict[str, Any]]()
    for module, (made_from, _) in module_creation.modules.items() if models.told() else ():
        files = [file for kind in type(module).__mro__ if (file := places.file_of(kind))]
        held = vars(module).get("_buffers") or {} if files and id(module) not in inside else {}
        held = {name: each for name, each in held.items() if each is not None and each.is_floating_point()}
        if held and len(found) < _NAMES:
            key = f"{type(module).__name__} {made_from} {len(found)}"
            found[key] = {"files": files, "made_from": made_from, "digests": digests.of_tensors(held)}
    return found


def at_exit() -> dict[str, Any]:
    """The final parameters."""
    note_parameters()
    held = {number: each for number, each in _last_buffers.items() if each}
    told: dict[str, Any] = {"parameters": _last, "copies": _copied, "buffers": held, "outside": _outside}
    return {name: dict(each) or None for name, each in told.items()}


_unfrozen: dict[int, tuple[list[str], list[str]]] = {}


def note_unfrozen(model: models.Model, at: list[str | int] | None, held: Callable[[], set[int]]) -> bool:
    """Record parameters of a model that were frozen, unfrozen or added after its wrapping. True: there are new ones.

    Args:
        held: returns the ids of the parameters that optimizers have.
    """
    parameters = dict(parameters_of(model))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    on = [name for name in parameters if name in trained and model.trainable.get(name) is False]
    off = [name for name in parameters if name not in trained and model.trainable.get(name)]
    added = [name for name in parameters if name in trained and id(parameters[name]) not in models.at_wrapping]
    if not (on or off or added) or _unfrozen.get(model.number) == (on + added, off):
        return False
    _unfrozen[model.number] = (on + added, off)
    freed = next((place for name in on if (place := module_creation.freed_at.get(id(parameters[name])))), None)
    known = held()
    unowned = [name for name in on if id(parameters[name]) not in known]
    told: dict[str, Any] = {"names": (on + added)[:_NAMES], "frozen": off[:_NAMES], "added": added[:_NAMES] or None}
    told |= {"unowned": unowned[:_NAMES] or None, "at_step": True if freed is None else None}
    recorder.emit("unfrozen", limit=50, at=freed or at, model=model.number, **told)
    return bool(on or added)
