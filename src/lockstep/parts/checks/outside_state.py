"""State that no checkpoint contains: what training changes in a model outside its `state_dict`."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, count, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.code_files import PACKAGES

# Modules and tasks of these packages were reviewed: what they keep in attributes are settings and caches.
_KNOWN = ("torch", "transformers", "peft", *PACKAGES)
_OF_TORCH = frozenset(vars(nn.Module()))
_SHOWN = 5
_ELEMENTS = 4096
"""The most values in an attribute that are examined, however nested; of more, only the lengths count."""
_BYTES = 1 << 30
"""The most bytes of tensors and arrays in all attributes that are examined; of more, only the shapes count."""
_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
_ON_FIRST_USE = ("bool", "non-persistent buffer")
"""The values that count as changed since before the first step; all others since their value after the first step."""


class OutsideState:
    """Examines a model and its task three times: before the first step of a process, after it and after the second.

    A buffer that is not saved is reported if it has changed at all, and so is a flag in an attribute. Other values in
    attributes are reported if they changed in the second step, because many models keep the size of their first batch
    or fill a cache with it: numbers, texts, tensors, arrays, containers of these, and modules that do not belong to the
    model. Lockstep seeds random generators before each pass, so their states do not matter.

    Args:
        task: its attributes are also examined.
    """

    def __init__(self, model: nn.Module, task: object) -> None:
        self.model, self.task = model, task
        self.seen: list[dict[str, tuple[str, object]]] = []

    def look(self) -> None:
        """Remember the current values."""
        self.seen.append({name: (kind, value) for name, kind, value in self._values()})

    def changed(self) -> list[str]:
        """Changed values that no checkpoint contains: names with kinds, such as `encoder.counts (list)`."""
        before, first, second = self.seen
        found = []
        for name, (kind, value) in second.items():
            since = before if kind in _ON_FIRST_USE else first
            if name in since and since[name][0] == kind and since[name][1] != value:
                found.append(f"{name} ({kind})")
        return found

    def warnings(self) -> list[str]:
        """A warning if state changed that no checkpoint contains."""
        found = self.changed()
        if not found:
            return []
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return [
            f"warning: training changes {', '.join(found[:_SHOWN])}{more}, but no checkpoint has that: a resumed run "
            "starts with the initial values. Keep what later steps depend on in a buffer (register_buffer), or in "
            "get_extra_state and set_extra_state; a cache may stay as it is"
        ]

    def _values(self) -> Iterator[tuple[str, str, object]]:
        look = _Look(self.model)
        for prefix, module in self.model.named_modules():
            dot = f"{prefix}." if prefix else ""
            for key in module._non_persistent_buffers_set:
                if _is_readable(buffer := module._buffers.get(key)):
                    yield f"{dot}{key}", "non-persistent buffer", _digest(buffer)
            keeps_more = type(module).get_extra_state is not nn.Module.get_extra_state
            if not _is_known(module) and not keeps_more:
                yield from _attributes(dot, module, look)
        if not _is_known(self.task):
            yield from _attributes("Task.", self.task, look)


def _attributes(prefix: str, owner: object, look: _Look) -> Iterator[tuple[str, str, object]]:
    for key, value in list(getattr(owner, "__dict__", {}).items()):
        if key not in _OF_TORCH and (kind := _kind(value)):
            with contextlib.suppress(Exception):  # a user's thread changes it, or it is an activation
                yield f"{prefix}{key}", kind, look.at_attribute(value)


def _kind(value: object) -> str:
    """The name of a value in a warning. Empty: values of this type are not examined."""
    if isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__
    if isinstance(value, Tensor):  # with requires_grad it is an activation
        return "tensor" if _is_readable(value) and not value.requires_grad else ""
    if isinstance(value, np.ndarray):
        return "NumPy array" if not isinstance(value, np.memmap) else ""
    if isinstance(value, _CONTAINERS):
        return type(value).__name__
    if isinstance(value, nn.Module):
        return "module outside the model"
    return "counter" if isinstance(value, count) else ""


class _Look:
    """One snapshot of the attributes of a model and its task, at a bounded cost. Parts of the model are left out."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {id(part) for parts in (model.modules(), model.parameters(), model.buffers()) for part in parts}
        self.elements, self.bytes = _ELEMENTS, _BYTES

    def at_attribute(self, value: Any) -> object:
        """Something that differs if the value of an attribute differs.

        Raises:
            ValueError: it holds activations, which come and go with each batch.
        """
        self.elements = _ELEMENTS
        return self._at(value)

    def _at(self, value: Any) -> object:
        """For values that are not examined, it is their type."""
        self.elements -= 1
        if id(value) in self.own:
            return type(value)
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                raise ValueError("an activation")
            return self._tensor(value.data) if _is_readable(value.data) else type(value)
        if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
            return self._array(value)
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        if isinstance(value, nn.Module):
            named = {**dict(value.named_parameters()), **dict(value.named_buffers())}
            return [(name, self._at(tensor)) for name, tensor in named.items()]
        if isinstance(value, str | bytes):
            return hash(value)
        return repr(value) if isinstance(value, bool | int | float | complex | np.generic | count) else type(value)

    def _container(self, value: Any) -> object:
        parts: Iterable[Any] = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        looked = [self._at(part) for part in takewhile(lambda _: self.elements > 0, parts)]
        if isinstance(value, set | frozenset):  # equal sets may differ in order
            return len(value), sorted(map(repr, looked)) if self.elements > 0 else None
        return len(value), looked

    def _tensor(self, tensor: Tensor) -> object:
        values = _first(tensor, self.bytes // tensor.element_size())
        self.bytes -= values.nbytes
        return tuple(tensor.shape), _digest(values)

    def _array(self, array: np.ndarray) -> object:
        if array.dtype.hasobject:
            return array.shape, self._container(_first(array, self.elements).tolist())
        values = _first(array, self.bytes // max(1, array.itemsize))
        self.bytes -= values.nbytes
        return array.shape, array.dtype.str, zlib.crc32(values.tobytes())


def _is_known(owner: object) -> bool:
    """True if the class of an object is from a known package. FSDP gives each module a class derived from it."""
    own = next(kind for kind in type(owner).__mro__ if not kind.__name__.startswith("FSDP"))
    return own.__module__.partition(".")[0] in _KNOWN


def _is_readable(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.is_meta and not value.is_nested


def _first(values: Any, most: int) -> Any:
    """The first `most` values of a tensor or an array, flat. Repeats that `expand` made count once.

    Flattening first would copy all values and, for an expanded tensor, far more than its memory holds.
    """
    strides = values.stride() if isinstance(values, Tensor) else values.strides
    values = values[(*(slice(1) if not stride else slice(None) for stride in strides), ...)]
    kept = []
    for place in range(values.ndim):
        rows = -(-most // max(1, math.prod(values.shape[place + 1 :])))
        kept.append(slice(rows))
        if rows != 1:
            break
    return values[(*kept, ...)].reshape(-1)[:most]


def _digest(tensor: Tensor) -> object:
    values = _first(tensor.detach(), tensor.numel()).cpu().resolve_conj().resolve_neg().contiguous()
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(values.view(torch.uint8).numpy().data)
