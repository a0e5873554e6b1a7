"""What a person sees: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys

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

from lockstep.observe.text_log import line


class _Console(Console):
    """rich's, but a pipe whose reader has gone (`| head`) is an error like others; rich would end the process."""

    def on_broken_pipe(self) -> None:
        # Python would stumble at its end over what is left to be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleWriter:
    """Prints entries as lines; on a terminal under them a bar with the time left."""

    def __init__(self, total: int, start: int = 0, console: Console | None = None) -> None:
        self.total = total
        self.console = console or _Console(highlight=False)
        self.bar: Progress | None = None
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
            self.task = self.bar.add_task("training", total=total, completed=start)
            self.bar.start()

    def record(self, entry: dict[str, float]) -> None:
        self.console.print(line(entry, self.total), soft_wrap=True, markup=False)
        self.progress(int(entry["step"]))

    def progress(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def message(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
