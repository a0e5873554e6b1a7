"""The base of what records a training on every rank."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from lockstep.core.build import Run
from lockstep.core.data.loader import MicroBatch
from lockstep.core.writer import Writer


class Recorder(Writer, abc.ABC):
    """Records a training on every rank, between its steps, and leaves no trace in it."""

    @abc.abstractmethod
    def record_steps(self, run: Run) -> Iterator[list[MicroBatch]]:
        """Pass the batches of `run` on. When the next batch is asked for, the step before it is done."""
