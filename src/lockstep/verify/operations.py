"""What one step does below the surface: its operations, collectives, and where the host waits for the device.

The only place that knows `torch.utils._python_dispatch`, and the names of torch's collective operators.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.verify.digest import digest

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_DISTRIBUTED = f"{_PACKAGE}/distributed"  # counts units and computes norms over ranks
_WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_REDUCTIONS = {
    "c10d::allreduce_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::allreduce_coalesced_": 0,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
}


@dataclass
class Talk:
    """Of one step on one rank.

    reductions: elements of each reduction within the forward and backward passes. small: those that the package asks for by itself,
    to count units or take a norm. others: other collectives, by name. broadcast: bytes that were. waits: where the host read a value, (file and line,
    whether it is in the package).
    """

    reductions: list[int] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    broadcast: int = 0
    waits: list[tuple[str, bool]] = field(default_factory=list)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation of this thread and of its backward passes is seen.

    Args:
        optimizer: what it does in its `step` is not counted: torch's own optimizers read their counters.
        digests: keep each operation's name and a digest of its result.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, digests: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digests, self.talk = digests, Talk()
        self.seen: list[tuple[str, int]] = []
        self.paused = False
        self._handles = [optimizer.register_step_pre_hook(self._pause), optimizer.register_step_post_hook(self._go_on)]

    def _pause(self, *_: Any) -> None:
        self.paused = True

    def _go_on(self, *_: Any) -> None:
        self.paused = False

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if self.digests:
            self._digest(name, result)
        elif not self.paused:
            self._listen(name, args)
        return result

    def _digest(self, name: str, result: Any) -> None:
        results = result if isinstance(result, (list, tuple)) else [result]
        tensors = [
            one for one in results if isinstance(one, Tensor) and not one.is_meta and not hasattr(one, "device_mesh")
        ]
        if tensors and not name.startswith(("c10d", "aten::empty", "aten::new_empty")):  # what has no value yet
            self.seen.append((name, hash(tuple(digest(one) for one in tensors if one.layout == torch.strided))))

    def _listen(self, name: str, args: Sequence[Any]) -> None:
        if name in _REDUCTIONS:
            tensors = args[_REDUCTIONS[name]]
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            kind = (
                self.talk.small
                if str(Path(_frame().f_code.co_filename).parent) == _DISTRIBUTED
                else self.talk.reductions
            )
            kind.append(sum(one.numel() for one in tensors))
        elif name.startswith("c10d::"):
            if name == "c10d::broadcast_":
                self.talk.broadcast += sum(one.nbytes for one in args[0])
            self.talk.others.append(name.removeprefix("c10d::").strip("_"))
        elif name in _WAITS:
            self.talk.waits.append(_place())


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that draw from a torch generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append(func.name().partition(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _frame() -> FrameType:
    """Of who asked, outside torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    return frame


def _place() -> tuple[str, bool]:
    """File and line of who asked; and whether that is the package itself, rather than a task that it called."""
    frame = _frame()
    name = frame.f_code.co_filename
    return f"{Path(name).name}:{frame.f_lineno}", name.startswith(_PACKAGE) and not name.startswith(
        (f"{_PACKAGE}/tasks", f"{_PACKAGE}/models")
    )
