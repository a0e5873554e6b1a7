"""Refuses collectives if ranks do not run the same code, such as in `Task.model`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.code_files import lockstep_folders
from lockstep.core.errors import TrainingError

_NAMES = ("allgather", "allreduce", "alltoall", "barrier", "broadcast", "gather", "reduce", "scatter", "send", "recv")
_LIBRARIES = (str(Path(torch.__file__).parent), *lockstep_folders())


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Inside, a collective through a process group is an error, also if DTensor makes it.

    If a model is sharded, only rank 0 makes it with values, and the other ranks make it on the meta device: rank 0
    would wait forever. (A `TorchDispatchMode` would see functional collectives too, but loads torch's compiler, which
    takes a second.)
    """
    if not dist.is_initialized():
        yield
        return
    methods = vars(dist.ProcessGroup)
    before = {name: methods[name] for name in methods if name.removeprefix("_").startswith(_NAMES)}
    for name in before:
        setattr(dist.ProcessGroup, name, _refusing(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        frame: Any = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        raise TrainingError(
            f"it makes a collective ({name.strip('_')}), at {frame.f_code.co_filename}:{frame.f_lineno}",
            where="Task.model",
            remedy="make the whole model on every rank, without torch.distributed and without DTensor; "
            "parallel.strategy=fsdp shards the model. parallel.tensor splits its layers: lockstep --explain mesh",
        )

    return refuse
