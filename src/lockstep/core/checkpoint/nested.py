"""Values that a module's `get_extra_state` returns, as JSON: nested lists and dicts of tensors, numbers and texts.

The JSON of equal values is the same text, so two checkpoints can be compared. Reading it calls nothing that a file
names. What JSON has not is an object with the name of its type as the only key.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Plain = float | int | bool | str | None
_PLAIN = (float, int, bool, str, type(None))  # a subclass, such as an enum, would come back as a different type
NESTED = "nested"
"""The key of an object that `encode` made, in what a checkpoint holds besides tensors."""
_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: Mapping[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


class NotSavedError(Exception):
    """A value is of a type that is not saved. The text says where it is, and what it is."""


def encode(value: Any) -> Any:
    """A value for JSON; `decode` restores it. Plain finite values stay as they are.

    Raises:
        NotSavedError: names the part that cannot be saved.
    """
    if type(value) in _PLAIN and not (type(value) is float and not math.isfinite(value)):
        return value
    try:
        return {NESTED: _encoded(value, "")}
    except RecursionError as error:
        raise NotSavedError("it contains itself") from error


def decode(saved: Any, device: torch.device) -> Any:
    """The value that `encode` was given. Tensors that were on an accelerator come to `device`."""
    return _decoded(saved[NESTED], device) if isinstance(saved, Mapping) else saved


def structure(value: Any) -> str:
    """The keys, lengths, types, shapes and dtypes in a value, but not its numbers and texts."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{key!r}: {structure(item)}' for key, item in value.items())})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(structure, value))})"
    return type(value).__name__


def _encoded(value: Any, place: str) -> Any:
    kind = type(value).__name__
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]
    if type(value) is _SEQUENCES.get(kind):
        items = [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]
        return {kind: items if kind == "tuple" else sorted(items, key=json.dumps)}
    if type(value) is _DICTS.get(kind):
        return {kind: [[_encoded(key, place), _encoded(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    if type(value) is bytes:
        return {"bytes": _text(value)}
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        return {"tensor": _tensor(value.detach())}
    raise NotSavedError(f"{place or 'it'} is a {type(value).__module__}.{type(value).__qualname__}")


def _tensor(tensor: Tensor) -> dict[str, Any]:
    if tensor.is_meta or tensor.is_nested:
        raise NotSavedError("a tensor has no values")
    content = tensor.cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    about = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return about | {"on_host": tensor.device.type == "cpu", "content": _text(content)}


def _decoded(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, list):
        return [_decoded(item, device) for item in saved]
    if not isinstance(saved, Mapping):
        return saved
    ((kind, value),) = saved.items()
    if kind == "float":
        return float(value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "tensor":
        content = torch.frombuffer(bytearray(base64.b64decode(value["content"])) or bytearray(1), dtype=torch.uint8)
        tensor = content[: len(content) if value["content"] else 0].view(getattr(torch, value["dtype"]))
        tensor = tensor.reshape(value["shape"])
        return tensor if value["on_host"] else tensor.to(device)
    if kind in _DICTS:
        return _DICTS[kind]((_decoded(key, device), _decoded(item, device)) for key, item in value)
    return _SEQUENCES[kind](_decoded(item, device) for item in value)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
