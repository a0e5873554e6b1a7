"""What the benchmarks share: rounds in which variants alternate, medians with their range, and tables.

Other processes of a machine disturb single figures. So the compared variants alternate in each round, ratios are taken
within a round, and the result is the median over the rounds, shown with the minimum and the maximum.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def take_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: int = 0) -> dict[str, list[Any]]:
    """Call each variant once in each round. Every second round runs them in the opposite order.

    Args:
        ways: functions by name.
        rounds: the number of rounds that count.
        warm_up: the number of earlier rounds, whose results are dropped.

    Returns:
        by name, the variant's return value in each round that counts.
    """
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name in reversed(ways) if number % 2 else ways:
            result = ways[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, with the minimum and the maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def header(*names: str) -> None:
    """The header of a Markdown table. All columns except the first contain numbers, aligned right."""
    print(f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}", flush=True)


def row(*cells: object) -> None:
    """A row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def made_steps(run: Any, batches: Iterable[Any], *, stop: int) -> dict[str, float]:
    """Make steps of a run in Lockstep's loop, with its own Parts and the writers of the run, until `stop`.

    Args:
        run: a `lockstep.core.build.Run`.
        batches: its micro-batches, step by step.
    """
    from lockstep.core import loop
    from lockstep.core.parallel.signals import StopFlag
    from lockstep.core.parallel.stop_consensus import StopConsensus
    from lockstep.core.step import driven
    from lockstep.core.training_run import join_parts
    from lockstep.parts import built_in

    steps = loop.steps(
        run.state,
        batches,
        plan=run.plan,
        stop=stop,
        intervals=run.intervals,
        parts=join_parts(run, built_in.parts(run)),
        consensus=StopConsensus(run.world, StopFlag()),
        writers=run.writers,
    )
    return driven(steps, lambda asked: asked.made_by(run.update, run.state))
