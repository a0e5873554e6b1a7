"""Ranks on several nodes: one launcher on each node, which meet, start their ranks, and decide alike when ranks end.

The launchers share a store, which the node with the address HOST serves. Each start of all ranks has a number, a
rendezvous of torch of its own, and keys of its own in the store:

    alive/NODE        counts up every second while the launcher of the node lives
    stop              who asked the run to stop
    N/member/RANK     a node of start N, by its group rank
    N/over            ranks of start N have failed, or a node is gone: all launchers end their ranks
    N/end/RANK        how the ranks of a node ended
    N/verdict         the endings of all nodes: the same text for all launchers, so that they decide the same
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

import lockstep
from lockstep.distributed import agent, node_address, warm_process
from lockstep.distributed.decision import Action, Decision, Ending, History, decide
from lockstep.distributed.launch import RESTARTS, Forwarding, follow, furthest_step, quiet_torch, rank_failures
from lockstep.distributed.node_address import Endpoint
from lockstep.distributed.node_store import (
    BoundedStore,
    Clock,
    Pulse,
    StoreLostError,
    append_and_read,
    client,
    gone_after_s,
    words,
)
from lockstep.errors import Preempted, RankError, UsageError

NODE = "LOCKSTEP_NODE"
"""Environment variable: the name of this node in messages. Default: the host name."""
SERVES = "LOCKSTEP_RENDEZVOUS_SERVER"
"""Environment variable: 1 if this node serves the store, 0 if it does not, where HOST does not tell it."""
_LOOK_S = 0.25
_LAST_CALL_S = 3  # after the least number of nodes is there, so long for further nodes
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 30.0
_SETTINGS_S = 10.0
_WATCHED = 3  # so many neighbours each node watches while ranks run
_END_S = 90.0  # after ranks have failed, so long for the launchers that live to tell how theirs ended
_LEAVE_S = 10.0  # the node with the store waits so long for the others at the end
_FOR_EVER_S = 10**7


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


@dataclass(frozen=True)
class Member:
    """A node of one start."""

    node: int
    """Its number in the store."""
    name: str
    address: str
    nproc: int


@dataclass(frozen=True)
class Round:
    """One start of all ranks."""

    number: int
    rank: int
    """The group rank of this node."""
    members: tuple[Member, ...]
    """By group rank."""
    info: RendezvousInfo
    handler: DynamicRendezvousHandler

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each node."""
        return [member.nproc for member in self.members]

    def __str__(self) -> str:
        first, parts = 0, []
        for member in self.members[:8]:
            last = first + member.nproc - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            parts.append(f"{member.name} ({member.address}, {ranks})")
            first = last + 1
        more = [f"{len(self.members) - 8} more"] if len(self.members) > 8 else []
        plural = "s" * (len(self.members) > 1)
        return f"{len(self.members)} node{plural}: {', '.join(parts + more)}"


class MissingNodesError(RankError):
    """Too few nodes came."""


def launch(
    arguments: Sequence[str],
    nproc: int,
    nodes: Nodes,
    max_restarts: int = 0,
    *,
    main: Callable[[Sequence[str]], None],
) -> None:
    """Run `lockstep ARGUMENTS` as `nproc` ranks on this node, together with the ranks of the other nodes.

    Returns when all ranks of all nodes have ended without error. Restarts are as in `lockstep.distributed.launch`.

    Raises:
        RankError: a rank failed, or too few nodes are there. Exit code 75 where the same command may go on.
        UsageError: another node was started with something else.
        Preempted: a signal asked a node to stop, and the ranks of all nodes have saved and stopped.
    """
    quiet_torch()
    stop = Forwarding()
    run = NodeRun(nodes, nproc, stop)
    try:
        run.connect()
        run.train(arguments, max_restarts, main)
    except StoreLostError as error:
        error.exit_code = Preempted.exit_code if run.has_begun else 1
        if run.has_begun:
            error.what += ". The ranks of this node were ended"
        raise
    finally:
        run.close()


class NodeRun:
    """The launcher of one node."""

    def __init__(self, nodes: Nodes, nproc: int, stop: Forwarding) -> None:
        self.nodes, self.nproc, self.stop = nodes, nproc, stop
        self.name = os.environ.get(NODE) or socket.gethostname()
        self.server: TCPStore | None = None
        self.notes: BoundedStore | None = None
        self.meeting: BoundedStore | None = None
        self.pulse: Pulse | None = None
        self.id = 0
        self.address = ""
        self.launch_id = ""
        self.round: Round | None = None
        self.joining = False
        self.has_begun = False
        """Whether ranks of this run were started."""

    # ---- to meet

    def connect(self) -> None:
        """Serve the store or connect to it, and check that the node which serves it has the same command."""
        endpoint = self.nodes.endpoint
        addresses = self._find_host()
        serves = os.environ.get(SERVES)
        if serves == "1" or (serves != "0" and any(node_address.is_own(address) for address in addresses)):
            self._serve()
        self.address = node_address.own_address(endpoint.host, addresses)
        interface = node_address.interface_of(self.address)
        if interface and node_address.GLOO_INTERFACE not in os.environ:
            os.environ[node_address.GLOO_INTERFACE] = interface
        if self.server is None:
            self._wait_for_server()
        self.notes = BoundedStore(self._client, str(endpoint))
        self._agree_on_settings(self.notes)
        self.id = int(self.notes.call(lambda store: store.add("nodes", 1)))
        about = f"{self.name} ({self.address}, process {os.getpid()})"
        self.notes.call(lambda store: store.set(f"node/{self.id}", about))
        self.meeting = BoundedStore(self._client, str(endpoint))
        self.pulse = Pulse(self._client, self.id)

    def _client(self) -> Store:
        return client(self.nodes.endpoint.host, self.nodes.endpoint.port, gone_after_s())

    def _find_host(self) -> list[str]:
        waiting = self._waiting(f"the name {self.nodes.endpoint.host} to be known")
        while not (addresses := node_address.resolve(self.nodes.endpoint.host)):
            remedy = "give the name or the address of one of the nodes as --rendezvous HOST:PORT"
            waiting.look(lambda: "", remedy)
            time.sleep(_LOOK_S)
        return addresses

    def _serve(self) -> None:
        endpoint = self.nodes.endpoint
        try:
            self.server = TCPStore(
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
            # Another launcher of this run on this machine, or a process of something else: `_agree_on_settings` sees.

    def _wait_for_server(self) -> None:
        endpoint = self.nodes.endpoint
        waiting = self._waiting(f"the node at {endpoint}, which all nodes meet at")
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
            time.sleep(_LOOK_S)

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

    def _agree_on_settings(self, notes: BoundedStore) -> None:
        """Compare the settings of this node with those of the node that serves the store.

        Raises:
            UsageError: they differ; names the differences.
        """
        own, endpoint = self._settings(), self.nodes.endpoint
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
                time.sleep(_LOOK_S)
            there = json.loads(notes.call(lambda store: store.get("settings")))
        except StoreLostError as error:
            raise foreign from error
        theirs = there["settings"]
        self.launch_id = f"{self.nodes.run_id}-{there['launch']}"
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

    def meet(self, number: int) -> Round | None:
        """Wait for the other nodes of start `number`. None: it is over, or it was given up."""
        assert self.notes is not None and self.meeting is not None
        handler = self.meeting.call(lambda store: self._handler(store, number))
        self.notes.call(lambda store: append_and_read(store, f"{number}/here", str(self.id)))
        future = self.meeting.submit(lambda store: handler.next_rendezvous())
        waiting = self._waiting("")
        while True:
            with contextlib.suppress(TimeoutError):
                try:
                    info = future.result(_LOOK_S)
                    break
                except RendezvousClosedError:
                    return None
                except RendezvousTimeoutError:
                    raise self._missing(number) from None
                except TimeoutError:
                    raise
                except Exception as error:
                    self._check()
                    self._give_up(number, f"a node that came and went ({str(error).splitlines()[0]})")
                    return None
            self._check()
            waiting.look_at(lambda: self._who_is_here(number), lambda: self._missing(number))
        members = self._members(number, info)
        if members is None:
            return None
        return Round(number, info.rank, members, info, handler)

    def _handler(self, store: Store, number: int) -> DynamicRendezvousHandler:
        """torch's rendezvous for one start.

        Its heartbeats are switched off, because they compare the clocks of different machines. `Pulse` does it.
        """
        run_id = f"{self.launch_id}/{number}"
        wait = datetime.timedelta(seconds=self.nodes.wait_s)
        return DynamicRendezvousHandler.from_backend(
            run_id,
            store,
            C10dRendezvousBackend(store, run_id),
            self.nodes.least,
            self.nodes.most,
            local_addr=self.address,
            timeout=RendezvousTimeout(join=wait, last_call=datetime.timedelta(seconds=_LAST_CALL_S)),
            keep_alive_interval=_FOR_EVER_S,
            keep_alive_max_attempt=10,
        )

    def _members(self, number: int, info: RendezvousInfo) -> tuple[Member, ...] | None:
        """The nodes of a start, when all have come. None: a node came and went."""
        assert self.notes is not None
        own = json.dumps(asdict(Member(self.id, self.name, self.address, self.nproc)))
        self.notes.call(lambda store: store.set(f"{number}/member/{info.rank}", own))
        keys = [f"{number}/member/{rank}" for rank in range(info.world_size)]
        clock = Clock()
        while not self.notes.call(lambda store: store.check(keys)):
            if clock.look() > gone_after_s():
                self._give_up(number, "a node that came and went")
                return None
            self._check()
            time.sleep(_LOOK_S / 5)
        return tuple(Member(**json.loads(text)) for text in self.notes.call(lambda store: store.multi_get(keys)))

    def _give_up(self, number: int, node: str) -> None:
        """Agree with the others that a start ends before its ranks begin."""
        assert self.notes is not None
        verdict = self._verdict_text(Ending((), lost=(node,)), 0)
        self.notes.call(lambda store: store.compare_set(f"{number}/verdict", "", verdict))

    def _who_is_here(self, number: int) -> str:
        assert self.notes is not None
        here = self.notes.call(lambda store: words(store, f"{number}/here"))
        names = self.notes.call(lambda store: [store.get(f"node/{node}").decode() for node in here])
        least, endpoint = self.nodes.least, self.nodes.endpoint
        if len(here) > least:
            return f"a place among the nodes at {endpoint}: there are {', '.join(names)}"
        only_here = " (other machines cannot reach this address)" if node_address.is_loopback(self.address) else ""
        missing = max(1, least - len(here))
        return f"{missing} of {least} nodes at {endpoint}{only_here}; there are {', '.join(names)}"

    def _missing(self, number: int) -> MissingNodesError:
        error = MissingNodesError(
            f"waited {self.nodes.wait_s:g} s in vain for {self._who_is_here(number)}",
            where="--nnodes",
            remedy="give the same command on the other nodes within this time (--wait-for-nodes SECONDS), or a smaller "
            "number, such as --nnodes 1:4",
        )
        if self.has_begun:
            error.what += ". The checkpoints stay: the same command on all nodes goes on from the newest"
            error.exit_code = Preempted.exit_code
        return error

    # ---- to train

    def train(self, arguments: Sequence[str], max_restarts: int, main: Callable[[Sequence[str]], None]) -> None:
        """Start the ranks again and again, until the run ends."""
        number = self._current_round()
        history = self._decision_of(number - 1).history if number else History()
        while True:
            self._check()
            if self.stop.asked:
                raise Preempted("stopped between two starts; the checkpoints stay")
            self.stop.folder = None  # as long as no rank runs, a signal raises Preempted
            self.round = self.meet(number)
            if self.round is not None:
                self.has_begun = True
                history = self._start(self.round, arguments, main, history=history, max_restarts=max_restarts)
            decision = self._decision_of(number)
            if decision.action is Action.DONE:
                if self.round is None:
                    print("the run had ended when this node came", file=sys.stderr, flush=True)
                return
            history = follow(decision)
            number += 1
            assert self.notes is not None
            text = str(number)
            self.notes.call(lambda store, text=text: store.set("start", text))  # type: ignore[misc]

    def _current_round(self) -> int:
        assert self.notes is not None
        return self.notes.call(lambda store: int(store.get("start")) if store.check(["start"]) else 0)

    def _start(
        self,
        now: Round,
        arguments: Sequence[str],
        main: Callable[[Sequence[str]], None],
        *,
        history: History,
        max_restarts: int,
    ) -> History:
        """Start the ranks of this node, wait for their end, and agree on a verdict."""
        assert self.pulse is not None and self.notes is not None and self.meeting is not None
        print(now, file=sys.stderr, flush=True)
        self.joining = False
        neighbours = [now.members[(now.rank + far) % len(now.members)].node for far in range(1, _WATCHED + 1)]
        counts = now.handler.num_nodes_waiting if len(now.members) < self.nodes.most else lambda: 0
        self.pulse.watch(neighbours, f"{now.number}/over", counts)
        os.environ[RESTARTS] = str(now.number)
        os.environ[NODE] = self.name
        with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as name:
            folder = self.stop.folder = Path(name)
            os.environ[agent.heartbeat.FOLDER] = name
            failures = agent.run_ranks(
                main, (list(arguments),), nproc=self.nproc, folder=folder, start=self._as_start(now)
            )
            own = rank_failures(failures, self.name)
            ending = Ending(own, furthest_step(folder), self.stop.asked, self.joining)
        gone = warm_process.how_it_ended() if failures else None
        if gone:
            ending = replace(ending, warm_process=f"on node {self.name}, {gone}")
        verdict = self._agree(now, ending, history, max_restarts)
        with contextlib.suppress(TimeoutError, RuntimeError):  # torch's rendezvous of this start is closed for joiners
            self.meeting.submit(lambda store: now.handler.shutdown()).result(_SETTINGS_S)
        return verdict

    def _as_start(self, now: Round) -> agent.Start:
        return agent.Start(
            rank=now.rank,
            sizes=now.sizes,
            address=now.info.bootstrap_store_info.master_addr if now.info.bootstrap_store_info else self.address,
            port=now.info.bootstrap_store_info.master_port if now.info.bootstrap_store_info else 0,
            run_id=self.launch_id,
            look=self._look,
        )

    def _look(self) -> bool:
        """Pass on requests to stop. Whether the ranks of this node must end, because those of other nodes have failed.

        Called twice a second while ranks run.

        Raises:
            StoreLostError: the store does not answer.
        """
        assert self.pulse is not None and self.notes is not None and self.round is not None
        self._check_store()
        if self.stop.asked:
            self.pulse.ask_to_stop(f"{self.stop.asked_by} on node {self.name}")
        elif self.pulse.stopped_by:
            self.stop.pass_on(self.pulse.stopped_by)
        elif self.pulse.has_joining and not self.joining:
            self.joining = True
            self.stop.pass_on("a node that joins")
        if self.pulse.gone():
            self._set_over(self.round.number)
            return True
        return self.pulse.is_over

    def _set_over(self, number: int) -> None:
        assert self.notes is not None
        self.notes.call(lambda store: store.set(f"{number}/over", "1"))

    def _agree(self, now: Round, own: Ending, history: History, max_restarts: int) -> History:
        """Tell how the ranks of this node ended, wait for the other nodes, and agree with them on what happened."""
        assert self.pulse is not None and self.notes is not None
        number = now.number
        self.pulse.watch([member.node for member in now.members], f"{number}/over")
        if any(failure.exit_code != Preempted.exit_code for failure in own.failures):
            self._set_over(number)
        text = json.dumps(own.as_dict())
        self.notes.call(lambda store: store.set(f"{number}/end/{now.rank}", text))
        keys = [f"{number}/end/{rank}" for rank in range(len(now.members))]
        clock, told = Clock(), _TELL_EVERY_S
        while not self.notes.call(lambda store: store.check([f"{number}/verdict"])):
            self._check_store()
            missing = [
                rank for rank, key in enumerate(keys) if not self.notes.call(lambda store, key=key: store.check([key]))
            ]  # type: ignore[misc]
            gone = {rank for rank in missing if now.members[rank].node in self.pulse.gone()}
            seconds = clock.look()
            if seconds > _END_S and (own.failures or self.pulse.is_over):
                gone = set(missing)
            if gone == set(missing):
                verdict = self._merged(now, keys, missing, history, max_restarts)
                self.notes.call(lambda store, verdict=verdict: store.compare_set(f"{number}/verdict", "", verdict))  # type: ignore[misc]
                break
            if seconds > told:
                names = ", ".join(now.members[rank].name for rank in missing)
                print(f"waiting for {names}, whose ranks still run, for {seconds:.0f} s", file=sys.stderr, flush=True)
                told += _TELL_EVERY_S
            if self.stop.asked:
                self.pulse.ask_to_stop(f"{self.stop.asked_by} on node {self.name}")
            time.sleep(_LOOK_S / 5 if seconds < 5 else _LOOK_S)
        return history

    def _merged(
        self, now: Round, keys: Sequence[str], missing: Sequence[int], history: History, max_restarts: int
    ) -> str:
        assert self.notes is not None
        there = [key for rank, key in enumerate(keys) if rank not in missing]
        endings = [Ending.of(json.loads(text)) for text in self.notes.call(lambda store: store.multi_get(there))]
        ending = Ending(
            failures=tuple(failure for one in endings for failure in one.failures),
            step=max(one.step for one in endings),
            asked=any(one.asked for one in endings),
            joining=any(one.joining for one in endings),
            lost=tuple(now.members[rank].name for rank in missing),
            warm_process=next((one.warm_process for one in endings if one.warm_process), ""),
        )
        return self._verdict_text(ending, max_restarts, history)

    def _verdict_text(self, ending: Ending, max_restarts: int, history: History | None = None) -> str:
        history = history or History()
        return json.dumps({"ending": ending.as_dict(), "history": asdict(history), "max_restarts": max_restarts})

    def _decision_of(self, number: int) -> Decision:
        """What follows from the verdict on a start: the same on all nodes."""
        assert self.notes is not None
        verdict = json.loads(self.notes.call(lambda store: store.get(f"{number}/verdict")))
        return decide(Ending.of(verdict["ending"]), History(**verdict["history"]), verdict["max_restarts"])

    # ---- to watch, and to leave

    def _check_store(self) -> None:
        assert self.pulse is not None and self.notes is not None
        if self.pulse.failed:
            raise self.notes.lost(self.pulse.failed)
        silent_s = self.pulse.silence_s()
        if silent_s > gone_after_s():
            raise self.notes.lost(f"no answer for {silent_s:.0f} s")

    def _check(self) -> None:
        """As `_check_store`; and see whether another node was asked to stop, while no rank runs here."""
        assert self.pulse is not None
        self._check_store()
        if self.pulse.stopped_by:
            raise Preempted(f"stopped by {self.pulse.stopped_by}")

    def _waiting(self, what: str) -> Waiting:
        return Waiting(what, self.nodes.wait_s)

    def close(self) -> None:
        """Leave the run. The node with the store waits until the others have read the last verdict."""
        if self.pulse is not None and self.notes is not None and not self.pulse.failed:
            with contextlib.suppress(StoreLostError, Preempted):
                self._leave(self.notes, self.pulse)
        for closing in (self.pulse, self.notes, self.meeting):
            if closing is not None:
                closing.close()

    def _leave(self, notes: BoundedStore, pulse: Pulse) -> None:
        if self.stop.asked and self.round is None:
            text = f"{self.stop.asked_by} on node {self.name}"
            notes.call(lambda store: store.compare_set("stop", "", text), 3)
        if self.round is None:
            return
        key = f"{self.round.number}/left"
        notes.call(lambda store: store.add(key, 1), 3)
        clock = Clock()
        while self.server is not None and clock.look() < _LEAVE_S:
            left = notes.call(lambda store: store.add(key, 0), 3)
            if left >= len(self.round.members) - len(pulse.gone()):
                break
            time.sleep(_LOOK_S / 5)


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
        if seconds > self.limit_s + 10:  # torch's rendezvous itself ends after `limit_s`
            raise error()
        if seconds >= self.tell_at:
            print(f"waiting for {what()} ({seconds:.0f} of {self.limit_s:g} s)", file=sys.stderr, flush=True)
            self.tell_at = seconds + _TELL_EVERY_S
