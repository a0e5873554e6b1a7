"""The entries of the log: what they hold, and in which order writers get them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.joined_parts import JoinedParts
from lockstep.core.log_window import LogWindow
from lockstep.core.step import StepResult, TrainState
from lockstep.parts.memory import MemoryMonitor

if TYPE_CHECKING:
    from lockstep.core.writer import Writer

_PROGRESS_S = 0.25
_FIRST_OVERFLOWS = 10  # fp16 begins with a loss scale that is too large, and lowers it step by step


@dataclass
class TrainingLog:
    """Gives entries to the writers."""

    state: TrainState
    window: LogWindow
    memory: MemoryMonitor
    writers: Sequence[Writer]
    parts: JoinedParts
    """Add figures of their own to entries."""
    memory_tables: bool
    """Whether tables of the memory are shown."""
    progress_shown: float = float("-inf")  # the first step is shown at once

    def __post_init__(self) -> None:
        self.latest = self.parts.results
        """The last value of everything that the writers were given."""

    def window_entry(self) -> None:
        """Write an entry of the steps since the last entry."""
        warnings = _idle_warning(self.window.results)
        entry, unreadable = self.window.entry(self.state)
        figures, lines = self.memory.report()
        self.latest.update(entry | figures)
        entry |= figures | self._of_parts("log_entry")
        self._write(entry, before=[*unreadable, *warnings], after=self._shown(lines))

    def _of_parts(self, event: str) -> dict[str, float]:
        """The figures that Parts add to the entry of an event, and have logged before."""
        self.parts.call(event)
        return self.parts.take_logged()

    def entry_of_parts(self) -> None:
        """Write an entry of what Parts have logged since the last entry, if there is something."""
        if figures := self.parts.take_logged():
            elapsed = round(time.perf_counter() - self.window.started, 3)
            self._write(self._head(elapsed) | figures, before=[], after=[])

    def _head(self, elapsed_s: float) -> dict[str, float]:
        step = self.state.step
        return {"step": step, "epoch": round(step / self.window.steps_per_epoch, 4), "time_s": elapsed_s}

    def _shown(self, table: list[str]) -> list[str]:
        return table if self.memory_tables else []

    def memory_line(self) -> None:
        """Say at the end how much memory the ranks held. All ranks call it."""
        line = self.memory.line()
        for writer in self.writers:
            writer.message(line)

    def progress(self) -> None:
        """Tell the writers how far the training is, if they were not told a moment ago."""
        if time.perf_counter() - self.progress_shown > _PROGRESS_S:
            self.progress_shown = time.perf_counter()
            for writer in self.writers:
                writer.progress(self.state.step)

    def evaluation_entry(self, results: dict[str, float], begun: float) -> None:
        """Write an entry of the results of an evaluation, which began at the time `begun`."""
        now = time.perf_counter()
        elapsed = round(now - self.window.started, 3)
        figures, lines = self.memory.report(evaluated=True)
        figures |= self.memory.highest_of("evaluation")
        took = {"time/evaluation_s": round(now - begun, 4)}
        self.latest.update(results | figures)
        figures |= self._of_parts("after_evaluation")
        self._write(self._head(elapsed) | results | took | figures, before=[], after=self._shown(lines))

    def _write(self, entry: dict[str, float], *, before: Sequence[str], after: Sequence[str]) -> None:
        for writer in self.writers:
            for text in before:
                writer.message(text)
            writer.record(entry)
            for text in after:
                writer.message(text)


def _idle_warning(results: Sequence[StepResult]) -> list[str]:
    """A warning where no update of a window was applied."""
    if not results or any(result.applied for result in results):
        return []
    overflowed = sum(any(result.totals.values()) for result in results)
    if 0 < overflowed == len(results) < _FIRST_OVERFLOWS:
        return []
    causes = [f"{overflowed} gradients overflowed in fp16"] if overflowed else []
    without_units = len(results) - overflowed
    causes += [f"{without_units} global batches had no valid unit"] if without_units else []
    return [f"warning: the last {len(results)} steps changed no weight: {', '.join(causes)}"]
