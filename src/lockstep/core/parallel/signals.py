"""Requests to stop: a signal sets a flag, which `stop_consensus.py` exchanges between ranks. A second signal kills.

This file imports no torch: a signal that arrives during the import of torch must be handled too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat, launched

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a training to save and to stop. SIGHUP says that the terminal is gone."""
STOPPED_AT_ONCE = "\nstopped at once, without saving; the same command resumes from the newest checkpoint"
_ONCE_S = 1.0  # a launcher and a scheduler may both pass on the same request
_KEY_S = 0.2  # a wrapper repeated one Ctrl-C after 5 ms at most (30 tries, 2 cores, 6 busy processes)
_STUCK_S = 5.0  # for the main thread, if there is nothing to save


def is_another(number: int, asked_at: float) -> bool:
    """True if a signal that arrives now is a new request, and not that of `asked_at` (monotonic seconds) again."""
    return time.monotonic() - asked_at > (_KEY_S if number == signal.SIGINT else _ONCE_S)


def not_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of `numbers` that this process does not ignore. Under nohup it ignores SIGHUP, and should continue to."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class StopFlag:
    """The signal that asked this process to stop, if there was a signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.saves = False
        """There is something to save. As long as there is nothing, a signal raises `Preempted` at once."""
        self.asked_at = 0.0
        self.is_handled = False
        """The main thread has got the signal. It does not while it waits in a collective, or computes in C++."""

    @property
    def name(self) -> str:
        """Name of the signal that the user sent, even if the launcher passed it on as a different signal."""
        sent = Path(os.environ.get(launched.FOLDER, os.devnull), launched.STOP_FILE)
        return sent.read_text() if sent.is_file() else self.signal.name if self.signal else "a signal to another rank"

    def handle(self, number: int, frame: object) -> None:
        """The signal handler: runs in the main thread, between two instructions."""
        self.note(number)
        self.is_handled = True
        if not self.saves:
            raise Preempted.before_training(self.name)

    def note(self, number: int) -> bool:
        """Set the flag. True if an earlier request had set it."""
        again = self.signal is not None and is_another(number, self.asked_at)
        if self.signal is None:
            self.asked_at = time.monotonic()
            self.signal = signal.Signals(number)
        return again


_active: StopFlag | None = None


def _forget() -> None:
    """In a forked child: a signal to the child is not a request to its parent."""
    if _active is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


os.register_at_fork(after_in_child=_forget)


def current() -> StopFlag:
    """The flag of this process; outside `listening`, a new flag that is never set."""
    return _active or StopFlag()


@contextlib.contextmanager
def listening() -> Iterator[StopFlag]:
    """Inside, the signals of `ASKING` set the flag, except those that this process ignores.

    Inside another `listening`, and outside the main thread, this changes nothing.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield current()
        return
    flag = _active = StopFlag()
    heartbeat.own()  # from here the launcher knows this process
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, flag.handle) for number in not_ignored(ASKING)}
    # The system writes signals into this pipe at once, while Python's handlers wait until the main thread leaves a
    # collective.
    old_pipe = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(flag, reading), name="lockstep-signals", daemon=True).start()
    try:
        if Path(os.environ.get(launched.FOLDER, os.devnull), launched.STOP_FILE).exists():
            raise Preempted.before_training(flag.name)
        yield flag
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # ends the thread
        _active = None


def _watch(flag: StopFlag, pipe: int) -> None:
    """Handle the signals that cannot wait for the main thread."""
    while arrived := os.read(pipe, 1):
        number = arrived[0]
        if number not in ASKING:  # another signal that Python handles
            continue
        again = flag.note(number)
        if not flag.saves:
            clock = threading.Timer(_STUCK_S, _end_if_stuck, (flag,))
            clock.daemon = True  # a process that ends by itself does not wait for it
            clock.start()
        if launched.LAUNCHED in os.environ:
            # After a rank died, the launcher ends the others with SIGTERM: they can no longer agree, nor save.
            folder = os.environ.get(launched.FOLDER)
            if (
                number == signal.SIGTERM
                and folder
                and not all(heartbeat.is_alive(rank.pid) for rank in heartbeat.all_in(Path(folder)))
            ):
                os._exit(1)
        elif again:
            launched.tell(STOPPED_AT_ONCE)
            os._exit(128 + number)
    os.close(pipe)


def _end_if_stuck(flag: StopFlag) -> None:
    """End this process, if nothing is to be saved and the main thread does not come to handle the signal."""
    if flag is _active and not flag.is_handled and not flag.saves:
        launched.tell(f"\n{Preempted.before_training(flag.name)}")
        os._exit(Preempted.exit_code)
