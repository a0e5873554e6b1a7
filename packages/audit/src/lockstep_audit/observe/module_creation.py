"""Observes where modules are made or copied, and where parameters are unfrozen."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from lockstep_audit.observe import places
from lockstep_audit.observe.objects import Registry

has_wrapped = False
"""Whether a model was wrapped."""
modules: Registry[tuple[list[list[str | int]], bool]] = Registry()
"""Where each module was made or copied, the innermost line first, and whether any wrapping came before."""
_LINES = 3
_NAMES = 8
_EPOCH = "on_train_epoch_start"  # BaseFinetuning's method; it calls what a subclass defines
freed_at: dict[int, list[str | int] | None] = {}
"""Where a call of the script unfroze a parameter, by the parameter's id."""
_callbacks: Registry[list[str | int] | None] = Registry()
"""Where the script made Lightning callbacks that unfreeze."""


def made(module: Any, *_: Any, **__: Any) -> None:
    """Module.__init__, and Module.__setstate__ of a copy. Skips the constructors of the module itself."""
    own = places.outside(lambda frame: frame.f_code.co_name == "__init__" and owner_of(frame) is module, _LINES)
    modules.put(module, (own, not has_wrapped))


def owner_of(frame: Any) -> Any:
    """The first argument of a function: for a method, its object."""
    return next(iter(places.arguments(frame)), None)


def made_from(parameters: Iterable[torch.Tensor]) -> list[list[str | int]] | None:
    """Where the largest module with only such parameters was made, or one that has any of them."""
    wanted = {id(parameter) for parameter in parameters}
    known = [({id(parameter) for parameter in module.parameters()}, at) for module, (at, _) in modules.items()]
    found = [(len(ids) if ids <= wanted else 0, at) for ids, at in known if ids & wanted]
    return max(found, key=lambda each: each[0], default=(0, None))[1]


def holds(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """True if one module has parameters in both."""
    both = {id(parameter) for parameter in some}, {id(parameter) for parameter in others}
    own = ({id(parameter) for parameter in module.parameters()} for module, _ in modules.items() if all(both))
    return any(ids & both[0] and ids & both[1] for ids in own)


def untrained(known: set[int], wrapped: Iterable[Any]) -> list[dict[str, Any]] | None:
    """Modules outside of wrapped models, such as a loss, whose own parameters have gradients.

    Args:
        known: ids of the parameters that optimizers have.

    Returns:
        for each: the names of these parameters, and where the module was made.
    """
    inside = {id(part) for model in wrapped for part in model.modules()}
    found = []
    for module, (at, _) in modules.items():
        own = {} if id(module) in inside else vars(module).get("_parameters") or {}
        names = [name for name, one in own.items() if one is not None and one.grad is not None and id(one) not in known]
        if names:
            found.append({"names": [f"{type(module).__name__}.{name}" for name in names[:_NAMES]], "at": at})
    return found[:_NAMES] or None


def freed(thing: Any, requires_grad: bool = True) -> None:
    """requires_grad_() of a module or a parameter, by the script."""
    if requires_grad and places.is_by_user(sys._getframe(3)):
        for parameter in thing.parameters() if isinstance(thing, torch.nn.Module) else [thing]:
            freed_at[id(parameter)] = places.here()


def callback_made(callback: Any, *_: Any, **__: Any) -> None:
    """BaseFinetuning.__init__."""
    own = places.outside(lambda frame: frame.f_code.co_name == "__init__" and owner_of(frame) is callback)
    _callbacks.put(callback, own[0] if own else None)


def freed_by_framework(things: Any, *_: Any, **__: Any) -> None:
    """BaseFinetuning.make_trainable and LightningModule.unfreeze: called by a line of the script or by a callback."""
    frame, at = sys._getframe(3), None
    while frame.f_back is not None and at is None and places.kind_of(frame.f_code)[0] is not places.USER:
        at = _callbacks.get(owner_of(frame)) if frame.f_code.co_name == _EPOCH else None
        frame = frame.f_back
    at = at or places.here()
    for thing in things if isinstance(things, (list, tuple)) else [things]:
        for parameter in thing.parameters() if isinstance(thing, torch.nn.Module) else ():
            freed_at[id(parameter)] = at
