"""The launcher of one node among those of the other nodes: how it finds them, and the store that they share."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

import lockstep
from lockstep.core.errors import Preempted, RankError, UsageError
from lockstep.core.parallel.nodes import own_name
from lockstep.launch import node_address
from lockstep.launch.node_address import Endpoint
from lockstep.launch.node_store import BoundedStore, Clock, Pulse, StoreLostError, client, gone_after_s, words

SERVES = "LOCKSTEP_RENDEZVOUS_SERVER"
"""Environment variable: 1 if this node serves the store, 0 if it does not, where HOST does not tell it."""
LOOK_S = 0.25
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 30.0
_SETTINGS_S = 10.0


@dataclass(frozen=True)
class Nodes:
    """Which nodes make a run."""

    least: int
    """The ranks start when so many nodes are there."""
    most: int
    endpoint: Endpoint
    run_id: str
    """The same on all nodes, and another for each run."""
    wait_s: float
    """How long to wait for nodes, in seconds."""
    keys: dict[str, Any]
    """What must be the same on all nodes: the config's training keys."""


class MissingNodesError(RankError):
    """Too few nodes came."""


class Session:
    """This launcher, connected to the others. Making it serves the store or connects to it.

    Raises:
        MissingNodesError: the node that serves the store was not there in time.
        UsageError: that node was started with something else, or what listens there is no launcher.
    """

    def __init__(self, nodes: Nodes) -> None:
        gone_after_s()  # a wrong value is an error before anything is waited for
        self.nodes, self.endpoint = nodes, nodes.endpoint
        self.name = own_name()
        addresses = self._find_host()
        serves = os.environ.get(SERVES)
        own = serves == "1" or (serves != "0" and any(node_address.is_own(address) for address in addresses))
        self.server = self._serve() if own else None
        if self.server is None:
            self._wait_for_server()
        self.address = node_address.own_address(self.endpoint.host, addresses)
        interface = node_address.interface_of(self.address)
        if interface and node_address.GLOO_INTERFACE not in os.environ:
            os.environ[node_address.GLOO_INTERFACE] = interface
        self.notes = self.connection()
        """For the main thread."""
        self.launch_id = f"{nodes.run_id}-{self._agree_on_settings()}"
        """The same on all nodes, and another for each launch of the run."""
        self.id = int(self.notes.call(lambda store: store.add("nodes", 1)))
        """The number of this node."""
        about = f"{self.name} ({self.address}, process {os.getpid()})"
        self.notes.call(lambda store: store.set(f"node/{self.id}", about))
        self.pulse = Pulse(self._client, self.id)

    def connection(self) -> BoundedStore:
        """A further connection, for calls that wait."""
        return BoundedStore(self._client, str(self.endpoint))

    def check_store(self) -> None:
        """Raises StoreLostError if the store does not answer any more. Never waits."""
        if self.pulse.failed:
            raise self.notes.lost(self.pulse.failed)
        silent_s = self.pulse.silence_s()
        if silent_s > gone_after_s():
            raise self.notes.lost(f"no answer for {silent_s:.0f} s")

    def check(self) -> None:
        """As `check_store`; and see whether another node was asked to stop, while no rank runs here."""
        self.check_store()
        if self.pulse.stopped_by:
            raise Preempted(f"stopped by {self.pulse.stopped_by}")

    def who_is_missing(self, number: int) -> str:
        """For which nodes start `number` waits, and which are there."""
        here = self.notes.call(lambda store: words(store, f"{number}/here"))
        names = self.notes.call(lambda store: [store.get(f"node/{node}").decode() for node in here])
        least = self.nodes.least
        if len(here) > least:
            return f"a place among the nodes at {self.endpoint}: there are {', '.join(names)}"
        only_here = " (other machines cannot reach this address)" if node_address.is_loopback(self.address) else ""
        missing = max(1, least - len(here))
        return f"{missing} of {least} nodes at {self.endpoint}{only_here}; there are {', '.join(names)}"

    def waiting(self, what: str = "") -> Waiting:
        """A wait that ends after the time that the command line gives."""
        return Waiting(what, self.nodes.wait_s)

    def close(self) -> None:
        """Let the threads end."""
        self.pulse.close()
        self.notes.close()

    def _client(self) -> Store:
        return client(self.endpoint.host, self.endpoint.port, gone_after_s())

    def _find_host(self) -> list[str]:
        waiting = self.waiting(f"the name {self.endpoint.host} to be known")
        while not (addresses := node_address.resolve(self.endpoint.host)):
            remedy = "give the name or the address of one of the nodes as --rendezvous HOST:PORT"
            waiting.look(lambda: "", remedy)
            time.sleep(LOOK_S)
        return addresses

    def _serve(self) -> TCPStore | None:
        endpoint = self.endpoint
        try:
            return TCPStore(
                endpoint.host,
                endpoint.port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=gone_after_s()),
            )
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                what = f"cannot listen at {endpoint}: {str(error).splitlines()[0]}"
                raise RankError(what, where="--rendezvous", remedy="give another port") from error
            return None  # `_agree_on_settings` sees whether it is a launcher of this run, or something else

    def _wait_for_server(self) -> None:
        endpoint = self.endpoint
        waiting = self.waiting(f"the node at {endpoint}, which all nodes meet at")
        while True:
            try:
                socket.create_connection((endpoint.host, endpoint.port), timeout=2).close()
                return
            except OSError as error:
                reason = str(error)
            remedy = (
                "start the command on that node, too; check that HOST is the name or the address of one of the nodes, "
                f"and that a firewall lets port {endpoint.port} through, and then the ports that torch chooses"
            )
            waiting.look(lambda reason=reason: f" ({reason})", remedy)  # type: ignore[misc]
            time.sleep(LOOK_S)

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
            a name of this launch, which the node with the store has made up.

        Raises:
            UsageError: they differ; names the differences.
        """
        own, endpoint, notes = self._settings(), self.endpoint, self.notes
        if self.server is not None:
            served = {"settings": own, "by": f"process {os.getpid()} on {self.name}", "launch": uuid.uuid4().hex[:12]}
            notes.call(lambda store: store.set("settings", json.dumps(served)))
        foreign = UsageError(
            f"the process that listens at {endpoint} is no launcher of this command",
            where="--rendezvous",
            remedy="give another port; or, if it is left from an earlier run, end it",
        )
        clock = Clock()
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
                f"{there['by']}, which listens at {endpoint}, belongs to another run: {differences[0]}",
                where="--rendezvous",
                remedy="give each run a port of its own; or, if that process is left from an earlier run, end it",
            )
        if differences:
            raise UsageError(
                "\n    ".join([f"{there['by']} was started with something else:", *differences]),
                where=f"node {self.name}",
                remedy="give the same command on all nodes, with the same versions of Lockstep and torch",
            )
        return str(there["launch"])


class Waiting:
    """Says what is waited for, after some seconds and then again and again, and ends the wait.

    Args:
        what: what is waited for.
        limit_s: seconds.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        self.clock, self.tell_at = Clock(), _TELL_AFTER_S

    def look(self, more: Callable[[], str], remedy: str) -> None:
        """Tell of the wait, if it is time.

        Args:
            more: follows what is waited for.

        Raises:
            MissingNodesError: the time is over.
        """
        what = f"{self.what}{more()}"
        error = MissingNodesError(f"waited {self.limit_s:g} s in vain for {what}", where="--rendezvous", remedy=remedy)
        self.look_at(lambda: what, lambda: error)

    def look_at(self, what: Callable[[], str], error: Callable[[], MissingNodesError]) -> None:
        """As `look`, where it takes time to find out what is waited for."""
        seconds = self.clock.look()
        if seconds > self.limit_s:
            raise error()
        if seconds >= self.tell_at:
            print(f"waiting for {what()} ({seconds:.0f} of {self.limit_s:g} s)", file=sys.stderr, flush=True)
            self.tell_at = seconds + _TELL_EVERY_S
