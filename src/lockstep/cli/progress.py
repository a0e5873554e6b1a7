"""A progress bar on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBar:
    """Counts what is done. It shows nothing if `progress` is None."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self.progress, self.what = progress, what

    def begin(self, total: int | None) -> None:
        """Show the bar. `total` is the count at the end; None: it is not known."""
        if self.progress is not None:
            self.progress.start()
            self.task = self.progress.add_task(self.what, total=total)

    def advance(self, count: int = 1) -> None:
        """Add this many to the count."""
        if self.progress is not None:
            self.progress.advance(self.task, count)


@contextlib.contextmanager
def bar(what: str, *, shown: bool, console: Console | None = None) -> Iterator[ProgressBar]:
    """Yield a bar, which ends with the block.

    Args:
        what: is written before the bar.
        shown: whether there is a bar at all.
        console: where to draw. None: stderr, so that stdout may go to a file or a pipe.
    """
    if not shown:
        yield ProgressBar(None, what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console or Console(stderr=True), refresh_per_second=4, redirect_stdout=False)
    try:
        yield ProgressBar(progress, what)
    finally:
        progress.stop()
