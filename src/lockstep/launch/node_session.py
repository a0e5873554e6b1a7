"""One node's launcher among those of the other nodes: the store that they share, and the heartbeats in it.

torch's `TCPStore` may wait forever if a link is cut or the other process is frozen. So each connection has its own
thread, and callers wait for the thread for a limited time.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

import lockstep
from lockstep.core.errors import Preempted, RankError, UsageError
from lockstep.core.parallel.nodes import own_name
from lockstep.launch import node_address
from lockstep.launch.node_address import LOOK_S, Endpoint, ProcessClock

T = TypeVar("T")
GONE_AFTER = "LOCKSTEP_NODE_TIMEOUT_S"
"""Environment variable: seconds without a heartbeat after which a node counts as gone."""
SERVES = "LOCKSTEP_RENDEZVOUS_SERVER"
"""Environment variable: 1 if this node serves the store, 0 if it does not, in case HOST does not determine it."""
_BEAT_S = 1.0
_JOIN_S = 5.0
_DAY_S = 86400.0
_SETTINGS_S = 10.0


@dataclass(frozen=True)
class RendezvousParameters:
    """The nodes that make a run."""

    least: int
    """The ranks start when this many nodes are there."""
    most: int
    endpoint: Endpoint
    run_id: str
    """The same on all nodes, and different for each run."""
    wait_s: float
    """Seconds to wait for nodes."""
    keys: dict[str, Any]
    """Values that must be the same on all nodes: the config's training keys."""


@dataclass(frozen=True)
class Member:
    """A node's launcher, as the others see it."""

    node: int
    """Its number in the store."""
    name: str
    address: str
    process: int
    nproc: int
    """The number of its ranks."""


def gone_after_s() -> float:
    """Seconds without a heartbeat after which a node, or the store, counts as gone: at least 3.

    Raises:
        UsageError: the environment variable is not a number of seconds, or longer than a day.
    """
    text = os.environ.get(GONE_AFTER) or "10"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _DAY_S:
            return max(3.0, float(text))
    raise UsageError(
        f"{text!r} is not a number of seconds", where=GONE_AFTER, remedy="give a number from 3, such as 10"
    )


class StoreLostError(RankError):
    """The store no longer answers: its node, its launcher or the link to it is gone."""


class BoundedStore:
    """A connection to a store. Each call waits for its answer, but not forever.

    Args:
        connect: makes the connection; called in the thread of this object.
        where: HOST:PORT, for errors.
    """

    def __init__(self, connect: Callable[[], Store], where: str) -> None:
        self.where = where
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = queue.SimpleQueue()
        self._connect = connect
        self._thread = threading.Thread(target=self._work, name="lockstep-node-store", daemon=True)
        self._thread.start()

    def call(self, job: Callable[[Store], T]) -> T:
        """The value of `job`, which the thread calls with the connection.

        Raises:
            StoreLostError: no answer came within `gone_after_s()` seconds, or the connection is closed.
        """
        future: Future[T] = Future()
        self._jobs.put((future, job))
        clock, limit_s = ProcessClock(), gone_after_s()
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if future.done():
                    raise self.lost("it did not answer in time") from None
                if clock.look() > limit_s:
                    raise self.lost(f"no answer for {limit_s:g} s") from None
            except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
                raise self.lost(str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    def lost(self, why: str) -> StoreLostError:
        """The error that reports that the store is gone."""
        return StoreLostError(
            f"the node at {self.where}, which holds the shared state of the nodes, is gone: {why.rstrip('.')}",
            remedy="check the launcher and the machine there, and the link to it. The checkpoints are kept: the same "
            "command on all nodes resumes from the newest",
        )

    def close(self) -> None:
        """Let the thread end when it has done its jobs, and wait briefly for it."""
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


class Pulse:
    """Sends the other launchers a heartbeat every second, and looks for those of others and for news.

    A thread with its own connection does this. The main thread only reads what the thread has found, so it never
    waits.

    Args:
        connect: makes the connection.
        node: the number of this node, under which others look for its heartbeats.
    """

    def __init__(self, connect: Callable[[], Store], node: int) -> None:
        self._connect, self.node = connect, node
        self.limit = max(3, round(gone_after_s() / _BEAT_S))
        self.stopped_by = ""
        """The request to stop of any node; empty if there is none."""
        self.is_over = False
        """True if the watched start has ended on a node."""
        self.has_joining = False
        """True if a node waits for the next start."""
        self.failed = ""
        """Why the thread has ended."""
        self._beats = 0
        self._seen, self._silent = 0, ProcessClock()
        self._silent_since = 0.0
        self._asked, self._wake, self._closed = "", threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._watched: dict[int, list[int]] = {}  # by node: its last count of heartbeats, and our beats since then
        self._over_key = self._joining_key = ""
        self._thread = threading.Thread(target=self._run, name="lockstep-node-pulse", daemon=True)
        self._thread.start()

    def watch(self, nodes: Sequence[int], over_key: str = "", joining_key: str = "") -> None:
        """Watch these nodes from now on.

        Args:
            over_key: a key of the store that is set when the start is over.
            joining_key: a key of the store that is set when a node waits for the next start.
        """
        with self._lock:
            self._watched = {node: self._watched.get(node, [-1, 0]) for node in nodes if node != self.node}
            self.is_over = self.has_joining = False
            self._over_key, self._joining_key = over_key, joining_key

    def gone(self) -> list[int]:
        """The watched nodes that sent no heartbeat for too long. Counts beats of this process, not time."""
        with self._lock:
            return [node for node, (_, missed) in self._watched.items() if missed >= self.limit]

    def ask_to_stop(self, text: str) -> None:
        """Notify all nodes that this node was asked to stop. Does nothing if they were notified before."""
        if not self._asked:  # each wake-up is a beat, and other nodes count as gone after some beats of this node
            self._asked = text
            self._wake.set()

    def silence_s(self) -> float:
        """How long the store has not answered. Call it at least every second."""
        now = self._silent.look()
        if self._beats != self._seen:
            self._seen, self._silent_since = self._beats, now
        return now - self._silent_since

    def close(self) -> None:
        """Stop the thread, and wait briefly for it: it may wait for the store.

        An interpreter that ends while a thread is inside torch ends with SIGABRT if the thread returns then.
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
            watched, over_key, joining_key = list(self._watched), self._over_key, self._joining_key
        counts = {node: store.add(f"alive/{node}", 0) for node in watched}
        is_over = bool(over_key) and store.check([over_key])
        has_joining = bool(joining_key) and store.check([joining_key])
        with self._lock:
            for node, count in counts.items():
                if node in self._watched:
                    last, missed = self._watched[node]
                    self._watched[node] = [count, 0 if count != last else missed + 1]
            if over_key == self._over_key:  # else this is news of an earlier start
                self.is_over, self.has_joining = is_over, has_joining


class Session:
    """This launcher, connected to the others. Creating it serves the store or connects to it.

    Raises:
        MissingNodesError: the node that serves the store was not there in time.
        UsageError: that node was started with different settings, or another program listens there.
    """

    def __init__(self, nodes: RendezvousParameters, nproc: int) -> None:
        gone_after_s()  # a wrong value is an error before any wait
        self.nodes, self.endpoint = nodes, nodes.endpoint
        self.name = own_name()
        addresses = node_address.find(self.endpoint.host, nodes.wait_s)
        serves = os.environ.get(SERVES)
        own = serves == "1" or (serves != "0" and any(node_address.is_own(address) for address in addresses))
        self.server = self._serve() if own else None
        if self.server is None:
            node_address.wait_for(self.endpoint, nodes.wait_s)
        self.address = node_address.own_address(self.endpoint.host, addresses)
        interface = node_address.interface_of(self.address)
        if interface and node_address.GLOO_INTERFACE not in os.environ:
            os.environ[node_address.GLOO_INTERFACE] = interface
        self.notes = BoundedStore(self._store, str(self.endpoint))
        """For the main thread."""
        self.launch_id = f"{nodes.run_id}-{self._agree_on_settings()}"
        """The same on all nodes, and different for each launch of the run."""
        self.id = int(self.notes.call(lambda store: store.add("nodes", 1)))
        """The number of this node."""
        own_member = json.dumps(asdict(Member(self.id, self.name, self.address, os.getpid(), nproc)))
        self.notes.call(lambda store: store.set(f"node/{self.id}", own_member))
        self.pulse = Pulse(self._store, self.id)

    def check_store(self) -> None:
        """Raises StoreLostError if the store no longer answers. Never waits."""
        if self.pulse.failed:
            raise self.notes.lost(self.pulse.failed)
        silent_s = self.pulse.silence_s()
        if silent_s > gone_after_s():
            raise self.notes.lost(f"no answer for {silent_s:.0f} s")

    def check(self) -> None:
        """Like `check_store`; also checks whether another node was asked to stop while no rank runs here."""
        self.check_store()
        if self.pulse.stopped_by:
            raise Preempted(f"stopped by {self.pulse.stopped_by}")

    def members(self, ids: Sequence[str]) -> list[Member]:
        """The nodes with these numbers."""
        texts = self.notes.call(lambda store: [store.get(f"node/{node}") for node in ids])
        return [Member(**json.loads(text)) for text in texts]

    def close(self) -> None:
        """Let the threads end."""
        self.pulse.close()
        self.notes.close()

    def _store(self, serves: bool = False) -> TCPStore:
        endpoint, timeout = self.endpoint, datetime.timedelta(seconds=gone_after_s())
        return TCPStore(endpoint.host, endpoint.port, is_master=serves, wait_for_workers=False, timeout=timeout)

    def _serve(self) -> TCPStore | None:
        try:
            return self._store(serves=True)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                what = f"cannot listen at {self.endpoint}: {str(error).splitlines()[0]}"
                raise RankError(what, where="--rendezvous", remedy="give a different port") from error
            return None  # `_agree_on_settings` checks whether it is a launcher of this run

    def _settings(self) -> dict[str, Any]:
        limits = (
            str(self.nodes.least) if self.nodes.least == self.nodes.most else f"{self.nodes.least}:{self.nodes.most}"
        )
        return {
            "--rendezvous-id": self.nodes.run_id,
            "version of Lockstep": lockstep.__version__,
            "version of torch": torch.__version__,
            "version of Python": platform.python_version().rpartition(".")[0],
            "--nnodes": limits,
            **self.nodes.keys,
        }

    def _agree_on_settings(self) -> str:
        """Compare the settings of this node with those of the node that serves the store.

        Returns:
            a name of this launch, made up by the node with the store.

        Raises:
            UsageError: they differ; names the differences.
        """
        own, endpoint, notes = self._settings(), self.endpoint, self.notes
        if self.server is not None:
            served = {"settings": own, "by": f"process {os.getpid()} on {self.name}", "launch": uuid.uuid4().hex[:12]}
            notes.call(lambda store: store.set("settings", json.dumps(served)))
        foreign = UsageError(
            f"the process that listens at {endpoint} is not a launcher of this command",
            where="--rendezvous",
            remedy="give a different port; or, if the process is left from an earlier run, end it",
        )
        clock = ProcessClock()
        try:
            while not notes.call(lambda store: store.check(["settings"])):
                if clock.look() > _SETTINGS_S:
                    raise foreign
                time.sleep(LOOK_S)
            there = json.loads(notes.call(lambda store: store.get("settings")))
        except StoreLostError as error:
            raise foreign from error
        theirs = there["settings"]
        own = json.loads(json.dumps(own))
        differences = [
            f"{name}: {theirs.get(name)!r} there, {own.get(name)!r} here"
            for name in sorted(own.keys() | theirs.keys())
            if own.get(name) != theirs.get(name)
        ]
        if theirs.get("--rendezvous-id") != own["--rendezvous-id"]:
            raise UsageError(
                f"{there['by']}, which listens at {endpoint}, belongs to a different run: {differences[0]}",
                where="--rendezvous",
                remedy="give each run its own port; or, if that process is left from an earlier run, end it",
            )
        if differences:
            raise UsageError(
                "\n    ".join([f"{there['by']} was started with different settings:", *differences]),
                where=f"node {self.name}",
                remedy="give the same command on all nodes, with the same versions of Lockstep and torch",
            )
        return str(there["launch"])
