"""Guards that turn errors of writers into warnings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.core.writer import Writer


def reason_of(error: Exception) -> str:
    """An error as the reason in a warning."""
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"


class Guard:
    """Turns the first error of some calls into one warning. Further errors are dropped.

    Args:
        name: what cannot be written, for the warning.
        tell: shows the warning to the writers. The warning also goes to stderr.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell
        self.has_failed = False

    def attempt(self, call: Callable[[], object]) -> None:
        """Call `call`."""
        try:
            call()
        except Exception as error:
            if self.has_failed:
                return
            self.has_failed = True
            text = self.warning(reason_of(error))
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr, flush=True)
            self.tell(text)

    def warning(self, reason: str) -> str:
        """The text of the warning."""
        return f"warning: {self.name} cannot be written: {reason}; training continues"


class WriteGuard(Guard, Writer):
    """Passes every call on to one writer, and turns its first error into one warning. Further errors are dropped.

    Args:
        name: the writer's name in the warning.
        make: makes the writer. While it raises, it is called again with every record, message and progress.
        tell: shows the warning, and the writer's `note`, to the other writers. The warning also goes to stderr.
        entry: the entry of `log.writers` that names the writer, and the class, for the warning that the writer cannot
            be made. Empty if no entry names the writer.
    """

    def __init__(self, name: str, make: Callable[[], Writer], tell: Callable[[str], None], *, entry: str = "") -> None:
        super().__init__(name, tell)
        self.make, self.entry = make, entry
        self.writer: Writer | None = None

    def attempt(self, call: Callable[[], object]) -> None:
        """Call `call`, and show a note that came up."""
        super().attempt(call)
        if self.writer is not None and self.writer.note:
            note, self.writer.note = self.writer.note, ""
            self.tell(note)

    def warning(self, reason: str) -> str:
        """The text of the warning. A writer that cannot be made is named by its entry."""
        if not self.entry or self.writer:
            return super().warning(reason)
        remedy = f"remove the cause, or leave {self.entry} out of log.writers"
        return f"warning: {self.name} cannot be opened: {reason}; training continues\n  remedy: {remedy}"

    def record(self, entry: Mapping[str, float]) -> None:
        self.attempt(lambda: self._opened().record(entry))

    def progress(self, step: int) -> None:
        self.attempt(lambda: self._opened().progress(step))

    def message(self, text: str) -> None:
        self.attempt(lambda: self._opened().message(text))

    def details(self, text: str) -> None:
        self.attempt(lambda: self._opened().details(text))

    def end(self, text: str) -> None:
        self.attempt(lambda: self._opened().end(text))

    def text(self, name: str, text: str, step: int) -> None:
        self.attempt(lambda: self._opened().text(name, text, step))

    def artifacts(self, paths: Sequence[Path]) -> None:
        self.attempt(lambda: self._opened().artifacts(paths))

    def picture(self, name: str, picture: Any, step: int) -> None:
        self.attempt(lambda: self._opened().picture(name, picture, step))

    def graph(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Some models cannot be traced. That does not affect what else the writer writes.
        apart = Guard(f"the graph of the model in {self.name}", self.tell)
        apart.attempt(lambda: self._opened().graph(model, args, kwargs))

    def open(self) -> None:
        """Create the writer now, not with the first record."""
        self.attempt(self._opened)

    def close(self) -> None:
        if self.writer is not None:
            self.attempt(self.writer.close)
        self.has_failed = True  # a message about another writer needs no warning from this one

    def _opened(self) -> Writer:
        if self.writer is None:
            self.writer = self.make()
        return self.writer


def guard_writers(
    makers: Mapping[str, Callable[[], Writer]], entries: Mapping[str, str] = MappingProxyType({})
) -> list[WriteGuard]:
    """Open writers, each with a guard. When one of them fails, the others show the warning.

    Args:
        makers: what makes each writer, by the name for warnings.
        entries: the entry of `log.writers` and the class of each writer, by the same names.
    """
    guards: list[WriteGuard] = []

    def tell_others(failed: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            for guard in guards:
                if guard.name != failed:
                    guard.message(text)

        return tell

    for name, make in makers.items():
        guards.append(WriteGuard(name, make, tell_others(name), entry=entries.get(name, "")))
    for guard in guards:
        guard.open()
    return guards
