"""Load the state of an optimizer in the format of `torch.optim`, which numbers parameters, by parameter name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.checkpoint import finite, state
from lockstep.core.errors import number_of
from lockstep.core.optimizer_class import Optimizers
from lockstep.weights.torch_file import unwrapped

Slots = dict[str, dict[str, Any]]  # by name of the parameter, then by name of the slot

_KERNELS = ("foreach", "fused", "capturable", "differentiable", "maximize")  # they do not change the state
_NEVER_STORED_BEFORE = "decoupled_weight_decay"  # distinguishes Adam from AdamW; older versions of torch lack it


class NotTaken(Exception):
    """The state of an optimizer does not fit. The message gives the reason."""


def load(saved: Any, model: nn.Module, optimizer: torch.optim.Optimizer, *, saved_class: str | None) -> int:
    """Load the state of a different optimizer into `optimizer`, completely or not at all. Its settings are not loaded.

    Args:
        saved: the result of `state_dict` of that optimizer, or of torch's `get_optimizer_state_dict`.
        saved_class: the name of its class; None: unknown; settings and slots must then be those of `optimizer`.

    Returns:
        the number of parameters with a state.

    Raises:
        NotTaken: the state belongs to a different class, or to different parameters. Nothing was loaded.
    """
    if isinstance(optimizer, Optimizers):
        raise NotTaken("the config has several optimizers")
    groups = _groups(saved)
    _check_class(groups, optimizer, saved_class)
    names = _names(groups, model, optimizer)
    slots = {names[key]: dict(value) for key, value in saved["state"].items() if key in names}
    slots = {name: {slot: value for slot, value in own.items() if value is not None} for name, own in slots.items()}
    parameters = dict(model.named_parameters())
    examples = _examples(optimizer)
    for name, own in slots.items():
        own.update(_checked(name, own, parameters[name], examples))
    flat = {f"optimizer.{name}.{slot}": value for name, own in slots.items() for slot, value in own.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
    index = {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}
    rows = state.wanted(index, model, optimizer)

    def own_rows() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            begin_end = rows[name]
            yield name, (tensor if begin_end is None else tensor[slice(*begin_end)]).clone()

    state.restore(own_rows(), plain, model, optimizer)
    return len(slots)


def _groups(saved: Any) -> list[Mapping[str, Any]]:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    is_known = isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)
    if not is_known or not isinstance(saved.get("state"), Mapping):
        raise NotTaken("it is not in the format of torch.optim")
    if not saved["state"]:
        raise NotTaken("it is empty")
    assert isinstance(groups, list)
    return groups


def _check_class(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, saved_class: str | None
) -> None:
    own = type(optimizer).__name__
    if saved_class is not None:
        if saved_class != own:
            raise NotTaken(f"it belongs to {saved_class}, but the config has {own}")
        return
    known = _settings_of_torch()
    for group in groups:
        theirs, ours = (set(keys) & known for keys in (group, optimizer.defaults))
        decoupled = group.get(_NEVER_STORED_BEFORE), optimizer.defaults.get(_NEVER_STORED_BEFORE)
        if theirs != ours or (None not in decoupled and decoupled[0] != decoupled[1]):
            raise NotTaken(f"its settings ({', '.join(sorted(theirs))}) do not match {own}")


def _settings_of_torch() -> set[str]:
    """The arguments of all torch optimizers that change their state or how it is used."""
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    known = {name for one in classes if issubclass(one, torch.optim.Optimizer) for name in _arguments(one)}
    return known - {"self", "params", "args", "kwargs", "defaults", *_KERNELS, _NEVER_STORED_BEFORE}


def _arguments(optimizer_class: type) -> Collection[str]:
    return inspect.signature(optimizer_class).parameters.keys()


def _names(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int | str, str]:
    """The parameter of the model for each key that has a state in the file.

    A file may contain names. Otherwise its numbers follow the order of `model.parameters()`, or of Lockstep's groups.
    """
    keys = [key for group in groups for key in group["params"]]
    own = [name for name, _ in model.named_parameters()]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    said = keys if keys and all(isinstance(key, str) for key in keys) else None
    if said is None and all("param_names" in group for group in groups):
        said = [name for group in groups for name in group["param_names"]]
    if said is not None and len(said) == len(keys):
        names = {in_file: name for name, in_file in unwrapped(said, own).items()}
        wrong = [*(set(names.values()) - set(own)), *(set(trainable) - set(names.values()))]
        if wrong:
            raise NotTaken(f"it has parameters that the model lacks, such as {min(wrong)}")
        return {key: names[name] for key, name in zip(keys, said, strict=True)}
    if len(groups) == 1:
        ordered = own if len(keys) == len(own) else trainable
    else:
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
            raise NotTaken(f"its {len(groups)} groups do not list their parameters by name")
        ordered = [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    if len(keys) != len(ordered):
        raise NotTaken(
            f"it has {number_of(len(keys), 'parameter')}, but the model has {len(own)} ({len(trainable)} trainable)"
        )
    return dict(zip(keys, ordered, strict=True))


def _examples(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The slots that the optimizer creates for a matrix and for a vector."""
    made = []
    arguments = _arguments(type(optimizer)) - {"params", *_KERNELS}  # type: ignore[operator]
    for shape in ((2, 3), (3,)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        with contextlib.suppress(ValueError, RuntimeError):  # some only take matrices
            settings = {name: value for name, value in optimizer.defaults.items() if name in arguments}
            other = type(optimizer)([parameter], **settings)
            other.step()
            made.append({slot: value for slot, value in other.state[parameter].items() if value is not None})
    return made


def _checked(
    name: str, slots: Mapping[str, Any], parameter: nn.Parameter, examples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The slots of a parameter, in the types of the optimizer.

    Raises:
        NotTaken: they belong to a different class, have a different shape, or are not finite.
    """
    example = next((made for made in examples if made.keys() == slots.keys()), None)
    if example is None:
        raise NotTaken(f"its slots of {name} ({', '.join(slots)}) do not match this optimizer")
    checked: dict[str, Any] = {}
    for slot, value in slots.items():
        if not isinstance(value, Tensor):
            checked[slot] = torch.tensor(float(value)) if isinstance(example[slot], Tensor) else value
            continue
        fits = value.ndim == parameter.ndim and all(
            size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)
        )
        if value.numel() != 1 and not fits:
            raise NotTaken(f"{slot} of {name} has the shape {list(value.shape)} instead of {list(parameter.shape)}")
        if finite.grade(value) != finite.FINITE:
            raise NotTaken(f"{slot} of {name} contains numbers that are not finite")
        casts = slot != "step" and parameter.is_floating_point()  # as in torch's own `load_state_dict`
        checked[slot] = value.to(parameter.dtype) if casts else value
    return checked
