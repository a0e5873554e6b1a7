"""Warm ranks for the whole suite: fresh processes (not forks) that have torch imported and wait for work.

`run_ranks(world, function, *arguments)` calls `function(*arguments)` in `world` processes whose environment describes
a world as torchrun would, and returns the results in rank order. `function` must be importable (top level of a module).
A failure on any rank is raised here, with that rank's traceback; ranks that still run after `timeout_s` are killed.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.verify.workers import WorkerEnded, Workers

_folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
_ranks = Workers(Path(_folder.name, "ranks.log"))


class RankFailed(AssertionError):
    pass


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    answers = _ranks.run(world, _answer, function, *arguments, timeout_s=timeout_s)
    failed = {
        rank: str(one) if isinstance(one, WorkerEnded) else one.error
        for rank, one in enumerate(answers)
        if isinstance(one, WorkerEnded) or one.error
    }
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))
    return [answer.value for answer in answers]


@dataclass
class Answer:
    """What a function returned on a rank, or the text and the traceback of its error."""

    value: Any = None
    error: str = ""


def _answer(function: Callable[..., Any], *arguments: Any) -> Answer:
    warnings.simplefilter("error")
    try:
        return Answer(function(*arguments))
    except BaseException as error:
        return Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def close() -> None:
    _ranks.close()
    _folder.cleanup()
