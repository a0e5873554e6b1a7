"""The process of a trial: `python -m lockstep_lab.search.trial_process train ...` is `lockstep train ...` on a leash.

Its standard input is a pipe from the sweep. When the pipe is closed, because the sweep asks for the end or has been
killed, the training gets SIGTERM: it saves and stops.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _stop_at_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run `lockstep ARGUMENTS`."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_stop_at_end, args=(pipe,), name="lockstep-sweep", daemon=True).start()
    sys.argv = ["lockstep", *sys.argv[1:]]
    runpy.run_module("lockstep", run_name="__main__")


if __name__ == "__main__":
    main()
