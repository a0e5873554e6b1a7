"""The command `lockstep`, and `python -m lockstep`.

A signal is understood from the first moment: the command line takes 0.2 s to import, and torch seconds.
"""

import os
import signal
import sys

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_RUN_ME_AGAIN = 75  # as errors.Preempted, which is not imported yet


def _stop(number: int, frame: object) -> None:
    """End here, without a traceback: nothing has begun. Whoever begins something handles signals in its own way."""
    if sys.argv[1:2] != ["train"]:
        os._exit(128 + number)
    if "RANK" not in os.environ:
        name = signal.Signals(number).name
        rest = "before training began; nothing was lost; the same command goes on from there"
        os.write(2, f"stopped by {name} {rest}\n".encode())
    os._exit(_RUN_ME_AGAIN)


def main() -> None:
    """Run the command line, and end the process."""
    for number in _ASKING:
        signal.signal(number, _stop)
    try:
        from lockstep import cli

        if sys.argv[1:2] != ["train"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        cli.main()
    finally:
        for number in _ASKING:  # the exit code is decided
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":  # ranks that `verify` starts import this module again
    main()
