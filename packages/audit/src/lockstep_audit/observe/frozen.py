"""Observes frozen modules that the training calls, such as teachers: neither a wrapper nor an optimizer has them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lockstep_audit.observe import digests, models, module_creation, places, torch_state
from lockstep_audit.observe.gradients import gradients
from lockstep_audit.observe.recorder import recorder

_MOST, _PARTS = 8, 50
_noted: list[set[int]] = []
"""The ids of the parameters of each module that was recorded."""


def note(module: Any) -> None:
    """Before the first forward pass of a module: record its weights, if nothing here trains them."""
    parameters = dict(module.named_parameters())
    owners = [models.owner(each) for each in itertools.islice(parameters.values(), _PARTS)]
    if owners and owners[0] and owners[0][0].how == "ddp" and not any(p.requires_grad for p in parameters.values()):
        names = [owner[1] for owner in owners if owner]
        recorder.emit("frozen_part", limit=_MOST, at=places.here(), model=owners[0][0].number, names=names)
    if len(_noted) < _MOST and parameters and torch_state.has_other_ranks() and _is_frozen(parameters):
        _noted.append({id(parameter) for parameter in parameters.values()})
        made_from, is_early = module_creation.modules.get(module) or (None, None)
        found = digests.of_tensors({name: parameter.detach() for name, parameter in parameters.items()})
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
        told: dict[str, Any] = {"class": type(module).__name__, "digest": digests.of_numbers(found.values())}
        told |= {"names_digest": digests.of_numbers(shapes), "made_from": made_from, "is_early": is_early}
        told["changes"] = sum(0 if each.is_inference() else each._version for each in parameters.values())
        recorder.emit("frozen", at=places.here(), **told)


def _is_frozen(parameters: dict[str, Any]) -> bool:
    """True for parameters that get no gradient, in a script whose models all use DDP. Shards are excluded."""
    if not models.are_all("ddp") or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters.values())):
        return False
    if any(models.owner(each) is not None or not _is_own(each) for each in parameters.values()):
        return False
    known = {id(each) for each, _ in gradients.all.items()}.union(*_noted)
    return not any(id(parameter) in known or parameter.grad is not None for parameter in parameters.values())


def _is_own(parameter: Any) -> bool:
    """True for a parameter that belongs to a module and is whole: it was not placed there for one call."""
    is_whole = isinstance(parameter, torch.nn.Parameter) and not hasattr(parameter, "_local_tensor")
    return is_whole and not parameter.is_meta and not torch.nn.parameter.is_lazy(parameter)
