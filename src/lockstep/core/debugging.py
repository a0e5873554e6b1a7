"""Python's debugger in a rank: its terminal, and who waits for it.

A process that the launcher starts has no terminal, and pdb ends such a process at once. So one rank is named, and gets
the launcher's terminal. Breakpoints of the other ranks do nothing: these ranks wait for the named rank at their next
collective. The watchdog does not end a rank whose main thread is in a debugger, and so no rank ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from lockstep.core import this_process
from lockstep.core.errors import LockstepError, UsageError

RANK = "LOCKSTEP_DEBUG_RANK"
"""Environment variable: the rank whose breakpoints work."""
TERMINAL = "LOCKSTEP_DEBUG_TERMINAL"
"""Environment variable: the path of the terminal of this rank."""
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/cmd.py")  # also those of pdb's descendants, such as ipdb and pudb


def offer_terminal(nproc: int) -> None:
    """In the launcher, before it starts `nproc` ranks: name its terminal to the rank that `RANK` names.

    Raises:
        UsageError: there is no such rank, or this process has no terminal.
    """
    rank = os.environ[RANK]
    if not rank.isdecimal() or int(rank) >= nproc:
        remedy = f"use a rank from 0 to {nproc - 1}"
        raise UsageError(f"there is no rank {rank}", where=f"--debug-rank ({RANK})", remedy=remedy)
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(
            "a debugger needs a terminal, and the input of this command is not one",
            where=f"--debug-rank ({RANK})",
            remedy="run the command in a terminal, without input from a file or a pipe",
        )
    os.environ[TERMINAL] = os.ttyname(sys.stdin.fileno())


def attach() -> None:
    """In a rank, before it does anything: take the terminal, or switch off breakpoints, as `RANK` says."""
    if this_process.is_rank() and str(this_process.rank()) == os.environ[RANK]:
        terminal = os.open(os.environ[TERMINAL], os.O_RDWR | os.O_NOCTTY)
        os.dup2(terminal, 0)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)
        return
    import pdb  # noqa: T100 - to switch it off

    sys.breakpointhook = pdb.set_trace = _nothing


def before_breakpoint(function: Callable[[], object]) -> None:
    """Call `function` before `breakpoint()` starts Python's own debugger. Other debuggers are left alone."""
    if sys.breakpointhook is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
        return

    def debug(*arguments: object, **options: object) -> None:
        import pdb  # noqa: T100 - what `breakpoint()` does

        sys.breakpointhook = sys.__breakpointhook__
        function()
        pdb.Pdb().set_trace(sys._getframe(1))

    sys.breakpointhook = debug


def _nothing(*arguments: object, **options: object) -> None:
    """The breakpoint of a rank that is not debugged."""


def is_in_debugger(thread: int) -> bool:
    """True if a thread of this process is in a debugger."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(_DEBUGGERS):
            return True
        frame = frame.f_back
    return False


def explanation(error: BaseException) -> LockstepError | None:
    """The error to raise instead of `error`, if it ended a debugger; None for all other errors."""
    if type(error).__name__ != "BdbQuit":
        return None
    where = this_process.named() or None
    if sys.stdin and sys.stdin.isatty():
        return LockstepError("the debugger was left", where=where, remedy="in the debugger, c continues the training")
    return UsageError(
        "a breakpoint was reached, and this process has no terminal",
        where=where,
        remedy="run it in a terminal. Of several ranks, --debug-rank 0 (in a script: the variable "
        "LOCKSTEP_DEBUG_RANK=0) gives rank 0 the terminal. In loader workers, breakpoints work only with "
        "data.workers=0",
    )
