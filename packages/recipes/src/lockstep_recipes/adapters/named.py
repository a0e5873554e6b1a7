"""What `lockstep train FILE.py:NAME` accepts besides a Task: a LightningModule, or a function that returns a task."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.task import Task
from lockstep_recipes.adapters import hooks

_OPTIONS = ("datamodule", "trainer", "weight", "ignore")


def adapt(found: Any, module: ModuleType, where: str) -> Callable[..., Task] | None:
    """A function from the keys of the section `task` to a task. None: `found` is not something that this package
    handles.

    This is the entry point of the group `lockstep.adapters`.

    Args:
        found: what `lockstep train FILE.py:NAME` names, in `module`; or what a function of this name returned.
        where: the name of the file in errors.
    """
    if inspect.isclass(found) and hooks.base_of(found, "LightningModule"):
        return functools.partial(_of_lightning, found, module, where)
    if hooks.base_of(type(found), "LightningModule"):
        from lockstep_recipes.adapters.lightning_task import LightningTask

        return functools.partial(LightningTask, found)
    return None


def _of_lightning(kind: type, module: ModuleType, where: str, **arguments: Any) -> Task:
    """A LightningModule with the DataModule of its file. Each key is passed to the constructors that take it."""
    from lockstep_recipes.adapters.lightning_task import LightningTask

    options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
    kinds = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and hooks.base_of(value, "LightningDataModule")
    }
    own = {name: value for name, value in kinds.items() if value.__module__ == module.__name__} or {
        name: value
        for name, value in kinds.items()
        if value.__module__.partition(".")[0] not in ("pytorch_lightning", "lightning")
    }
    name = options.pop("datamodule", None)
    if name is not None and name not in kinds:
        remedy = f"{did_you_mean(name, kinds)}the file has: {', '.join(kinds) or 'none'}"
        raise UsageError(f"there is no LightningDataModule {name!r}", where="task.datamodule", remedy=remedy)
    base = hooks.base_of(kind, "LightningModule")
    alone = getattr(kind, "train_dataloader", None) is not getattr(base, "train_dataloader", None)
    if name is None and not alone and len(own) != 1:
        what = f"{kind.__name__} has no train_dataloader, and the file has {', '.join(own) or 'no LightningDataModule'}"
        remedy = "give task.datamodule=NAME, or write a function that returns adapters.lightning(module, data)"
        raise UsageError(what, where=where, remedy=remedy)
    data = kinds[name] if name is not None else None if alone else next(iter(own.values()))
    taken = {one: _taken(one, arguments) for one in (kind, data) if one is not None}
    for key in arguments:
        if not any(key in of_one for of_one in taken.values()):
            known = [*_OPTIONS, *(one for maker_of in taken for one in inspect.signature(maker_of).parameters)]
            remedy = f"{did_you_mean(key, known)}there are: {', '.join(dict.fromkeys(known))}"
            raise UsageError("unknown key", where=f"task.{key}", remedy=remedy)
    for one, of_one in taken.items():
        parameters = inspect.signature(one).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if missing := [f"task.{key}" for key in needed if key not in of_one]:
            remedy = "give them as KEY=VALUE, or write a function that returns adapters.lightning(module, data)"
            raise UsageError(f"{one.__name__} needs {', '.join(missing)}", where=where, remedy=remedy)
    make = functools.partial(kind, **taken[kind])
    datamodule = data(**taken[data]) if data is not None else None
    return LightningTask(make(), datamodule, make=make, **options)


def _taken(kind: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a constructor takes by name."""
    parameters = inspect.signature(kind).parameters
    return {key: value for key, value in arguments.items() if key in parameters}
