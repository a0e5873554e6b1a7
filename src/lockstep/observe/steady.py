"""A log that cannot be written is told and does without: it must not end a training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Steady:
    """Passes everything on to another watcher; says once when that cannot write (disk full), and lets the entry go."""

    def __init__(self, watcher: Any) -> None:
        self.watcher, self.told = watcher, False

    def record(self, entry: dict[str, float]) -> None:
        self._try(self.watcher.record, entry)

    def progress(self, step: int) -> None:
        self._try(self.watcher.progress, step)

    def message(self, text: str) -> None:
        self._try(self.watcher.message, text)

    def close(self) -> None:
        self._try(self.watcher.close)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            if not self.told:
                print(f"warning: {type(self.watcher).__name__} cannot be written: {error}; training goes on", file=sys.stderr)
            self.told = True
