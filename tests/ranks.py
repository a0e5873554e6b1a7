"""Warm ranks for the whole suite: processes that have torch imported and wait for work.

`run_ranks(world, function, *arguments)` calls `function(*arguments)` in `world` processes, whose environment describes
a world as torchrun would, and returns the results in rank order. `function` must be importable: it stands at the top
level of a module. If a rank fails, `run_ranks` raises an error with the traceback of that rank.

The processes are started once and stay. A call costs about 20 ms, so a test may make as many calls as it has cases.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch import warm_process
from lockstep.trainer import local_ranks
from lockstep_lab.verify.workers import WorkerEnded, Workers
from tests.processes import HANG_S

if multiprocessing.parent_process() is None:  # ranks import this module too, and need no warm process of their own
    warm_process.start([*local_ranks.MODULES, "torchmetrics", "lockstep_lab.verify.worker_functions"])
_folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
_ranks = Workers(Path(_folder.name, "ranks.log"))
_with_device = Workers(Path(_folder.name, "with-device.log"))


class RankFailed(AssertionError):
    """Names the ranks that failed, each with its traceback."""


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S) -> list[Any]:
    """What `function(*arguments)` returned on each rank.

    Raises:
        RankFailed: a rank raised, its process ended, or it gave no answer within `timeout_s`.
    """
    return _values(_ranks.run(world, _answer, function, *arguments, timeout_s=timeout_s))


def run_on_python_device(function: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S) -> Any:
    """What `function(device, *arguments)` returned in a process that has the device of `tests/python_device.py`.

    Raises:
        RankFailed: as `run_ranks`.
    """
    return run_on_python_devices(1, function, *arguments, timeout_s=timeout_s)[0]


def run_on_python_devices(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S, may_end: bool = False
) -> list[Any]:
    """What `function(device, *arguments)` returned on each rank, each with a device of `tests/python_device.py`.

    Args:
        may_end: whether a process may end instead. The result of its rank is then a `WorkerEnded`.

    Raises:
        RankFailed: as `run_ranks`.
    """
    answers = _with_device.run(world, _answer, _on_device, function, *arguments, timeout_s=timeout_s)
    return [a if may_end and isinstance(a, WorkerEnded) else _values([a])[0] for a in answers]


def _on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    from tests import python_device

    return function(python_device.install(), *arguments)


def _values(answers: list[Any]) -> list[Any]:
    failed = {
        rank: str(answer) if isinstance(answer, WorkerEnded) else answer.error
        for rank, answer in enumerate(answers)
        if isinstance(answer, WorkerEnded) or answer.error
    }
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))
    return [answer.value for answer in answers]


@dataclass
class Answer:
    """The answer of a rank."""

    value: Any = None
    """What the function returned."""
    error: str = ""
    """The text and the traceback of the error that it raised."""


def _answer(function: Callable[..., Any], *arguments: Any) -> Answer:
    with warnings.catch_warnings():  # the same processes also run trainings of `verify`, whose warnings are none
        warnings.simplefilter("error")
        try:
            return Answer(function(*arguments))
        except BaseException as error:
            return Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def close() -> None:
    _ranks.close()
    _with_device.close()
    _folder.cleanup()
