"""The words of a command: messages and exit codes of exceptions, and lines that only the first rank writes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from lockstep.core import caller, debugging, shortages
from lockstep.core.errors import LockstepError, Preempted, UsageError, described, exits_are_failures
from lockstep.core.parallel.launched import LAUNCHED, report_failure

_MARKED = 1 << 16  # bytes of a file in which its mark is looked for


def is_first() -> bool:
    """True if this process is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def tell_first(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if is_first():
        tell(text)


def tell(text: str) -> None:
    """Write a last line to stderr. Where it cannot be written (the terminal was closed), the exit code stays."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def check_folder(path: Path | None) -> None:
    """Before anything is computed, check that a file can be written: its folder exists.

    Raises:
        UsageError: it does not, or the path is a folder itself.
    """
    if path is not None and path.is_dir():
        raise UsageError("is a folder", where=str(path), remedy="give a file")
    if path is not None and not path.parent.is_dir():
        remedy = f"make {path.parent}, or give another place"
        raise UsageError("cannot be written: there is no such folder", where=str(path), remedy=remedy)


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
        if "RANK" not in os.environ and sys.argv[1:2] not in (["train"], ["sweep"]):
            tell("stopped; the same command begins anew")
        elif "RANK" not in os.environ:  # if a checkpoint was saved, the run has said so
            tell(f"{'' if 'saved' in str(stopped) else f'{stopped}; '}the same command goes on from there")
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as raised:
        error = shortages.explanation(raised) or debugging.explanation(raised) or raised
        known = isinstance(error, LockstepError)
        text = traceback.format_exc() if debug else str(error) if known else described(error)
        report_failure(error, text)
        if LAUNCHED not in os.environ or "RANK" not in os.environ:
            rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
            tell(f"{rank}error: {text}")
        raise typer.Exit(error.exit_code if isinstance(error, LockstepError) else 1) from None


def check_replaceable(path: Path, mark: str) -> None:
    """Before anything is computed, check that there is no file at `path`, or an earlier one of the same command.

    Args:
        mark: a part of all files that the command writes, in their first 64 KiB.

    Raises:
        UsageError: another file is there; names it.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        if mark.encode() in file.read(_MARKED):
            return
    raise UsageError(
        "exists, is none of this command's files, and is not overwritten",
        where=str(path),
        remedy="move the file, or give another place with --out or --run-dir",
    )
