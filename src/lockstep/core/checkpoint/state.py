"""Reads and restores model, optimizer and averages by parameter name. With the step, that is the state of a run."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.checkpoint.form import Form, buffer_places, described, is_extra, kind, load, place_buffer
from lockstep.core.checkpoint.nested import NotSavedError, Plain, decode, encode
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel.sharded_tensor import is_sharded, like, local, local_shard, own_columns

_NOTHING = torch.empty(0)
REMEDY_FOR_GLOBAL = (
    "keep such a value in a group, as self.param_groups[0]['count']: checkpoints hold what changes there"
)
"""The remedy if an optimizer keeps state that belongs to no parameter."""


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a run by name: `model.NAME`, `optimizer.PARAMETER.SLOT`, `group.NAME.SETTING`, `ema.PARAMETER`.

    Learning rates are not part of it: the schedule computes them from the step.

    Returns:
        the tensors (not copies; sharded if the model is), and the values that are not tensors, as JSON has them: what
        `get_extra_state` returned is a copy that `nested.encode` made.

    Raises:
        CheckpointError: a value cannot be saved; names it. A value must be a tensor, a finite number, a text, a bool or
            None. `get_extra_state` may also return bytes, or a nested list, tuple, set or dict of such values.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, slots in optimizer.state.items():
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer keeps state under {reprlib.repr(parameter)}, which is not a parameter of the model",
                where="optimizer.state",
                remedy=REMEDY_FOR_GLOBAL,
            )
        state |= {f"optimizer.{names[id(parameter)]}.{slot}": value for slot, value in slots.items()}
    for group, settings in changed_settings(optimizer):
        state |= {f"group.{group['name']}.{key}": value for key, value in settings.items()}
    state |= {f"ema.{name}": value for name, value in (averages or {}).items()}
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in state.items() if name not in tensors}
    for name, value in plain.items():
        if name.startswith("model.") or (name.startswith("group.") and isinstance(value, tuple)):  # such as betas
            plain[name] = _encoded(name, value)
        elif not isinstance(value, Plain) or (isinstance(value, float) and not math.isfinite(value)):
            raise CheckpointError(
                f"{reprlib.repr(value)} can be saved neither as a tensor nor as a number",
                where=name,
                remedy="use another optimizer",
            )
    return tensors, plain


def _encoded(name: str, value: Any) -> Any:
    try:
        return encode(value)
    except NotSavedError as error:
        raise CheckpointError(
            f"{reprlib.repr(value)} cannot be saved: {error}",
            where=name,
            remedy="keep it in a buffer (register_buffer), or let get_extra_state return tensors, numbers, texts, "
            "bytes, and nested lists, tuples, sets and dicts of these",
        ) from error


def check_fits(
    index: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    averages: Mapping[str, Tensor] | None = None,
    values: Mapping[str, Any] | None = None,
) -> list[str]:
    """Compare the tensors of a checkpoint with those of `model` (and of `averages`): names, shapes, dtypes.

    Args:
        values: what the checkpoint holds besides tensors.

    Returns:
        a note on each buffer that has a different shape in the checkpoint; `restore` gives it that shape.

    Raises:
        CheckpointError: the checkpoint is of a different model; says how many tensors differ, and how the first does.
    """
    saved = {name: (*entry["shape"], entry["dtype"]) for name, entry in index.items()}
    of_model = _without_prefix("model.", saved | dict.fromkeys(values or ()))
    new = Form.of(model)
    differing = [f"model.{name}" for name in new.misfits(of_model)]
    own = {f"model.{name}": found for name, found in new.kinds.items()}
    if averages:
        own |= {f"ema.{name}": kind(average) for name, average in averages.items()}
        names = {name for name in own.keys() | saved.keys() if name.startswith("ema.")}
        differing += [name for name in names if own.get(name) != saved.get(name)]
    if differing:
        first = min(differing)
        remedy = "use the task and config that the checkpoint was made with, or start again with --fresh"
        if (
            first in own
            and first in saved
            and any(map(is_sharded, model.parameters()))
            and first[6:] in buffer_places(model)
        ):
            remedy = f"with fsdp, a buffer cannot change its shape: use parallel.strategy=ddp; or {remedy}"
        raise CheckpointError(
            f"tensors differ from the model's ({len(differing)}), first {first}: "
            f"saved {saved.get(first)}, model {own.get(first)}",
            remedy=remedy,
        )
    changed = sorted(new.buffers & {name for name, found in of_model.items() if found != new.kinds.get(name)})
    return [f"note: {described(new.kinds, of_model, changed)}: it has the checkpoint's shape"] if changed else []


def _without_prefix(prefix: str, by_name: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in by_name.items() if name.startswith(prefix)}


def wanted(
    index: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> dict[str, tuple[int, int] | None]:
    """The rows that this rank needs of a checkpoint, for `files.read`: first row and end by tensor; None: all rows.

    The optimizer and the averages are left out if they are None.
    """
    targets, parameters = model.state_dict(), dict(model.named_parameters())
    needed: dict[str, tuple[int, int] | None] = {}
    for name, entry in index.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            target = targets.get(rest, _NOTHING)  # a buffer that is None in a new model
        elif kind == "ema" and averages is not None:
            target = averages[rest]
        elif kind == "optimizer" and optimizer is not None:
            target = _slot(name, rest, parameters)[0]
        elif kind == "group" and optimizer is not None:
            target = _NOTHING
        else:
            continue
        # A slot that has not the shape of its parameter (a counter) is whole on every rank.
        sharded = is_sharded(target) and list(target.shape) == entry["shape"]
        shard = local_shard(target)
        needed[name] = (shard.start, shard.start + len(shard.local)) if sharded else None
    return needed


def restore(
    tensors: Iterable[tuple[str, Tensor]],
    plain: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    averages: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> None:
    """Load what `capture` returned, in place, after `check_fits`.

    Args:
        tensors: names and tensors; of a sharded tensor the rows that `wanted` names.
        plain: values that are not tensors.
        optimizer, averages: left as they are if None.
        device: of the rank. Tensors in values of `get_extra_state` that were on an accelerator come to it. None: the
            device of the parameters, which differs if they are kept in host memory.

    Raises:
        CheckpointError: the optimizer's state is of a parameter that the model does not have.
        TrainingError: the model's `load_state_dict` refuses what its `state_dict` returned.
    """
    targets, has_model_tensors = model.state_dict(), False
    parameters = dict(model.named_parameters())
    # Step counters stay on the host unless the optimizer needs them on the device. Other slots follow their parameter.
    groups = optimizer.param_groups if optimizer is not None else ()
    counts_on_device = {
        id(parameter)
        for group in groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }
    with torch.no_grad():
        for name, tensor in tensors:
            kind, _, rest = name.partition(".")
            if kind == "model":
                _load_tensor(model, targets, rest, tensor)
                has_model_tensors = True
            elif kind == "ema" and averages is not None:
                local(averages[rest]).copy_(own_columns(tensor, averages[rest]))
            elif kind == "optimizer" and optimizer is not None:
                parameter, slot = _slot(name, rest, parameters)
                tensor = own_columns(tensor, parameter)
                on_host = slot == "step" and id(parameter) not in counts_on_device
                value = tensor if on_host else _placed(tensor, parameter)
                sharded = is_sharded(parameter) and tensor.shape == local(parameter).shape and tensor.ndim
                optimizer.state[parameter][slot] = like(value, parameter) if sharded else value
            elif kind == "group" and optimizer is not None:
                set_setting(optimizer, rest, tensor)
    device = device or next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    extra = {name: decode(saved, device) for name, saved in _without_prefix("model.", plain).items()}
    if extra or has_model_tensors:  # tensors are in place already; values of get_extra_state are not
        load(model, targets | extra)
    for name, setting in plain.items():
        if name.startswith("optimizer.") and optimizer is not None:
            parameter, slot = _slot(name, name.removeprefix("optimizer."), parameters)
            optimizer.state[parameter][slot] = setting
        elif name.startswith("group.") and optimizer is not None:
            set_setting(optimizer, name.removeprefix("group."), decode(setting, device))


def changed_settings(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each group of an optimizer: the settings that the optimizer itself has changed since it was made.

    The optimizers of torch change none. Others keep a counter there, or an estimate of the learning rate.
    """
    began = getattr(optimizer, SETTINGS, ())
    for group, first in zip(optimizer.param_groups, began, strict=False):
        yield (
            group,
            {
                key: value
                for key, value in group.items()
                if key not in ("params", "name", "lr", "base_lr") and not _same(value, first.get(key, _NOTHING))
            },
        )


SETTINGS = "lockstep_settings"
"""The attribute of an optimizer that holds a copy of the settings with which each of its groups was made."""


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays compare element by element
        return False


def set_setting(optimizer: torch.optim.Optimizer, place: str, value: Any) -> None:
    """Set `GROUP.SETTING` of an optimizer."""
    name, _, key = place.rpartition(".")
    for group in optimizer.param_groups:
        if group["name"] == name:
            if isinstance(value, Tensor):
                place_of = group[key] if isinstance(group.get(key), Tensor) else group["params"][0]
                value = value.to(place_of.device)
            group[key] = value


def _placed(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A slot on the device of its parameter. A slot of the parameter's shape gets its strides, too.

    CUDA's fused kernels refuse other strides, such as those of a file that was written without `channels_last`.
    """
    own = local(parameter)
    if tensor.shape != own.shape or tensor.layout != own.layout or own.layout != torch.strided:
        return tensor.to(parameter.device)
    return torch.empty_like(own, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _load_tensor(model: nn.Module, targets: dict[str, Any], name: str, tensor: Tensor) -> None:
    """Load a tensor of the model in place. `targets`, its state, gets what is not in place."""
    target = targets.get(name)
    if is_extra(name):
        targets[name] = tensor.to(target.device) if isinstance(target, Tensor) else tensor
    elif target is None or (target.shape != tensor.shape and not is_sharded(target)):
        placed = place_buffer(model, name, tensor)
        if placed is None:
            raise CheckpointError(f"the model has no {name}", remedy="use the task that the checkpoint was made with")
        targets[name] = placed
    else:
        local(target).copy_(own_columns(tensor, target))


def _slot(name: str, rest: str, parameters: Mapping[str, nn.Parameter]) -> tuple[nn.Parameter, str]:
    owner, _, slot = rest.rpartition(".")
    if owner not in parameters:
        raise CheckpointError(
            f"the model has no parameter {owner}",
            where=name,
            remedy="use the task and config that the checkpoint was made with",
        )
    return parameters[owner], slot
