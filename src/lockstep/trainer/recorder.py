"""The base of what records a training on every rank."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.writer import Writer


class Recorder(BuiltInPart):
    """Records a training on every rank, and leaves no trace in it: a Part that gets the entries of the log, too."""

    def join(self, run: Run) -> None:
        """Learn which run it is, before it begins."""

    def record(self, entry: Mapping[str, float]) -> None:
        """Take an entry of the log; see `Writer.record`."""

    def close(self) -> None:
        """The training has ended, or has failed."""


class Entries(Writer):
    """Gives a recorder the entries of the log."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def record(self, entry: Mapping[str, float]) -> None:
        self.recorder.record(entry)

    def close(self) -> None:
        self.recorder.close()
