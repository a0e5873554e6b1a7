"""Results of the evaluations of a run, which decide when it ends and how fast it learns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def result_name(name: str) -> str:
    """`name`, if it is the name of a result of an evaluation. Raises ValueError, for pydantic."""
    if not re.fullmatch(r"eval/\S+", name):
        raise ValueError(f"{name!r} is not a result of an evaluation; write `eval/NAME`, such as `eval/loss`")
    return name


@dataclass
class MetricHistory:
    """One result of all evaluations since the run began. All ranks have the same results, and so decide the same."""

    metric: str
    """Name of the result, such as `eval/loss`."""
    results: list[tuple[int, float]] = field(default_factory=list)
    """Step and result of each evaluation, in their order."""

    @property
    def values(self) -> list[float]:
        """The results in their order."""
        return [value for _, value in self.results]

    def add(self, step: int, results: Mapping[str, float]) -> None:
        """Add the results of an evaluation. An evaluation that is made again after a restart counts once."""
        self.results = [one for one in self.results if one[0] < step]
        self.results.append((step, float(results.get(self.metric, math.nan))))

    def restore(self, results: Sequence[tuple[int, float]], metric: str | None, key: str) -> list[str]:
        """Take the results that a checkpoint holds, if they are of the same metric.

        Args:
            results: step and result of each evaluation.
            metric: the metric of the results. None: there are no results.
            key: the key of the config, for messages.

        Returns:
            messages for the log.
        """
        if not results:
            return []
        if metric != self.metric:
            return [f"{key} counts from here on: the earlier evaluations were of {metric}"]
        self.results = [(step, value) for step, value in results]
        return []
