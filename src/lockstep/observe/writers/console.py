"""The console: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping

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

from lockstep.observe.entry_line import entry_line
from lockstep.observe.writer import RunInfo, Writer


class _Console(Console):
    """rich's Console, which would end the process when the reader of a pipe has gone (`| head`). This class raises."""

    def on_broken_pipe(self) -> None:
        # Python flushes stdout at its end, and would fail there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleWriter(Writer):
    """Prints a line on the run, then entries and messages as lines. A terminal also shows a bar with the time left.

    Args:
        console: where to print; None: stdout.
    """

    name = "the console"

    def __init__(self, run: RunInfo, console: Console | None = None) -> None:
        super().__init__(run)
        self.console = console or _Console(highlight=False)
        self.bar: Progress | None = None
        self.message(
            f"{run.name}: {run.world_size} x {run.device}, global batch {run.config['batch']['global']}, "
            f"steps {run.first_step} to {run.last_step}, {run.folder}"
        )
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task("training", total=run.last_step, completed=run.first_step)
            self.bar.start()

    def record(self, entry: Mapping[str, float]) -> None:
        self.message(entry_line(entry, self.run.last_step))
        self.progress(int(entry["step"]))

    def progress(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def message(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
