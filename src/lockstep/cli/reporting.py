"""The words of a command: messages and exit codes of exceptions, and lines that only the first rank writes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from lockstep.core import caller, debugging, shortages, this_process
from lockstep.core.errors import LockstepError, Preempted, UsageError, described, exits_are_failures
from lockstep.core.parallel.launched import LAUNCHED, report_failure

FAILED, USAGE, FAULT = 1, 2, 3
"""Exit codes of all commands besides 0: it failed or shows nothing, it was called wrongly, a check found a fault.
`Preempted` adds 75 and Ctrl-C 130; docs/commands.md has the table."""


def is_first() -> bool:
    """True if this process is rank 0, or no rank."""
    return this_process.is_first()


def tell_first(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if is_first():
        tell(text)


def tell(text: str) -> None:
    """Write a last line to stderr. If it cannot be written (the terminal was closed), the exit code stays."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_file(path: Path, text: str) -> None:
    """Write a text and a line break into a file that the user has named.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        remedy = "give a place where you can write"
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from error


@contextlib.contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Turn exceptions into messages and exit codes.

    If a launcher started this rank, the launcher prints the message.
    """
    try:
        with caller.command(), exits_are_failures():
            yield
    except typer.Exit:
        raise
    except Preempted as stopped:
        report_failure(stopped, str(stopped))
        if not this_process.is_rank() and sys.argv[1:2] not in (["train"], ["sweep"], ["run"]):
            tell("stopped; the same command starts from the beginning")
        elif not this_process.is_rank():  # if a checkpoint was saved, the run has said so
            tell(f"{'' if 'saved' in str(stopped) else f'{stopped}; '}{stopped.remedy}")
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as raised:
        error = shortages.explanation(raised) or debugging.explanation(raised) or raised
        known = isinstance(error, LockstepError)
        text = traceback.format_exc() if debug else str(error) if known else described(error)
        report_failure(error, text)
        if LAUNCHED not in os.environ or not this_process.is_rank():
            rank = f"[{this_process.named()}] " if this_process.is_rank() else ""
            tell(f"{rank}error: {text}")
        raise typer.Exit(error.exit_code if isinstance(error, LockstepError) else FAILED) from None
