"""The place where a run lets others look for faults, before the first step and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.core.data.loader import MicroBatch
from lockstep.core.run_data import EvaluationData


class Checks:
    """Looks for faults of the task, its data and its model. This class finds none.

    All ranks call each method at the same point. Where a run cannot go on, a method raises a `LockstepError`.
    """

    def before_first_step(self, evaluated: Sequence[EvaluationData]) -> list[str]:
        """Before the first step of this start, after the state was loaded.

        Args:
            evaluated: the sets of evaluation data. Empty: nothing is evaluated.

        Returns:
            messages for the log.
        """
        return []

    def watched(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The batches of the training. When the next batch is asked for, the step before it is done."""
        return batches

    def before_save(self) -> None:
        """Before each save, after the buffers of all ranks were made the same."""

    def results(self, names: Sequence[str]) -> None:
        """After an evaluation that belongs to a checkpoint, with the names of its results."""
