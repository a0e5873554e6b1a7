"""The optimizer, tried on a small parameter before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.core.checkpoint.nested import Plain
from lockstep.core.checkpoint.state import REMEDY_FOR_GLOBAL
from lockstep.core.errors import UsageError
from lockstep.core.optimizer_class import classes, is_of_torch, like, members, options
from lockstep.core.step import TrainState
from lockstep.parts.checks.rounding import REMEDY

# Ways to make an update; torch refuses some only when the update is made.
_WAYS = ("differentiable", "capturable", "fused", "foreach")


def check(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that an optimizer has the parameters of a model, and that it can train them here.

    torch checks some options only in an update: device, dtype. So an optimizer of the same class and options updates a
    small parameter of each kind that `optimizer` has.

    Raises:
        UsageError: a parameter is missing; an update fails; the optimizer needs a closure, or evaluates different
        weights than it trains; its state cannot be saved.
    """
    _check_parameters(optimizer, model)
    for member in members(optimizer):
        _check_interface(member)
        small = _small_updates(member)
        if not is_of_torch(member):
            _check_state(member, small)


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    remedy = "pass it the groups that Task.optimizer receives, with all their parameters"
    if missing := [name for key, name in named.items() if key not in held]:
        shown = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        raise UsageError(f"the optimizer lacks parameters of the model: {shown}", where="Task.optimizer", remedy=remedy)
    if set(held) != named.keys() or len(held) != len(named):
        what = "the optimizer has a parameter twice, or a parameter that the model does not have"
        raise UsageError(what, where="Task.optimizer", remedy=remedy)


def check_formats(state: TrainState) -> None:
    """Check that no update of a float16 parameter divides by zero.

    torch's classes add `eps` to a divisor in the format of the parameter. Their default, 1e-8, is zero in float16.

    Raises:
        UsageError: it would; or the loss scale of fp16 could not be taken from the gradients.
    """
    unfreezing = state.unfreezing
    later = [one for step in unfreezing.steps for one in unfreezing.begin(step)[1]] if unfreezing is not None else []
    ids = {id(one) for one in (*state.parameters, *later) if one.dtype == torch.float16}
    for group in state.optimizer.param_groups if ids else ():
        found = [one for one in group["params"] if id(one) in ids]
        eps = group.get("eps")
        if found and state.precision.scaler.is_enabled():
            what = "weights in float16 have gradients in float16, from which the loss scale cannot be taken"
            raise UsageError(what, where="precision=fp16", remedy=REMEDY)
        if found and isinstance(eps, float) and eps and not torch.tensor(eps, dtype=torch.float16):
            raise UsageError(
                f"{len(found)} trainable parameters are float16. In this format eps={eps:g} of "
                f"{classes(state.optimizer)} is zero, so that "
                "it divides by zero wherever a gradient is small: these weights become NaN",
                where="Task.model",
                remedy=REMEDY,
            )


def _check_interface(optimizer: torch.optim.Optimizer) -> None:
    kind, name = type(optimizer), type(optimizer).__name__
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{name} needs a closure, which computes the loss again. A step of Lockstep computes it once"
        raise UsageError(what, where="optim.name", remedy="use a different optimizer")
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    if any(one.state is not optimizer.state for one in inner):
        what = f"{name} holds another optimizer ({type(inner[0]).__name__}) with its own state"
        what += ", which no checkpoint would contain"
        raise UsageError(what, where="optim.name", remedy="share one state: self.state = inner.state")
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        what = f"{name} has the methods train and eval: it evaluates different weights than it trains"
        remedy = "use a different optimizer; train.ema_decay evaluates averages of the weights"
        raise UsageError(what, where="optim.name", remedy=remedy)


def _small_updates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state after an update of a small parameter, and the settings of its group that the update changed.

    Empty if a second optimizer of this class cannot be created.
    """
    kinds = {(p.device, p.dtype) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    given_options, state, foreign = options(optimizer), {}, list[Any]()

    def fault(device: torch.device, dtype: torch.dtype, given: Mapping[str, Any]) -> str | None:
        parameter = nn.Parameter(torch.zeros(4, 4, device=device, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        try:
            made = like(optimizer, [parameter], given)
            if made is not None:
                settings = [dict(group) for group in made.param_groups]
                made.step()
                foreign[:] = [key for key in made.state if key is not parameter]
                state.update(made.state[parameter])
                for before, group in zip(settings, made.param_groups, strict=True):
                    state.update((key, value) for key, value in group.items() if value is not before.get(key, made))
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    for device, dtype in sorted(kinds, key=str):
        what = fault(device, dtype, given_options)
        if foreign:
            found = f"{type(optimizer).__name__} keeps state under {foreign[0]!r}, which is not a parameter"
            raise UsageError(found, where="optim.name", remedy=REMEDY_FOR_GLOBAL)
        if what is None:
            continue
        chosen = [name for name in _WAYS if given_options.get(name)]
        without = {name: given_options | {name: None if name == "foreach" else False} for name in chosen}
        cause = next((name for name in chosen if fault(device, dtype, without[name]) is None), None)
        where = "optim" if cause is None else "optim.fused=true" if cause == "fused" else f"optim.args.{cause}=true"
        raise UsageError(
            f"{type(optimizer).__name__} cannot update parameters of {str(dtype).removeprefix('torch.')} on "
            f"{device.type} with these options: {what}",
            where=where,
            remedy="remove it" if cause else "use different values in optim.args, or a different optimizer",
        )
    return state


def _check_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    wrong = [name for name, value in state.items() if not isinstance(value, torch.Tensor | Plain)]
    if wrong:
        raise UsageError(
            f"{type(optimizer).__name__} keeps {wrong[0]!r} as a {type(state[wrong[0]]).__name__}; checkpoints hold "
            "tensors, numbers and texts",
            where="optim.name",
            remedy="use a different optimizer, or keep these values as separate tensors in its state",
        )
