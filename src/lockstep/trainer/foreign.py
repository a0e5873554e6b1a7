"""Tasks made of another library's code: the config that the code implies, and what the task learns of the training.

Importing this module loads no torch: commands read the config of a recipe without it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from lockstep.configs import config_file, registry
from lockstep.core.errors import exits_are_failures

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.foreign_task import Foreign
    from lockstep.core.parallel.world import World
    from lockstep.core.part import Part
    from lockstep.core.task import Task

T = TypeVar("T", bound="Task | None")


def is_in_file(config: RunConfig) -> bool:
    """True if the config's task is in a file of the user, which may make it of another library's code."""
    return ".py:" in str(config.task.get("kind", ""))


def load(target: str, overrides: Sequence[str] = ()) -> RunConfig:
    """`config_file.load`, with what the task's code implies, as a training has it. Commands that do not train call it.

    Raises:
        UsageError: the config is wrong, or the task cannot be made.
    """
    return settled_alone(config_file.load(target, overrides))


def settled_alone(config: RunConfig) -> RunConfig:
    """The config with what the task's code implies, in a process that does not train."""
    path, _, name = str(config.task.get("kind", "")).rpartition(":")
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    if not is_in_file(config) or re.search(rf"^class {re.escape(name)}\([^)]*Task\b", text, re.MULTILINE):
        return config  # without an import of the file, and so of torch
    with exits_are_failures():
        if inspect.isclass(registry.maker_in_file(config.task["kind"])):  # a Task that inherits from another file's
            return config
        data = config.data
        task = registry.build_task(config.task, data.train, next(iter(data.eval_sources.values())), fold=data.fold)
        return _settled(config, task)


def settle(config: RunConfig, task: Task | None, world: World) -> RunConfig:
    """The config with what the code of `task` implies. All ranks call it, and the first of each node prepares data."""
    if not _is_foreign(task):
        return config
    world.on_rank0(task.prepare_data)
    if world.size > 1:
        first_ranks = world.nodes.first_ranks  # all ranks ask together
        if world.rank and world.rank in first_ranks:
            task.prepare_data()
        world.all_sum([0.0])
    task.is_prepared = True
    return _settled(config, task)


def _settled(config: RunConfig, task: Task) -> RunConfig:
    from lockstep.core.foreign_task import with_implied

    return with_implied(config, task.implied) if _is_foreign(task) else config


def _is_foreign(task: Task | None) -> TypeGuard[Foreign]:
    from lockstep.core.foreign_task import Foreign

    return isinstance(task, Foreign)


def configured(task: T, config: RunConfig) -> T:
    """`task`, which has learned the config of its training."""
    if _is_foreign(task):
        task.configured(config)
    return task


def parts(task: Task | None) -> list[Part]:
    """The Parts that belong to the task."""
    return [task.clock] if _is_foreign(task) else []


def notes(task: Any) -> list[str]:
    """Lines for the log: what was understood of the code."""
    return [f"note: {text}" for text in dict.fromkeys(task.notes)] if _is_foreign(task) else []
