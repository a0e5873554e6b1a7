"""The stderr of ranks: the launcher passes it on with the rank, and keeps the last lines of each for its message."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat, launched

_KEPT, _LONGEST_LINE = 100, 500
_LATE_S = 0.2  # for the rest of the output of ended ranks: their children may hold the pipe open
_PLACE = re.compile(r"block: \[[^]]*\], thread: \[[^]]*\]")
_LINE = re.compile(rb"^(?!\[rank |\r?\n|\Z)", re.MULTILINE)  # the beginning of a line that does not name its rank
_NOISE = re.compile(r"\s*(frame #\d+:|#\d+ 0x)")  # stacks of C++


class Tail:
    """The last lines that a rank wrote. Frames of C++, and the same line from another thread of a GPU, are left out."""

    def __init__(self) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=_KEPT)
        self._rest = ""

    def add(self, text: str) -> None:
        """More output, which may end in the middle of a line."""
        *whole, rest = (self._rest + text).split("\n")
        self._rest = rest[-_LONGEST_LINE:]
        for line in whole:
            self._add(line)

    def last(self, count: int) -> list[str]:
        """The last lines, and an unfinished line."""
        self._add(self._rest)
        self._rest = ""
        return list(self.lines)[-count:]

    def _add(self, line: str) -> None:
        line = line.rstrip().rpartition("\r")[2][:_LONGEST_LINE]
        if line and not _NOISE.match(line) and all(_PLACE.sub("", line) != _PLACE.sub("", old) for old in self.lines):
            self.lines.append(line)


class RankOutput:
    """Copies what the ranks of this machine write to stderr to the stderr of this process, from a thread.

    Each line of a rank other than 0 begins with the rank: `[rank 1]`.
    """

    def __init__(self) -> None:
        self.tails: dict[int, Tail] = {}
        self._within_line: set[int] = set()  # ranks whose last line has not ended
        self._readers: dict[int, int] = {}  # rank by file descriptor
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="lockstep-rank-output", daemon=True)

    def writer(self, rank: int) -> connection.Connection[Any, Any]:
        """The end of a pipe for a rank's stderr; a terminal if this process writes to a terminal."""
        reading, writing = _terminal() if os.isatty(2) else os.pipe()
        self._readers[reading], self.tails[rank] = rank, Tail()
        return connection.Connection(writing, readable=False)

    def start(self) -> None:
        """Begin to copy. Call it when each rank has its end."""
        self._thread.start()

    def close(self) -> None:
        """Copy what is left, and stop. Call it when the ranks have ended."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _copy(self) -> None:
        left = dict(self._readers)
        while left:
            ready = connection.wait(list(left), _LATE_S)
            if not ready and self._closing.is_set():
                break
            for reading in ready:
                assert isinstance(reading, int)
                try:
                    content = os.read(reading, 1 << 16)
                except OSError:  # the other end of a terminal is closed
                    content = b""
                if not content:
                    del left[reading]
                    continue
                rank = self._readers[reading]
                self.tails[rank].add(content.decode(errors="replace"))
                content = self._named(rank, content) if rank else content
                with contextlib.suppress(OSError):  # nobody reads it: the terminal is gone
                    while content:
                        content = content[os.write(2, content) :]
        for reading in self._readers:
            os.close(reading)

    def _named(self, rank: int, content: bytes) -> bytes:
        """What a rank wrote, with the rank at the beginning of each line."""
        line, end, rest = content.partition(b"\n") if rank in self._within_line else (b"", b"", content)
        (self._within_line.discard if content.endswith(b"\n") else self._within_line.add)(rank)
        return line + end + _LINE.sub(b"[rank %d] " % rank, rest)


def _terminal() -> tuple[int, int]:
    """A terminal that passes every byte on unchanged: the end to read, and the end to write."""
    import fcntl
    import termios
    import tty

    reading, writing = os.openpty()
    tty.setraw(writing)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
    return reading, writing


def call_with_stderr(writer: connection.Connection[Any, Any], function: Callable[..., None], *arguments: Any) -> None:
    """The main function of a rank: call `function(*arguments)` with `writer` as its stderr.

    If it ends without an error, the heartbeat records it: exit code 0 could also come from `os._exit(0)` in a library.
    """
    sys.stderr.flush()
    os.dup2(writer.fileno(), 2)
    writer.close()
    heartbeat.own()  # from here the launcher can ask this process to stop
    if Path(os.environ.get(launched.FOLDER, os.devnull), launched.STOP_FILE).exists():  # it was asked before
        os._exit(Preempted.exit_code)
    try:
        function(*arguments)
    except SystemExit as end:  # how the command line ends
        if not end.code:
            heartbeat.own().enter(heartbeat.Phase.ENDED)
        raise
    heartbeat.own().enter(heartbeat.Phase.ENDED)
