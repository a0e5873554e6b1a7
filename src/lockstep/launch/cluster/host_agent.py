"""The remote end of `lockstep launch ssh`: starts `lockstep train` on this host, and ends it with the connection.

It reads lines from its standard input: first what to start, as JSON, then heartbeats and requests to stop. If the input
ends, or no heartbeat comes for a while, the connection is lost: the ranks save and stop.

Importing this module loads no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

ALIVE, STOP, KILL = ".", "stop", "kill"
"""The lines after the first."""
SIGN_EVERY_S = 5.0
COMMAND = (sys.executable, "-m", "lockstep")
_SILENCE_S = 60.0
_SAVE_S = 120.0  # after a request to stop
_KILL_S = 5.0  # from a second request to SIGKILL
_LOOK_EVERY_S = 0.1
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start what the first line describes, and return its exit code."""
    lines = _lines(0)
    until = time.monotonic() + _SILENCE_S
    first = next((line for line in lines if line is not None or time.monotonic() > until), None)
    if first is None:
        return 1
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(first)
    lost = threading.Event()
    child = _start(order)
    assert child.stdout is not None
    assert child.stderr is not None
    pumps = [
        threading.Thread(target=_pass_on, args=(stream.fileno(), out, lost), daemon=True)
        for stream, out in ((child.stdout, 1), (child.stderr, 2))
    ]
    for pump in pumps:
        pump.start()
    stopping = _Stopping(child)
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.ask())
    _follow(lines, child, stopping, lost)
    for pump in pumps:
        pump.join(0.2 if lost.is_set() else 5.0)
    return int(child.returncode) if child.returncode >= 0 else 128 - child.returncode


def _start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    # If this process is killed, the system asks the child to stop. (Only Linux can do this.)
    import ctypes  # the command line also imports this module

    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        [*COMMAND, *order["arguments"]],
        env=os.environ | order["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=prepare,
    )


class _Stopping:
    """Asks the child to stop, and kills it if it does not."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.times = 0
        self.kill_at = float("inf")

    def ask(self) -> None:
        """Ask for the first time: the ranks save and stop."""
        if not self.times:
            self.times = 1
            self.kill_at = time.monotonic() + _SAVE_S
            self._send(signal.SIGTERM)

    def end(self) -> None:
        """Ask again: the launcher kills its ranks. It counts SIGINT as a second request, however soon it comes."""
        self.ask()
        if self.times == 1:
            self.times = 2
            time.sleep(0.3)
            self.kill_at = time.monotonic() + _KILL_S
            self._send(signal.SIGINT)

    def look(self) -> None:
        """Kill the child if its time is over."""
        if time.monotonic() > self.kill_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, number)


def _follow(
    lines: Iterator[str | None], child: subprocess.Popen[bytes], stopping: _Stopping, lost: threading.Event
) -> None:
    """Follow the lines until the child has ended."""
    heard = time.monotonic()
    while child.poll() is None:
        stopping.look()
        line = next(lines, "")
        if line:
            heard = time.monotonic()
        if line == STOP:
            stopping.ask()
        elif line == KILL:
            stopping.end()
        elif line == "" or lost.is_set() or time.monotonic() - heard > _SILENCE_S:
            lost.set()
            stopping.ask()
            time.sleep(_LOOK_EVERY_S)


def _lines(descriptor: int) -> Iterator[str | None]:
    """The lines of a file without their ends. None: no whole line has come for a moment. Ends with the file."""
    rest = b""
    while True:
        if not select.select([descriptor], [], [], _LOOK_EVERY_S)[0]:
            yield None
            continue
        data = os.read(descriptor, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() or ALIVE for line in lines)


def _pass_on(reading: int, writing: int, lost: threading.Event) -> None:
    """Copy the child's output. After the connection is lost it is discarded, so that the child can continue."""
    os.set_blocking(writing, False)
    while data := os.read(reading, 65536):
        while data and not lost.is_set():
            try:
                if select.select([], [writing], [], 0.5)[1]:
                    data = data[os.write(writing, data) :]
            except BlockingIOError:
                continue
            except OSError:
                lost.set()


if __name__ == "__main__":
    sys.exit(main())
