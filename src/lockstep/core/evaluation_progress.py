"""Lines on the progress of an evaluation, for people who read a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.core.data.order import EvaluationPlan

_EVERY_S = 10.0


class EvaluationProgress:
    """Says every few seconds how far an evaluation is. A short evaluation says nothing.

    Args:
        tell: takes a line.
        ranks: ranks that share the samples.
        name: of the evaluation data, if there are several.
    """

    def __init__(self, tell: Callable[[str], None], plan: EvaluationPlan, ranks: int, name: str = "") -> None:
        self.tell, self.ranks, self.name = tell, ranks, name
        self.begun = self.told = time.perf_counter()
        self.plan, self.done = plan, 0

    def tick(self) -> None:
        """Count a micro-batch of this rank. The other ranks have done as many."""
        self.done += 1
        now, samples = time.perf_counter(), self.done * self.plan.micro_batch * self.ranks
        if now - self.told >= _EVERY_S and samples < self.plan.count:
            self.told = now
            name = f" {self.name}" if self.name else ""
            self.tell(f"evaluating{name}: {samples:,} of {self.plan.count:,} samples after {now - self.begun:,.0f} s")
