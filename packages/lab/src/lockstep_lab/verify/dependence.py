"""What may make a training depend on its number of ranks: code that reads the rank, and state outside of buffers."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import lockstep
import lockstep_lab
from lockstep.core.parallel.pretended import noted_calls
from lockstep.core.task import Task
from lockstep.parts.digest import digest

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_FORWARDS = (  # files between a caller and a read
    *("<frozen os>", "<frozen _collections_abc>", "/os.py", "/_collections_abc.py"),
    *("lockstep/core/parallel/pretended.py", "lockstep_lab/verify/dependence.py"),
)
_LIBRARIES = [
    sysconfig.get_paths()["stdlib"],
    *(str(Path(str(package.__file__)).parent) for package in (lockstep, lockstep_lab)),
]
_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH, _MOST_ITEMS = 3, 1000


def is_users(file: str | None) -> bool:
    """True if a file of source code belongs to neither Python, an installed package nor this one."""
    if file is None or file.startswith(("<", *_LIBRARIES)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


@contextlib.contextmanager
def noted_reads() -> Generator[list[str], None, None]:
    """Inside, the returned list gets the places of the user's code that read the rank or the number of ranks."""
    found: list[str] = []

    def note(name: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_FORWARDS):
            frame = frame.f_back
        if is_users(file := frame.f_code.co_filename):
            text = f"{Path(file).name}:{frame.f_lineno} reads {name}"
            found.extend([] if text in found else [text])

    kind: Any = type(os.environ)
    read = kind.__getitem__

    def noting(self: Any, key: str) -> str:
        if key in _VARIABLES:
            note(key)
        return str(read(self, key))

    kind.__getitem__ = noting
    try:
        with noted_calls(note):
            yield found
    finally:
        kind.__getitem__ = read


def state_outside(task: Task, data: Any, model: nn.Module) -> dict[str, str]:
    """The state of the user's code outside of buffers and parameters, by name: numbers, tensors and generators.

    It belongs to the task, its training data, the modules of the model, and the files that define them.
    """
    owners: dict[str, Any] = {type(task).__name__: task, type(data).__name__: data}
    owners |= {f"the model's {name}" if name else "the model": module for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for name, owner in owners.items():
        found |= _described(name, getattr(owner, "__dict__", {}))
    for kind in {kind for owner in owners.values() for kind in type(owner).__mro__}:
        source = sys.modules.get(kind.__module__)
        if source is not None and is_users(getattr(source, "__file__", None)):
            found |= _described(kind.__name__, vars(kind))
            found |= _described(Path(str(source.__file__)).name, vars(source))
    return found


def _described(owner: str, values: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in values if not name.startswith("__") and name not in _OF_MODULES]
    return {f"{owner}.{name}": "".join(_words(values[name], _DEPTH)) for name in names}


def _words(value: Any, depth: int) -> Iterator[str]:
    """The state of a value as text. Nothing for objects of other types, such as generators, which the engine seeds."""
    if value is None or isinstance(value, bool | int | float | str):
        yield repr(value)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
        yield repr(digest(value.detach()))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield str(zlib.crc32(np.ascontiguousarray(value).tobytes()))
    elif depth and isinstance(value, Mapping) and len(value) <= _MOST_ITEMS:
        for key, item in value.items():
            yield f"{key!r}:"
            yield from _words(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | collections.deque) and len(value) <= _MOST_ITEMS:
        for item in value:
            yield ","
            yield from _words(item, depth - 1)
