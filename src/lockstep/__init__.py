"""Lockstep: distributed PyTorch training whose result does not depend on how it was run."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own would take as long to import as Python to start
__version__ = "0.1.0"
__all__ = ["LockstepError", "Metrics", "Presenter", "RunConfig", "Task", "Trainer"]

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.errors import LockstepError
    from lockstep.tasks.presenter import Presenter
    from lockstep.tasks.task import Metrics, Task
    from lockstep.trainer import Trainer

_HOMES = {
    "LockstepError": "errors",
    "Metrics": "tasks.task",
    "Presenter": "tasks.presenter",
    "RunConfig": "config",
    "Task": "tasks.task",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> object:
    # Importing torch takes seconds; `import lockstep` and `lockstep --help` must not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.{_HOMES[name]}"), name)
