"""Refuses collectives where ranks do not run the same code, such as in `Task.model`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.errors import TrainingError

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a collective is an error. torch's own, and those of DTensor.

    Where a model is sharded, only rank 0 makes it with values, and the other ranks on the meta device: rank 0 would
    wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise TrainingError(
                f"it makes a collective ({func._opname.strip('_')}), at {_place()}",
                where="Task.model",
                remedy="make the whole model on every rank, without torch.distributed and without DTensor; "
                "parallel.strategy=fsdp shards the model. Tensor parallelism is not supported",
            )
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _place() -> str:
    """File and line of the innermost code that belongs neither to torch nor to this package."""
    frame: Any = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
