"""Converts what a task returns to JSON values and to NumPy arrays."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """`value` as lists, mappings, text, numbers and None. A tensor becomes a list, a complex number a list of 2 parts.

    Raises:
        TypeError: a value has no such form; the text names its type.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, Path | datetime.date | datetime.time):
        return str(value)
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and numbers
        return plain(as_numpy(value).tolist() if is_tensor(value) else value.tolist())
    raise TypeError(type(value).__name__)


def is_tensor(value: Any) -> bool:
    """True if `value` is a torch tensor, without importing torch."""
    return hasattr(value, "detach") and hasattr(value, "tolist")


def as_dense(tensor: Any) -> Any:
    """A dense copy of a tensor on the CPU, without gradient; the tensor itself if it already is one."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.to_dense() if "sparse" in str(tensor.layout) else tensor


def as_numpy(tensor: Any) -> Any:
    """A tensor as a NumPy array. Types that NumPy lacks (bf16) become float32, which holds all of their values."""
    tensor = as_dense(tensor)
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.float().numpy()


def dumps(value: Any, ensure_ascii: bool = True) -> str:
    """`value` as JSON. Numbers that are not finite become null, because JSON lacks them."""
    return json.dumps(_finite(plain(value)), ensure_ascii=ensure_ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
