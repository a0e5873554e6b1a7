"""The rank that the others wait for: from the times that each rank needs before gradients are exchanged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lockstep.core.parallel.nodes import Nodes

_SLOW = 1.3  # a rank is late if it takes more than 1.3 times as long as a typical rank,
_SHARE = 0.1  # and if this is more than a tenth of a step,
_LEAST_S = 0.005  # and more than the noise of short steps
_LEAST_STEPS = 5  # a judgement needs this many steps
_MOST = 6  # messages about the same rank

COMPUTES, WAITS = "computes", "waits for data"


class Health:
    """Names the ranks that all other ranks wait for: once, and again when this changes.

    Gradients are exchanged when the last rank has its own. After that, all ranks have taken equally long. So the times
    before the exchange are compared: the wait for a step's data, and the forward passes (with all but the last backward
    pass). A rank is named after it was late twice in a row, in intervals of 5 steps or more.

    Args:
        nodes: the nodes of the ranks, for messages.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.named: dict[int, str] = {}
        """The ranks that are late, as reported, and what they do in this time."""
        self._late: dict[int, str] = {}
        self._told = [0] * len(nodes.keys)
        self._begin()

    def _begin(self) -> None:
        size = len(self.nodes.keys)
        self.steps, self.step_s = 0, 0.0
        self.compute_s, self.wait_s = [0.0] * size, [0.0] * size

    def look(self, compute_s: Sequence[float], wait_s: Sequence[float], *, steps: int, total_s: float) -> list[str]:
        """Judge the steps since the last log entry.

        Args:
            compute_s: by rank, seconds of computing before gradients were exchanged, in all these steps.
            wait_s: by rank, seconds in which the device was idle because its data had not arrived.
            steps: number of these steps.
            total_s: seconds that they took.

        Returns:
            messages for the log; the same on every rank.
        """
        self.steps, self.step_s = self.steps + steps, self.step_s + total_s
        self.compute_s = [before + more for before, more in zip(self.compute_s, compute_s, strict=True)]
        self.wait_s = [before + more for before, more in zip(self.wait_s, wait_s, strict=True)]
        if self.steps < _LEAST_STEPS:
            return []
        late, before = self._late_ranks(), self._late
        confirmed = {rank: cause for rank, cause in late.items() if before.get(rank) == cause}
        changed = {rank: cause for rank, cause in confirmed.items() if self.named.get(rank) != cause}
        recovered = [rank for rank in self.named if rank not in late and rank not in before]
        messages = [self._warning(cause, changed) for cause in (COMPUTES, WAITS) if cause in changed.values()]
        messages += [f"{self.nodes.describe(recovered)}: no longer late"] if recovered else []
        if not any(self._told[rank] < _MOST for rank in (*changed, *recovered)):
            messages = []  # a rank that is occasionally late
        for rank in (*changed, *recovered):
            self._told[rank] += 1
        self.named |= changed
        for rank in recovered:
            del self.named[rank]
        self._late = late
        self._begin()
        return messages

    def _late_ranks(self) -> dict[int, str]:
        """What the late ranks do while the others wait for them."""
        times = [compute + wait for compute, wait in zip(self.compute_s, self.wait_s, strict=True)]
        typical = statistics.median_low(times)
        least = max(_SHARE * self.step_s, _LEAST_S * self.steps)
        late = [rank for rank, time in enumerate(times) if time > _SLOW * typical and time - typical > least]
        compute, wait = statistics.median_low(self.compute_s), statistics.median_low(self.wait_s)
        return {
            rank: COMPUTES if self.compute_s[rank] - compute >= self.wait_s[rank] - wait else WAITS for rank in late
        }

    def _warning(self, cause: str, changed: dict[int, str]) -> str:
        ranks = [rank for rank, found in changed.items() if found == cause]
        by_rank = self.compute_s if cause == COMPUTES else self.wait_s
        slowest, typical = max(by_rank[rank] for rank in ranks), statistics.median_low(by_rank)
        times = (
            f"{1000 * slowest / self.steps:,.0f} ms in each step, a typical rank {1000 * typical / self.steps:,.0f} ms"
        )
        who, verb = self.nodes.describe(ranks), "s" if len(ranks) == 1 else ""
        if cause == COMPUTES:
            what = f"compute{verb} for {times}, before gradients are exchanged: all ranks wait for it. Check the "
            what += "clock and temperature of the device and other processes there, or split the samples more evenly"
        else:
            what = f"wait{verb} for data for {times}: all ranks wait for it. Check the storage and the CPU load "
            what += "there, or raise data.workers"
        return f"warning: {who} {what}"


def figures(compute_s: Sequence[float], wait_s: Sequence[float], *, steps: int, shown: int) -> dict[str, float]:
    """The times of the ranks for the log, in milliseconds per step: the largest, and those of each rank.

    Args:
        shown: with more ranks, only the largest time is shown.
    """
    found: dict[str, float] = {}
    for name, seconds in (("compute", compute_s), ("data_wait", wait_s)):
        by_rank = [float(f"{1000 * value / max(steps, 1):.4g}") for value in seconds]
        found[f"health/{name}_ms"] = max(by_rank)
        if len(by_rank) <= shown:
            found |= {f"health/{name}_ms/rank{rank}": value for rank, value in enumerate(by_rank)}
    times = [compute + wait for compute, wait in zip(compute_s, wait_s, strict=True)]
    found["health/slowest_rank"] = times.index(max(times))
    return found
