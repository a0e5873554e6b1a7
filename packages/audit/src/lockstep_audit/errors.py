"""The error that the command reports instead of a traceback."""

from __future__ import annotations

import functools


class AuditUsageError(Exception):
    """A wrong option, file or folder.

    Args:
        what: the fault, and the value that shows it.
        where: the file or option. None if `what` says it.
        remedy: what to change.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), self.what, where=self.where, remedy=self.remedy), ()

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text
