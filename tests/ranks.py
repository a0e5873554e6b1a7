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
from pathlib import Path
from typing import Any

from lockstep.verify.ranks import Ended, Ranks

_folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
_ranks = Ranks(Path(_folder.name, "ranks.log"))


class RankFailed(AssertionError):
    pass


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
    answers = _ranks.run(world, _answer, function, *arguments, timeout_s=timeout_s)
    answers = [(f"the process ended with exit code {one.exit_code}", "") if isinstance(one, Ended) else one for one in answers]
    failed = {rank: answer for rank, answer in enumerate(answers) if len(answer) == 2}
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {text}\n{trace}" for rank, (text, trace) in failed.items()))
    return [answer[0] for answer in answers]


def _answer(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What it returns, in a tuple of one; or an error's text and traceback."""
    warnings.simplefilter("error")
    try:
        return (function(*arguments),)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", traceback.format_exc()


def close() -> None:
    _ranks.close()
    _folder.cleanup()
