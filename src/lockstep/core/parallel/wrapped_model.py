"""Models as their classes made them: without the module that `torch.compile` puts around them."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn

from lockstep.core.blocks import call_of
from lockstep.core.errors import UsageError

_SPREAD = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")

M = TypeVar("M", bound=nn.Module)


def without_wrappers(model: M, where: str) -> M:
    """`model` without the modules that `torch.compile` has put around it and around its parts.

    The compiled code stays: it takes the place of the call of the module inside, as with `Module.compile()`. So names
    of parameters are those of the plain model, in checkpoints and exports.

    Args:
        where: for errors.

    Raises:
        UsageError: the model is wrapped to be spread over ranks or devices.
    """
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        spread = next((kind for kind in kinds if kind in _SPREAD), None)
        if spread is not None:
            raise UsageError(
                f"{name or 'the model'} is wrapped in {spread}",
                where=where,
                remedy="give the module inside (.module): Lockstep spreads it over the ranks by itself, as "
                "parallel.strategy says",
            )
    kind: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    if kind is None:  # nothing has been compiled
        return model
    for module in list(model.modules()):
        for key, part in module._modules.items():
            if isinstance(part, kind) and not isinstance(module, kind):
                module._modules[key] = _inside(part, kind)
    inside: M = _inside(model, kind)
    return inside


def _inside(module: Any, kind: Any) -> Any:
    """The module inside of a compiled one. It runs the compiled code when it is called."""
    while type(module) is kind:
        inside: Any = module._orig_mod
        if not isinstance(inside, kind):
            inside._compiled_call_impl = module.dynamo_ctx(call_of(inside))
        module = inside
    return module


def inside_compiled(model: Any) -> Any:
    """The module that `torch.compile` was called with. Without it: `model` itself."""
    while (inside := getattr(model, "_orig_mod", None)) is not None:
        model = inside
    return model


def is_compiled(model: nn.Module) -> bool:
    """True if a module of `model` runs compiled code."""
    return any(module._compiled_call_impl is not None for module in model.modules())
