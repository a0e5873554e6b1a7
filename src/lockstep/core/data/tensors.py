"""The tensors in batches and outputs: whatever holds them, they are found, moved and pinned."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Tensor], Any]


def map_tensors(value: Any, change: Change, own: Callable[[Any], Any] | None = None) -> Any:
    """`value`, with `change` applied to every tensor in mappings, lists, tuples and dataclasses.

    Whatever holds a changed tensor is copied with its type, and with all that it holds besides. What holds no changed
    tensor is not copied.

    Args:
        own: is called with each object that is not a tensor. It returns the changed object, if the object can change
            itself, or else `NotImplemented`.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, str | bytes | int | float | None):
        return value
    changed = NotImplemented if own is None else own(value)
    if changed is not NotImplemented:
        return changed

    def inner(item: Any) -> Any:
        return map_tensors(item, change, own)

    # Dataclasses come before mappings: outputs of Hugging Face models are both.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, inner)
    if isinstance(value, Mapping):
        return _map_mapping(value, inner)
    if isinstance(value, tuple | list | deque | UserList):
        items = [inner(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        clone = copy.copy(value)  # a subclass may hold more than its items
        for place, item in enumerate(items):
            clone[place] = item
        return clone
    return value


def _map_dataclass(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Attributes are set, and `__init__` is not called: it may compute, and may not take every field."""
    names = [field.name for field in dataclasses.fields(value)]
    names += [name for name in getattr(value, "__dict__", {}) if name not in names]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}  # a field may have no value yet
    changed = {name: new for name, old in held.items() if (new := inner(old)) is not old}
    if not changed:
        return value
    clone = copy.copy(value)
    for name, new in changed.items():
        try:
            setattr(clone, name, new)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(clone, name, new)
    return clone


def _map_mapping(value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> Any:
    changed = {key: new for key, old in value.items() if (new := inner(old)) is not old}
    if not changed:
        return value
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        for key, new in changed.items():
            clone[key] = new
        return clone
    whole = {**value, **changed}
    try:
        return type(value)(whole)  # type: ignore[call-arg]
    except TypeError:  # the class takes no mapping
        return whole


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor is a single block of memory that holds its values: not sparse, nested, quantized or meta."""
    has_values = not tensor.is_quantized and not tensor.is_meta
    return tensor.layout is torch.strided and not tensor.is_nested and has_values


def values_of(tensor: Tensor) -> list[Tensor]:
    """The values of a tensor as plain tensors on its device: several if it is nested, none if it has no values."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return [value for part in tensor.unbind() for value in values_of(part)]
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return [tensor.resolve_conj().resolve_neg()]


def moves_itself(value: Any) -> bool:
    """True if an object has a method `to` that moves it to a device, and is neither a tensor nor a plain mapping.

    A mapping with this method, such as the `BatchEncoding` of a tokenizer, is not meant: its items are known.
    """
    return callable(getattr(value, "to", None)) and not isinstance(value, type | Mapping)


def moved(value: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """An object that moves itself, on `device`.

    Args:
        value: an object with `moves_itself(value)`.
        non_blocking: passed on if its method takes it.
    """
    clone = copy.copy(value)  # its method may change the object
    if non_blocking:
        try:
            found = clone.to(device, non_blocking=True)
        except TypeError:  # the method does not take it
            found = clone.to(device)
    else:
        found = clone.to(device)
    return clone if found is None else found


def to_cpu(value: Any, change: Change = lambda tensor: tensor.cpu()) -> Any:
    """`value`, with all tensors on the CPU.

    Args:
        change: what is done with each tensor; it must return a tensor on the CPU.
    """
    cpu = torch.device("cpu")
    return map_tensors(value, change, lambda item: moved(item, cpu) if moves_itself(item) else NotImplemented)


def pinned(value: Any) -> Any:
    """`value`, with its tensors in page-locked memory. Sparse and nested tensors stay where they are.

    An object with a method `pin_memory` pins itself.
    """

    def own(item: Any) -> Any:
        pins = callable(getattr(item, "pin_memory", None)) and not isinstance(item, type)
        return item.pin_memory() if pins else NotImplemented

    def pin(tensor: Tensor) -> Tensor:
        if not is_plain(tensor) or tensor.device.type != "cpu":
            return tensor
        # torch cannot pin an expanded tensor, because several of its elements share memory.
        is_expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return (tensor.contiguous() if is_expanded else tensor).pin_memory()

    return map_tensors(value, pin, own)
