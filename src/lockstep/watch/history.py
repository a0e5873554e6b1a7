"""Losses and norms of the ranks at the checks. What leaves its usual range is reported, but never ends a training."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

_CHECKS = 16
"""The number of checks that are remembered."""
_LEAST = 8
"""The numbers that are needed before one can be unusual."""
_DEVIATIONS = 12.0
_FACTOR = 8.0
"""A number is unusual if it is this many times larger or smaller than the median, and this many deviations away."""


class FigureHistory:
    """One figure of all ranks at the last checks, such as the norm of a gradient."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logs: deque[float] = deque()

    def add(self, values: Sequence[float]) -> str:
        """Add the figure of each rank. Returns a warning if one leaves its usual range; else an empty text.

        Logarithms are compared, by their median and the median of their distances from it (MAD), which a few outliers
        do not affect. A number that is not finite, or not above 0, has no logarithm: the log's own check reports the
        first.
        """
        known = {rank: math.log(value) for rank, value in enumerate(values) if 0 < value < math.inf}
        told = self._judged(known, values) if len(self.logs) >= _LEAST else ""
        self.logs.extend(known.values())
        while len(self.logs) > _CHECKS * max(1, len(values)):
            self.logs.popleft()
        return told

    def _judged(self, known: dict[int, float], values: Sequence[float]) -> str:
        middle = statistics.median(self.logs)
        spread = 1.4826 * statistics.median(abs(one - middle) for one in self.logs)
        away = {rank: abs(one - middle) for rank, one in known.items()}
        rank = max(away, key=away.__getitem__, default=None)
        if rank is None or away[rank] <= max(math.log(_FACTOR), _DEVIATIONS * spread):
            return ""
        usual = f"{math.exp(middle - spread):.4g} to {math.exp(middle + spread):.4g}"
        return f"the {self.name} of rank {rank} is {values[rank]:.4g}; usually it was {usual}"
