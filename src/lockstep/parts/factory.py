"""From the names in `log.writers` to open writers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lockstep.core.writer import RunInfo, Writer
from lockstep.parts.own_process import OwnProcess
from lockstep.parts.write_guard import WriteGuard, guard_writers
from lockstep.parts.writer_kinds import find_writer

_CONSOLE = "console"


def open_writers(run: RunInfo, names: Sequence[str], *, quiet: bool) -> list[WriteGuard]:
    """Open the writers of these names, and the console unless `quiet`. None of them can fail afterwards.

    Raises:
        UsageError: see `find_writer`.
    """
    makers: dict[str, Callable[[], Writer]] = {}
    entries: dict[str, str] = {}
    for name in dict.fromkeys([*names, *([] if quiet else [_CONSOLE])]):
        kind = find_writer(name)
        label = kind.name or kind.__name__
        label = f"{label} of {name}" if label in makers else label
        makers[label] = partial(OwnProcess, kind, name, run) if kind.in_own_process else partial(kind, run)
        if name in names:
            entries[label] = f"{name} (class {kind.__name__})"
    return guard_writers(makers, entries)
