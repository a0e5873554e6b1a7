"""Metrics of two or more dimensions, of all sets of evaluation data together."""

from __future__ import annotations

from typing import Any

from lockstep.core.evaluation_run import Findings, Viewer, named_results
from lockstep.core.writer import Writer


class ArraysOfEvaluations(Viewer):
    """Passes the metrics of each evaluation, of all data sets together, to a writer.

    Args:
        writer: such as `MetricArrays`, with a guard.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.values: dict[str, Any] = {}

    def show(self, found: Findings) -> None:
        self.values |= named_results(found.evaluated.name, found.values)

    def end(self, step: int) -> None:
        values, self.values = self.values, {}
        self.writer.record({"step": step, **values})
