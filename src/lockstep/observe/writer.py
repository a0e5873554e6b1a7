"""Logs behind a guard: what goes wrong with one of them is told, and ends no training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Guard:
    """Calls what writes a log. What fails is let go; the first time it is told on stderr, and with `tell`.

    Args:
        name: of the log, for people.
        tell: writes into other logs.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self.tell, self.failed = name, tell, False

    def __call__(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if self.failed:
                return
            self.failed = True
            known = error.strerror if isinstance(error, OSError) else None
            why = known or f"{type(error).__name__}: {error}"
            text = f"warning: {self.name} cannot be written: {why}; training goes on"
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr, flush=True)
            self.tell(text)


class IgnoreWriteErrors:
    """Passes everything on to the watcher that `make` opens, behind a `Guard`. What cannot be opened is tried again."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.make = make
        self.watcher: Any = None
        self.others: list[IgnoreWriteErrors] = []
        self.guard = Guard(name, self._tell_others)

    def record(self, entry: dict[str, float]) -> None:
        self.guard(lambda: self._opened().record(entry))

    def progress(self, step: int) -> None:
        self.guard(lambda: self._opened().progress(step))

    def message(self, text: str) -> None:
        self.guard(lambda: self._opened().message(text))

    def open(self) -> None:
        """Without writing anything."""
        self.guard(self._opened)

    def close(self) -> None:
        if self.watcher is not None:
            self.guard(self.watcher.close)

    def _opened(self) -> Any:
        if self.watcher is None:
            self.watcher = self.make()
            if note := getattr(self.watcher, "note", ""):
                self._tell_others(note)
        return self.watcher

    def _tell_others(self, text: str) -> None:
        for other in self.others:
            other.message(text)


def together(logs: Mapping[str, Callable[[], Any]]) -> list[IgnoreWriteErrors]:
    """Open `logs`, by name. When one of them fails, the others tell of it too."""
    found = [IgnoreWriteErrors(name, make) for name, make in logs.items()]
    for one in found:
        one.others = [other for other in found if other is not one]
    for one in found:
        one.open()
    return found
