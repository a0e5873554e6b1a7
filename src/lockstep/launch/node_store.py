"""The store through which the launchers of several nodes agree, used so that no call waits without a limit.

torch's `TCPStore` may wait for ever where a link is cut or the other process is frozen. So each connection has a thread
of its own, and who asks waits for the thread for a limited time.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lockstep.core.errors import RankError, UsageError

T = TypeVar("T")
GONE_AFTER = "LOCKSTEP_NODE_TIMEOUT_S"
"""Environment variable: seconds without a sign of life after which a node counts as gone."""
_LOOK_S = 0.25
_BEAT_S = 1.0
_JOIN_S = 5.0
_DAY_S = 86400.0


def gone_after_s() -> float:
    """Seconds without a sign of life after which a node, or the store, counts as gone: at least 3.

    Raises:
        UsageError: the environment variable is no number of seconds, or longer than a day.
    """
    text = os.environ.get(GONE_AFTER) or "10"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _DAY_S:
            return max(3.0, float(text))
    raise UsageError(f"{text!r} is no number of seconds", where=GONE_AFTER, remedy="give a number from 3, such as 10")


class StoreLostError(RankError):
    """The store does not answer any more: its node, its launcher or the link to it is gone."""


class Clock:
    """Seconds during which this process ran. The time does not go on while the process is frozen (SIGSTOP).

    Otherwise a process that wakes would take all others for dead.
    """

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.monotonic()

    def look(self) -> float:
        """The seconds since this object was made. Look at least every second."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 1.0)
        self._last = now
        return self.seconds


class BoundedStore:
    """A connection to a store. Each call waits for its answer, but not for ever.

    Args:
        connect: makes the connection; it is called in the thread of this object.
        where: HOST:PORT, for errors.
    """

    def __init__(self, connect: Callable[[], Store], where: str) -> None:
        self.where = where
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = queue.SimpleQueue()
        self._connect = connect
        self._thread = threading.Thread(target=self._work, name="lockstep-node-store", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Store], T]) -> Future[T]:
        """Let the thread call `job` with the connection, after all earlier jobs."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def call(self, job: Callable[[Store], T], timeout_s: float | None = None) -> T:
        """The value of `job`, which the thread calls with the connection.

        Raises:
            StoreLostError: there is no answer within `timeout_s` seconds (default: `gone_after_s`), or the connection
                is closed.
        """
        future, clock = self.submit(job), Clock()
        limit_s = timeout_s or gone_after_s()
        while True:
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                if future.done():
                    raise self.lost("it did not answer in time") from None
                if clock.look() > limit_s:
                    raise self.lost(f"no answer for {limit_s:g} s") from None
            except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
                raise self.lost(str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    def lost(self, why: str) -> StoreLostError:
        """The error that says that the store is gone."""
        return StoreLostError(
            f"the node at {self.where}, which holds what the nodes agree on, is gone: {why.rstrip('.')}",
            remedy="look at the launcher and the machine there, and at the link to it. The checkpoints stay: the same "
            "command on all nodes goes on from the newest",
        )

    def close(self) -> None:
        """Let the thread end when it has done its jobs, and wait a little for it."""
        self._jobs.put(None)
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        store: Store | None = None
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                if store is None:
                    store = self._connect()
                future.set_result(job(store))
            except BaseException as error:
                future.set_exception(error)


def client(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection to the store that another process serves."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Pulse:
    """Tells the other launchers every second that this launcher lives, and looks for signs of others and for news.

    A thread with a connection of its own does it. The main thread only reads what the thread has found, so it never
    waits.

    Args:
        connect: makes the connection.
        node: the number of this node, by which others look for its signs.
    """

    def __init__(self, connect: Callable[[], Store], node: int) -> None:
        self._connect, self.node = connect, node
        self.limit = max(3, round(gone_after_s() / _BEAT_S))
        self.stopped_by = ""
        """The request to stop of any node; empty if there is none."""
        self.is_over = False
        """Whether the start that is watched has ended on a node."""
        self.has_joining = False
        """Whether a node waits for the next start."""
        self.failed = ""
        """Why the thread has ended."""
        self._beats = 0
        self._seen, self._silent = 0, Clock()
        self._silent_since = 0.0
        self._asked, self._wake, self._closed = "", threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._watched: dict[int, list[int]] = {}  # by node: its last count of signs, and own beats since then
        self._over_key = ""
        self._count_waiting: Callable[[], int] = lambda: 0
        self._thread = threading.Thread(target=self._run, name="lockstep-node-pulse", daemon=True)
        self._thread.start()

    def watch(self, nodes: Sequence[int], over_key: str = "", count_waiting: Callable[[], int] = lambda: 0) -> None:
        """Watch these nodes from now on.

        Args:
            over_key: a key of the store that says that the start is over.
            count_waiting: gives the number of nodes that wait for the next start.
        """
        with self._lock:
            self._watched = {node: self._watched.get(node, [-1, 0]) for node in nodes if node != self.node}
            self.is_over = self.has_joining = False
            self._over_key, self._count_waiting = over_key, count_waiting

    def gone(self) -> list[int]:
        """The watched nodes that gave no sign of life for too long. Beats of this process count, not the time."""
        with self._lock:
            return [node for node, (_, missed) in self._watched.items() if missed >= self.limit]

    def ask_to_stop(self, text: str) -> None:
        """Tell all nodes that this node was asked to stop. Nothing, where they were told before."""
        if not self._asked:  # each waking is a beat, and other nodes are taken for gone after some beats of this node
            self._asked = text
            self._wake.set()

    def silence_s(self) -> float:
        """For how long the store has not answered. Call it at least every second."""
        now = self._silent.look()
        if self._beats != self._seen:
            self._seen, self._silent_since = self._beats, now
        return now - self._silent_since

    def close(self) -> None:
        """Stop the thread, and wait a little for it: it may wait for the store.

        An interpreter that ends while a thread is inside torch ends with SIGABRT, if the thread comes back then.
        """
        self._closed.set()
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._closed.is_set():
                self._beat(store)
                self._beats += 1
                self._wake.wait(_BEAT_S)
                self._wake.clear()
        except Exception as error:
            self.failed = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _beat(self, store: Store) -> None:
        store.add(f"alive/{self.node}", 1)
        if self._asked:
            store.compare_set("stop", "", self._asked)
        if not self.stopped_by and store.check(["stop"]):
            self.stopped_by = store.get("stop").decode()
        with self._lock:
            watched, over_key, count_waiting = list(self._watched), self._over_key, self._count_waiting
        counts = {node: store.add(f"alive/{node}", 0) for node in watched}
        is_over = bool(over_key) and store.check([over_key])
        has_joining = count_waiting() > 0
        with self._lock:
            for node, count in counts.items():
                if node in self._watched:
                    last, missed = self._watched[node]
                    self._watched[node] = [count, 0 if count != last else missed + 1]
            if over_key == self._over_key:  # else this is news of an earlier start
                self.is_over, self.has_joining = is_over, has_joining


def append_word(store: Store, key: str, text: str) -> None:
    """Append a word to a list of words in the store."""
    store.append(key, f"{text} ")  # type: ignore[attr-defined]


def words(store: Store, key: str) -> list[str]:
    """The words of a list in the store; empty where there is none."""
    with contextlib.suppress(RuntimeError):
        if store.check([key]):
            return list(dict.fromkeys(store.get(key).decode().split()))
    return []
