"""The command `lockstep`, and `python -m lockstep`.

Signals are handled from the first moment, because imports take time: the command line 0.2 s, torch some seconds.
"""

import contextlib
import os
import signal
import sys

from lockstep.core import this_process

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_EXIT_PREEMPTED = 75  # the exit code of errors.Preempted, which is not imported yet


def _stop(number: int, frame: object) -> None:
    """End the process without a traceback: nothing has begun. Code that begins something sets its own handlers."""
    if sys.argv[1:2] != ["train"]:
        os._exit(128 + number)
    if not this_process.is_rank():
        name = signal.Signals(number).name
        rest = "before training began; nothing was lost; the same command starts again"
        with contextlib.suppress(OSError):  # SIGHUP: the terminal is gone
            os.write(2, f"stopped by {name} {rest}\n".encode())
    os._exit(_EXIT_PREEMPTED)


def _check_package() -> None:
    """PyPI has another distribution with a module `lockstep`, an empty file. Installed later, it replaces ours."""
    import lockstep

    if not hasattr(lockstep, "__all__"):
        home = os.path.dirname(lockstep.__file__ or "")
        what = f"error: another distribution named lockstep has replaced a file of torch-lockstep in {home}"
        print(
            f"{what}. Run: pip uninstall lockstep torch-lockstep; in the clone of Lockstep: pip install -e .",
            file=sys.stderr,
        )
        sys.exit(2)


def main() -> None:
    """Run the command line, and end the process."""
    _check_package()
    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # SIGHUP: nohup
    for number in heeded:
        signal.signal(number, _stop)
    try:
        from lockstep.cli import application as cli

        if sys.argv[1:2] != ["train"]:
            for number in heeded:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        cli.main()
    finally:
        for number in heeded:  # the exit code is decided: a signal must not change it
            # SIGUSR1 asks to save, and there is nothing left to save. The other signals may end a process that hangs.
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


if __name__ == "__main__":  # ranks that `verify` starts import this module again
    main()
