"""The entries of the log: what they hold, and in which order writers get them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import number_of
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.log_window import LogWindow
from lockstep.core.step import StepResult, TrainState

if TYPE_CHECKING:
    from lockstep.core.writer import Writer

_PROGRESS_S = 0.25
_FIRST_OVERFLOWS = 10  # fp16 begins with a loss scale that is too large, and lowers it step by step


@dataclass
class TrainingLog:
    """Gives entries to the writers."""

    state: TrainState
    window: LogWindow
    writers: Sequence[Writer]
    parts: JoinedParts
    """Add their own figures to entries."""
    progress_shown: float = float("-inf")  # the first step is shown at once

    def __post_init__(self) -> None:
        self.latest = self.parts.results
        """The last value of everything that the writers were given."""

    def window_entry(self) -> None:
        """Write an entry of the steps since the last entry."""
        warnings = _idle_warning(self.window.results)
        entry, unreadable = self.window.entry(self.state)
        self.latest.update(entry)
        self._tell([*unreadable, *warnings])
        self._write_with(entry, "log_entry")

    def entry_of_parts(self) -> None:
        """Write an entry of what Parts have logged since the last entry, if there is something."""
        if figures := self.parts.take_logged():
            self._write(self.window.head(self.state.step) | figures)

    def progress(self) -> None:
        """Tell the writers how far the training is, if they were not told a moment ago."""
        if time.perf_counter() - self.progress_shown > _PROGRESS_S:
            self.progress_shown = time.perf_counter()
            for writer in self.writers:
                writer.progress(self.state.step)

    def evaluation_entry(self, results: dict[str, float], begun: float) -> None:
        """Write an entry of the results of an evaluation, which began at the time `begun`."""
        took = {"time/evaluation_s": round(time.perf_counter() - begun, 4)}
        self.latest.update(results)
        self._write_with(self.window.head(self.state.step) | results | took, "after_evaluation")

    def _write_with(self, entry: dict[str, float], event: str) -> None:
        """Write an entry with the figures that Parts add to it, or have logged before."""
        with self.parts.lines.after_entry():
            with self.window.excluded():
                self.parts.call(event)
            self._write(entry | self.parts.take_logged())

    def _write(self, entry: dict[str, float]) -> None:
        for writer in self.writers:
            writer.record(entry)

    def _tell(self, texts: Sequence[str]) -> None:
        for writer in self.writers:
            for text in texts:
                writer.message(text)


def _idle_warning(results: Sequence[StepResult]) -> list[str]:
    """A warning if no update of a window was applied."""
    if not results or any(result.applied for result in results):
        return []
    overflowed = sum(any(result.totals.values()) for result in results)
    if 0 < overflowed == len(results) < _FIRST_OVERFLOWS:
        return []
    causes = [f"{overflowed} gradients overflowed in fp16"] if overflowed else []
    without_units = len(results) - overflowed
    causes += [f"{number_of(without_units, 'global batch')} had no valid unit"] if without_units else []
    return [f"warning: the last {len(results)} steps changed no weight: {', '.join(causes)}"]
