"""What a command says: messages and exit codes of exceptions, and lines that only the first rank writes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import typer

from lockstep import shortages
from lockstep.errors import LockstepError, Preempted, exits_are_failures, short_traceback


def is_first() -> bool:
    """Whether this process is rank 0, or no rank."""
    return os.environ.get("RANK", "0") == "0"


def tell_first(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if is_first():
        tell(text)


def tell(text: str) -> None:
    """Write a last line to stderr. Where it cannot be written (the terminal was closed), the exit code stays."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Turn exceptions into messages and exit codes.

    If a launcher started this rank, the launcher prints the message.
    """
    try:
        with exits_are_failures():
            yield
    except typer.Exit:
        raise
    except Preempted as stopped:
        from lockstep.distributed import launch

        launch.report_failure(stopped, str(stopped))
        if "RANK" not in os.environ and sys.argv[1:2] != ["train"]:
            tell("stopped; the same command begins anew")
        elif "RANK" not in os.environ:  # if a checkpoint was saved, the run has said so
            tell(f"{'' if 'saved' in str(stopped) else f'{stopped}; '}the same command goes on from there")
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as raised:
        error = shortages.explanation(raised) or raised
        known = isinstance(error, LockstepError)
        text = traceback.format_exc() if debug else str(error) if known else short_traceback(error)
        from lockstep.distributed import launch, signals

        launch.report_failure(error, text)
        if signals.LAUNCHED not in os.environ or "RANK" not in os.environ:
            rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
            tell(f"{rank}error: {text}")
        raise typer.Exit(error.exit_code if isinstance(error, LockstepError) else 1) from None
