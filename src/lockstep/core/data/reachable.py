"""The objects that can be reached from another, with the names by which it holds them."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST, _DEEPEST, _WIDEST = 2000, 8, 16  # objects that are examined, levels of `not_sendable`, items of a container
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType)
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


Place = tuple["Place | None", str]
"""The place of the object that holds another, and the part that this one is."""


def walk(
    owner: object, name: str, parts: Callable[[Any], Iterable[tuple[str, Any]]], seen: set[int], most: int
) -> Iterator[tuple[Place, Any]]:
    """The objects that can be reached from an object, each once and the nearest first, with their places.

    Objects that cannot be examined are passed over, such as those that answer to every name.

    Args:
        name: of the object.
        parts: what an object holds, and where.
        seen: identities of objects that are left out. Those that are found are added.
        most: the most objects that are examined.
    """
    queue: list[tuple[Place, Any]] = [((None, name), owner)]  # keeps them alive, so that identities are unique
    for place, value in queue:
        yield place, value
        if len(queue) > most:
            continue
        with contextlib.suppress(Exception):
            for part, item in parts(value):
                if id(item) not in seen:
                    seen.add(id(item))
                    queue.append(((place, part), item))


def text_of(place: Place | None) -> str:
    """A place for messages, such as `data.transform.rng`."""
    return "" if place is None else text_of(place[0]) + place[1]


def held_by(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The objects that a data set holds, with their paths. Long lists and dicts are entered at their first items only.

    It enters no code: a worker may use what a global variable holds without harm, if it is not the data set that does.
    """
    for place, value in walk(root, name, _parts_to_enter, {id(root)}, _MOST):
        yield text_of(place), value


def _parts_to_enter(value: Any) -> Iterator[tuple[str, Any]]:
    return ((place, item) for place, item in parts(value) if not isinstance(item, _PLAIN))


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes or the first items of an object, with their places, such as `.file` or `[0]`."""
    if isinstance(value, _PLAIN + _ARRAYS):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in items(value, _WIDEST))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{place}]", item) for place, item in enumerate(itertools.islice(value, _WIDEST)))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".args[{place}]", item) for place, item in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", item) for key, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        yield from ((f".{place}", item) for place, item in closure(value))
    yield from attributes(value)


def items(value: dict[Any, Any], most: int) -> list[tuple[Any, Any]]:
    """The first items of a dict. A class derived from it may open a file when it is asked for them."""
    return list(itertools.islice(dict.items(value), most))


def closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of the functions around a function, by their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # it has a value
            yield name, cell.cell_contents


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object itself has, by `.name`."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from ((f".{name}", item) for name, item in list(own.items()))
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
