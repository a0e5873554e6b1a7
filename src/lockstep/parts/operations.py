"""Observers of torch's operations, and the code that calls an operation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.parallel.sharded_tensor import is_sharded
from lockstep.parts import digest

TORCH = str(Path(torch.__file__).parent)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation of this thread and of its backward passes passes through `run`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:  # torch's has no types
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, and return its result."""
        result = func(*args, **kwargs)
        self.see(func, args, kwargs, result)
        return result

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at an operation that has run."""


def name_of(func: Any) -> str:
    """The name of an operation, such as `aten::mul`."""
    name: str = func.name()
    return name.partition(".")[0]


class Results(Observer):
    """Inside, every operation is recorded with digests of its results.

    Args:
        place: returns file and line of the running operation.
    """

    def __init__(self, place: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.found: list[tuple[str, str, tuple[digest.Digest, ...]]] = []
        """Name, file and line, digests."""
        self._place = place

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = name_of(func)
        if name.startswith(("c10d", "_c10d", "aten::empty", "aten::new_empty")):  # their results have no values yet
            return
        tensors = [one for one in (result if isinstance(result, (list, tuple)) else [result]) if _has_values(one)]
        if tensors:
            self.found.append((name, self._place(), tuple(map(digest.digest, tensors))))


def _has_values(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return is_plain and not is_sharded(value) and value.numel() > 0


def caller(folders: tuple[str, ...]) -> FrameType:
    """The innermost frame outside torch and `folders`. If there is none, the outermost."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, __file__, *folders)):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> str:
    """File and line of a frame."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
