"""Errors that readers of several kinds raise alike."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from typing import Any

from lockstep.core.errors import DataError, LockstepError

_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")  # the end of such a text


@contextlib.contextmanager
def reading(where: object, remedy: str = "check the path and its permissions") -> Iterator[None]:
    """A block that reads a file: an OSError becomes a DataError, which names `where`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(where), remedy=remedy) from error


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """A block in which libraries in Rust write files: what they raise of the system becomes an OSError, as it is."""
    try:
        yield
    except Exception as error:
        found = _OF_SYSTEM.search(str(error))
        if isinstance(error, OSError | LockstepError) or found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def optional(
    module: str, what: str = "", *, where: str | None = None, remedy: str, kind: type[LockstepError] = DataError
) -> Any:
    """A module of a package that Lockstep does not always need.

    Args:
        what: what cannot be done without it. Empty: the message is the error of the import.
        kind: class of the error that is raised if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = what or f"{module.partition('.')[0]} cannot be imported: {error}"
        raise kind(what, where=where, remedy=remedy) from error


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
