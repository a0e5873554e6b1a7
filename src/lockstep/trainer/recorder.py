"""The base of what records a training on every rank."""

from __future__ import annotations

from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.writer import Writer


class Recorder(Writer, BuiltInPart):
    """Records a training on every rank, and leaves no trace in it: a Part, and a writer on every rank.

    `close` is called at the end, also after a failure, and `end` only where the training has reached its end.
    """

    def join(self, run: Run) -> None:
        """Learn which run it is, which has not begun."""
