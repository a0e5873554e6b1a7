"""Tasks made of another library's code: the config that the code implies, and what the task learns of the training."""

from __future__ import annotations

from typing import Any, TypeVar

from lockstep.adapters.foreign import Foreign, with_implied
from lockstep.core.config.sections import RunConfig
from lockstep.core.parallel.world import World
from lockstep.core.part import Part
from lockstep.core.task import Task

T = TypeVar("T", bound=Task | None)


def is_in_file(config: RunConfig) -> bool:
    """True if the config's task is in a file of the user, which may make it of another library's code."""
    return ".py:" in str(config.task.get("kind", ""))


def settled_alone(config: RunConfig, task: Task) -> RunConfig:
    """The config with what the code of `task` implies, in a process that does not train."""
    return with_implied(config, task.implied) if isinstance(task, Foreign) else config


def settle(config: RunConfig, task: Task | None, world: World) -> RunConfig:
    """The config with what the code of `task` implies. All ranks call it, and the first of each node prepares data."""
    if not isinstance(task, Foreign):
        return config
    world.on_rank0(task.prepare_data)
    if world.size > 1:
        first_ranks = world.nodes.first_ranks  # all ranks ask together
        if world.rank and world.rank in first_ranks:
            task.prepare_data()
        world.all_sum([0.0])
    task.is_prepared = True
    return with_implied(config, task.implied)


def configured(task: T, config: RunConfig) -> T:
    """`task`, which has learned the config of its training."""
    if isinstance(task, Foreign):
        task.configured(config)
    return task


def parts(task: Task | None) -> list[Part]:
    """The Parts that belong to the task."""
    return [task.clock] if isinstance(task, Foreign) else []


def notes(task: Any) -> list[str]:
    """Lines for the log: what was understood of the code."""
    return [f"note: {text}" for text in dict.fromkeys(task.notes)] if isinstance(task, Foreign) else []
