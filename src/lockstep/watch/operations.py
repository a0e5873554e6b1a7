"""The operations of a pass, with digests of their results: where do two passes first differ?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.parts.digest import fold

_TORCH = str(Path(torch.__file__).parent)
_CORE = str(Path(__file__).parents[1] / "core")
_HERE = str(Path(__file__).parent)


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation of this thread and of its backward passes is recorded, with a digest of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str, Tensor]] = []
        """Name, file and line, digest."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        results = result if isinstance(result, (list, tuple)) else [result]
        tensors = {str(n): one for n, one in enumerate(results) if _has_values(one)}
        if tensors and not name.startswith(("c10d", "_c10d", "aten::empty", "aten::new_empty")):
            place = _place()
            if place is not None:
                self.found.append((name.removeprefix("aten::"), place, fold(tensors).cpu()))
        return result


def _has_values(value: Any) -> bool:
    plain = isinstance(value, Tensor) and type(value).__name__ in ("Tensor", "Parameter")
    return plain and not value.is_meta and value.layout is torch.strided and value.numel() > 0


def _place() -> str | None:
    """File and line of the code that calls an operation; None within the watch's own digests."""
    frame = sys._getframe(2)
    inner = frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE, _CORE)):
        if frame.f_code.co_filename.startswith(_HERE) and frame.f_code.co_name in ("fold", "signed_sums", "_blocks"):
            return None
        frame = frame.f_back
    frame = inner if frame.f_back is None else frame
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def first_difference(one: Callable[[], object], other: Callable[[], object]) -> str:
    """The first operation whose result differs between two passes, as `name at file:line`; empty if none does."""
    records = []
    for call in (one, other):
        with OperationRecorder() as operations:
            call()
        records.append(operations.found)
    for (name, place, digest), (name2, place2, digest2) in zip(*records, strict=False):
        if name != name2 or not torch.equal(digest, digest2):
            return f"{name} at {place}" if name == name2 else f"{name} at {place}, or {name2} at {place2}"
    return "" if len(records[0]) == len(records[1]) else "an operation that only one of the two passes makes"
