"""Run all tests while every process that they start is stopped for 4 of 5 moments: what depends on speed fails here.

    python tests/slowly.py [options of pytest]

The processes of pytest itself run on. So ranks and commands are five times slower than the tests that wait for them.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RUNS_S, STOPS_S, LOOKS_EVERY = 0.02, 0.08, 5


def started_by(first):
    """The processes below `first`, without those of pytest."""
    parents, left = {}, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    below = [first]
    while below:
        for child in parents.get(below.pop(), ()):
            below.append(child)
            with contextlib.suppress(OSError):
                if b"-m\0pytest" not in Path(f"/proc/{child}/cmdline").read_bytes():
                    left.append(child)
    return left


def send(number, processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def main():
    tests = subprocess.Popen([sys.executable, Path(__file__).with_name("in_shards.py"), *sys.argv[1:]])
    slowed = []
    try:
        for turn in itertools.count():
            if tests.poll() is not None:
                return tests.returncode
            if turn % LOOKS_EVERY == 0:
                slowed = started_by(tests.pid)
            send(signal.SIGSTOP, slowed)
            time.sleep(STOPS_S)
            send(signal.SIGCONT, slowed)
            time.sleep(RUNS_S)
    finally:
        send(signal.SIGCONT, slowed)
        tests.terminate()
        tests.wait()


if __name__ == "__main__":
    sys.exit(main())
