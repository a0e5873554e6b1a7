"""The console: a progress bar on a terminal, plain lines elsewhere, and in a notebook a last line that updates."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lockstep.core import debugging
from lockstep.core.errors import number_of
from lockstep.core.writer import RunInfo, Writer
from lockstep.parts import live_line
from lockstep.parts.ending import duration
from lockstep.parts.entry_line import entry_line
from lockstep.parts.live_line import LiveLine

_SILENT_S = 60.0  # an output that is not a terminal gets a progress line at least this often


class _Console(Console):
    """rich's Console would end the process when the reader of a pipe is gone (`| head`). This class raises."""

    def on_broken_pipe(self) -> None:
        # Python flushes stdout when it exits, and would fail there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleWriter(Writer):
    """Prints a line on the run, then entries and messages as lines. A terminal also shows a bar with the time left.
    Other outputs get a line on the progress, with the time left, when nothing was printed for a minute.

    The loss in the bar is that of the last entry. Of the details of evaluations, such as tables, the console prints
    only those of the last evaluation, when the training ends: train.log has all of them.

    Args:
        console: where to print; None: stdout.
    """

    name = "the console"

    def __init__(self, run: RunInfo, console: Console | None = None) -> None:
        super().__init__(run)
        self.console = console or _Console(highlight=False)
        self.bar: Progress | None = None
        self.line = LiveLine() if live_line.VARIABLE in os.environ and not self.console.is_terminal else None
        self.begun = self.printed = time.perf_counter()
        self.after_first: tuple[int, float] | None = None
        """The first step of this start whose progress was shown, and when. It took longer than the others."""
        self.loss = ""
        self.has_shown = False
        """True if an entry or a first progress has been printed."""
        self.new_details: list[str] = []
        """Those of the current evaluation."""
        self.details_at_end: list[str] = []
        """Those of the last evaluation that has ended."""
        has_virtual = run.config.get("parallel", {}).get("virtual_ranks")
        ranks = f"{run.ranks} on {run.device}" if has_virtual else f"{run.world_size} x {run.device}"
        if run.world_size > 1 and run.device == "cpu":  # by default: a single rank has a thread for each core
            ranks += f" with {number_of(torch.get_num_threads(), 'thread')} each"
        left = f"steps {run.first_step + 1} to {run.last_step}" if run.first_step < run.last_step else "no step is left"
        self.message(f"{run.name}: {ranks}, global batch {run.config['batch']['global']}, {left}, {run.folder}")
        if self.console.is_terminal and debugging.RANK not in os.environ:  # a bar would overwrite the debugger
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task("training", total=run.last_step, completed=run.first_step, loss="")
            self.bar.start()
            debugging.before_breakpoint(self.bar.stop)

    def record(self, entry: Mapping[str, float]) -> None:
        self.has_shown = True
        if any(name.startswith("eval/") for name in entry):
            self.details_at_end, self.new_details = self.new_details, []
        if "train/loss" in entry:
            self.loss = f"loss {entry['train/loss']:.4g}"
        self.message(entry_line(entry, self.run.last_step))
        self.progress(int(entry["step"]))

    def progress(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=self.loss)
            return
        now = time.perf_counter()
        seconds, at = now - self.begun, f"step {step}/{self.run.last_step}"
        if self.line is not None:
            left = seconds * (self.run.last_step - step) / max(step - self.run.first_step, 1)
            times = f"{seconds:,.0f} s, about {left:,.0f} s left"
            self.line.show("  ".join(filter(None, (at, self.loss, times))))
        elif not self.has_shown:  # the first entry may be far away
            self.message(f"{at}  {seconds:.1f} s after the start")
        elif now - self.printed >= _SILENT_S and step < self.run.last_step:
            self.message("  ".join((at, f"{duration(seconds)} after the start{self._left(step, now)}")))
        self.has_shown = True
        self.after_first = self.after_first or (step, now)

    def _left(self, step: int, now: float) -> str:
        """The time until the last step, if two steps show how long one takes."""
        first, when = self.after_first or (step, now)
        left = (now - when) / (step - first) * (self.run.last_step - step) if step > first else None
        return "" if left is None else f", about {duration(left)} left"

    def message(self, text: str) -> None:
        self.printed = time.perf_counter()
        if self.line is not None:
            self.line.above(text)
        else:
            self.console.print(text, soft_wrap=True, markup=False)

    def details(self, text: str) -> None:
        self.new_details.append(text)

    def end(self, text: str) -> None:
        self._show_details()
        self.message(text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.line is not None:
            self.line.close()
        self._show_details()

    def _show_details(self) -> None:
        texts, self.details_at_end = self.details_at_end, []
        for text in texts:
            self.message(text)
