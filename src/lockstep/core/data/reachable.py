"""The objects that a data set holds, with the names by which it holds them."""

from __future__ import annotations

import functools
import io
import itertools
import pickle
from collections import deque
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST, _DEEPEST, _WIDEST = 2000, 8, 16  # objects that are looked at, levels of nesting, items of a container
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType)
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def held_by(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The objects that are reachable from `root`, each once, with their paths; nearest first, and not all of many.

    Long lists and dicts are entered at their first items only.
    """
    waiting, seen = deque([(name, root, 0)]), {id(root)}
    while waiting and len(seen) < _MOST:
        path, value, depth = waiting.popleft()
        yield path, value
        if depth == _DEEPEST:
            continue
        for place, item in parts(value):
            if id(item) not in seen and not isinstance(item, _PLAIN):
                seen.add(id(item))
                waiting.append((f"{path}{place}", item, depth + 1))


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes or the first items of an object, with their places, such as `.file` or `[0]`."""
    if isinstance(value, _PLAIN + _ARRAYS):
        return
    if isinstance(value, dict):  # another mapping may open a file when it is asked
        yield from ((f"[{key!r}]", item) for key, item in itertools.islice(dict.items(value), _WIDEST))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{place}]", item) for place, item in enumerate(itertools.islice(value, _WIDEST)))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".args[{place}]", item) for place, item in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", item) for key, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        for place, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{place}", cell.cell_contents
            except ValueError:  # it has no value yet
                continue
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{key}", item) for key, item in list(attributes.items()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield f".{slot}", getattr(value, slot)


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return memoryview(content).nbytes


def can_be_sent(value: Any) -> bool:
    """True if `value` can be pickled for a process that is not forked."""
    try:
        ForkingPickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return False
    return True


def not_sendable(value: Any, name: str) -> tuple[str, Any]:
    """The innermost object of `value` that cannot be pickled, and its path."""
    for _ in range(_DEEPEST):
        found = next(((place, item) for place, item in parts(value) if not can_be_sent(item)), None)
        if found is None:
            break
        name, value = f"{name}{found[0]}", found[1]
    return name, value
