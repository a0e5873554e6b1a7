"""Ranks on several nodes: one launcher per node. They meet, start their ranks, and decide together when ranks end.

The launchers share a store, which the node with the address HOST serves. Each start of all ranks has a number, and its
own keys in the store:

    node/NODE         a launcher, by its number
    alive/NODE        counts up every second while the launcher of the node lives
    stop              who asked the run to stop
    start             the number of the newest start
    N/here            the nodes that came for start N
    N/members         those that take part, by their group ranks: the first node that sees enough of them decides it
    N/waiting         a node came too late, and waits for the next start
    N/ready/RANK      a node of start N has read that it takes part; and a free port
    N/met             whether all nodes of start N were ready in time
    N/over            ranks of start N have failed, or a node is gone: all launchers end their ranks
    N/end/RANK        how the ranks of a node ended
    N/verdict         the endings of all nodes: the same text for all launchers, so that they decide the same
    N/left            how many nodes have read the last verdict
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.core.errors import Preempted, RankError, WatchError, number_of
from lockstep.core.parallel.launched import LOST_NODE
from lockstep.core.parallel.nodes import NODE
from lockstep.launch.decision import Action, Decision, Ending, StartHistory, decide
from lockstep.launch.launcher import Forwarding, start_until_done
from lockstep.launch.node_address import LOOK_S, MissingNodesError, ProcessClock, Waiting, is_loopback
from lockstep.launch.node_session import Member, RendezvousParameters, Session, StoreLostError, gone_after_s
from lockstep.launch.start import Start, free_port

_LAST_CALL_S = 3.0  # once the least number of nodes is there, how long to wait for more
_TELL_EVERY_S = 30.0
_WATCHED = 3  # neighbours that each node watches while ranks run
_END_S = 90.0  # after ranks have failed, the time for live launchers to report how theirs ended
_LOST_S = 300.0  # a file server keeps the lock of a dead machine for a while (NFS: 90 s)
_PULSE_S = 2.0  # within which all nodes look for a request to stop
_LEAVE_S = 10.0  # how long the node with the store waits for the others at the end


def launch(
    arguments: Sequence[str],
    nproc: int,
    nodes: RendezvousParameters,
    max_restarts: int = 0,
    *,
    main: Callable[[Sequence[str]], None],
) -> None:
    """Call `main(arguments)` on `nproc` ranks on this node, together with the ranks of the other nodes.

    Returns when all ranks of all nodes have ended without error. Restarts are as in `launcher.launch`.

    Args:
        max_restarts: the most restarts after failures of ranks. Restarts because nodes leave or join do not count.
        main: the main function of a rank. It must be importable by name.

    Raises:
        RankError: a rank failed, or there are too few nodes. Exit code 75 if the same command may resume.
        UsageError: another node was started with different settings.
        Preempted: a signal asked a node to stop, and the ranks of all nodes have saved and stopped.
    """
    stop = Forwarding()
    launchers = SeveralNodes(Session(nodes, nproc), max_restarts, stop)
    try:
        start_until_done(launchers, arguments, nproc, main, stop)
    except StoreLostError as error:
        if launchers.members:
            error.exit_code = Preempted.exit_code
            error.what += ". The ranks of this node were ended"
        raise
    finally:
        launchers.leave()


class SeveralNodes:
    """The launchers of several nodes, from the point of view of one node's."""

    def __init__(self, session: Session, max_restarts: int, stop: Forwarding) -> None:
        self.session, self.max_restarts, self.stop = session, max_restarts, stop
        self.history = StartHistory()
        self.number = 0
        """The start whose ranks are running, or ran last."""
        self.members: list[Member] = []
        """Its nodes, by their group ranks. Empty: no rank of this node was started."""
        self.rank = 0
        """The group rank of this node."""
        self.joining = False
        """True if the ranks were asked to stop because a node joins."""
        self.left_out = ""
        """Why this node no longer takes part. It only serves the store, if it has it."""

    @functools.cached_property
    def first(self) -> int:
        """The number of the next start, at which this node joins."""
        found = self.session.notes.call(lambda store: int(store.get("start")) if store.check(["start"]) else 0)
        if found:
            self.history = self._decision_of(found - 1).history
        return found

    # ---- to meet

    def meet(self, number: int) -> Start | None:
        """Wait for the other nodes of start `number`. None: this start is over.

        Raises:
            MissingNodesError: too few nodes came in time.
            StoreLostError: the store does not answer.
            Preempted: a node was asked to stop.
        """
        self.session.check()
        self.stop.check()
        self.stop.folder, self.stop.defers = None, False  # until the nodes have met, a signal raises Preempted
        members = self._members_of(number)
        if members is None:
            return None
        self.stop.defers = True  # the others rely on this node: a request waits until `_look` can notify its ranks
        rank = [member.node for member in members].index(self.session.id)
        port = self._port_of(number, rank, len(members))
        if port is None:
            self._set_verdict(number, Ending((), lost=("which came and went",)))
            return None
        self.number, self.members, self.rank, self.joining = number, members, rank, False
        print(_words(members), file=sys.stderr, flush=True)
        neighbours = [members[(rank + far) % len(members)].node for far in range(1, _WATCHED + 1)]
        has_place = len(members) < self.session.nodes.most
        self.session.pulse.watch(neighbours, f"{number}/over", f"{number}/waiting" if has_place else "")
        if number:  # rank 0 may have moved to a different node
            os.environ[LOST_NODE] = str(min(_LOST_S, self.session.nodes.wait_s))
        os.environ[NODE] = self.session.name
        sizes = [member.nproc for member in members]
        return Start(rank, sizes, members[0].address, port, self.session.launch_id, self._look)

    def _members_of(self, number: int) -> list[Member] | None:
        """The nodes of a start that includes this node. None: the start is over."""
        notes, nodes, own = self.session.notes, self.session.nodes, str(self.session.id)
        if self.left_out:
            self._serve_until_over(number)
            return None
        notes.call(lambda store: store.append(f"{number}/here", f"{own} "))  # type: ignore[attr-defined]
        remedy = "run the same command on the other nodes in this time (--wait-for-nodes SECONDS), or give a smaller "
        waiting = Waiting(nodes.wait_s, "--nnodes", remedy + "number, such as --nnodes 1:4")
        clock, enough_at = ProcessClock(), float("inf")
        while not notes.call(lambda store: store.check([f"{number}/verdict"])):
            self.session.check()
            here, members, seconds = self._words_in(f"{number}/here"), self._words_in(f"{number}/members"), clock.look()
            if own in members:
                return self.session.members(members)
            if members:
                notes.call(lambda store: store.set(f"{number}/waiting", "1"))
            elif len(here) >= nodes.least:
                enough_at = min(enough_at, seconds)
                if len(here) >= nodes.most or seconds > enough_at + _LAST_CALL_S:
                    self._choose(number, here[: nodes.most])
                    continue
            try:
                waiting.look(lambda: self._missing(number))
            except MissingNodesError as error:
                if number:
                    error.what += ". The checkpoints are kept: the same command on all nodes resumes from the newest"
                    error.exit_code = Preempted.exit_code
                raise
            _rest(seconds)
        return None

    def _serve_until_over(self, number: int) -> None:
        """Keep the store for the others until a start is over, if this node has it; otherwise leave.

        Raises:
            RankError: this node has no store to keep.
        """
        if self.session.server is None:
            raise self._left_out_error()
        clock = ProcessClock()
        while not self.session.notes.call(lambda store: store.check([f"{number}/verdict"])):
            self.session.check()
            _rest(clock.look())

    def _left_out_error(self) -> RankError:
        error = RankError(
            f"this node no longer takes part: {self.left_out}",
            where=f"node {self.session.name}",
            remedy="run the vendor's diagnostics on this machine before it trains again",
        )
        error.exit_code = WatchError.exit_code
        return error

    def _choose(self, number: int, nodes: Sequence[str]) -> None:
        """Decide which nodes take part in a start, unless another node was faster."""
        members = sorted(self.session.members(nodes), key=lambda one: (one.address, one.process, one.node))
        text = " ".join(str(member.node) for member in members)
        self.session.notes.call(lambda store: store.compare_set(f"{number}/members", "", text))

    def _port_of(self, number: int, rank: int, size: int) -> int | None:
        """The port at which the ranks of a start meet, when all its nodes are ready. None: some came and went."""
        notes, own, clock = self.session.notes, str(free_port()), ProcessClock()
        keys = [f"{number}/ready/{other}" for other in range(size)]
        notes.call(lambda store: store.set(keys[rank], own))
        while not (ready := notes.call(lambda store: store.check(keys))) and clock.look() <= gone_after_s():
            self.session.check()
            _rest(0)
        outcome = notes.call(lambda store: store.compare_set(f"{number}/met", "", "all" if ready else "not all"))
        return int(notes.call(lambda store: store.get(keys[0]))) if outcome == b"all" else None

    def _missing(self, number: int) -> str:
        """The nodes that a start waits for, and those that are there."""
        nodes, here = self.session.nodes, self.session.members(self._words_in(f"{number}/here"))
        names = ", ".join(f"{one.name} ({one.address}, process {one.process})" for one in here)
        if len(here) > nodes.least:
            return f"a free place among the nodes at {nodes.endpoint}: present are {names}"
        only_here = " (other machines cannot reach this address)" if is_loopback(self.session.address) else ""
        missing = max(1, nodes.least - len(here))
        return f"{missing} of {nodes.least} nodes at {nodes.endpoint}{only_here}; present are {names}"

    def _words_in(self, key: str) -> list[str]:
        """The words of a text in the store; empty if there is none."""

        def read(store: Store) -> list[str]:
            return list(dict.fromkeys(store.get(key).decode().split())) if store.check([key]) else []

        return self.session.notes.call(read)

    # ---- while ranks run

    def _look(self) -> bool:
        """Pass on requests to stop. True if the ranks of this node must end, because those of other nodes have failed.

        Called twice a second while ranks run.

        Raises:
            StoreLostError: the store does not answer.
        """
        pulse = self.session.pulse
        self.session.check_store()
        self._tell_of_request()
        if pulse.stopped_by:
            self.stop.pass_on(pulse.stopped_by)
        elif pulse.has_joining and not self.joining:
            self.joining = True
            self.stop.pass_on("a node that joins")
        if pulse.gone():
            self._set_over()
            return True
        return pulse.is_over

    def _tell_of_request(self) -> None:
        if self.stop.asked:
            self.session.pulse.ask_to_stop(f"{self.stop.asked_by} on node {self.session.name}")

    def _set_over(self) -> None:
        self.session.notes.call(lambda store: store.set(f"{self.number}/over", "1"))

    # ---- to agree

    def agree(self, number: int, ending: Ending | None) -> Decision:
        """Decide what follows after start `number`, on all nodes, once all have reported how their ranks ended."""
        if ending is not None:
            self._tell(ending)
        decision = self._decision_of(number)
        self.history = decision.history
        if self.session.name in decision.left_out and ending is not None:
            self.left_out = decision.text.splitlines()[0]
        if self.left_out and decision.action is Action.DONE:
            raise self._left_out_error()
        if decision.action is Action.DONE and ending is None:
            print("the training had ended when this node came", file=sys.stderr, flush=True)
        if decision.action is Action.STOP and ending is not None and self.rank and "saved" in decision.text:
            print(decision.text, file=sys.stderr, flush=True)  # on the first node, rank 0 logs it
        if decision.action is Action.RESTART:
            self.session.notes.call(lambda store: store.set("start", str(number + 1)))
        return decision

    def _tell(self, ending: Ending) -> None:
        """Report how the ranks of this node ended, wait for the other nodes, and agree with them on what happened."""
        notes, pulse, number, name = self.session.notes, self.session.pulse, self.number, self.session.name
        own = replace(
            ending,
            failures=tuple(replace(failure, node=name) for failure in ending.failures),
            asked=ending.asked or bool(pulse.stopped_by),
            joining=self.joining,
            warm_process=f"on node {name}, {ending.warm_process}" if ending.warm_process else "",
        )
        pulse.watch([member.node for member in self.members], f"{number}/over")
        if any(failure.exit_code != Preempted.exit_code for failure in own.failures):
            self._set_over()
        notes.call(lambda store: store.set(f"{number}/end/{self.rank}", json.dumps(own.as_dict())))
        clock, told = ProcessClock(), _TELL_EVERY_S
        while not notes.call(lambda store: store.check([f"{number}/verdict"])):
            self.session.check_store()
            self._tell_of_request()
            missing, seconds = self._without_ending(), clock.look()
            gone = [rank for rank in missing if self.members[rank].node in pulse.gone()]
            if seconds > _END_S and pulse.is_over:  # but not if ranks are still saving
                gone = missing
            if gone == missing:
                self._set_verdict(number, self._merged(missing))
                break
            if seconds > told:
                names = ", ".join(self.members[rank].name for rank in missing)
                print(f"waiting for the ranks of {names} to end ({seconds:.0f} s)", file=sys.stderr, flush=True)
                told += _TELL_EVERY_S
            _rest(seconds)

    def _without_ending(self) -> list[int]:
        """The group ranks of nodes that have not reported how their ranks ended."""
        keys = [f"{self.number}/end/{rank}" for rank in range(len(self.members))]

        def look(store: Store) -> list[int]:
            return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]

        return self.session.notes.call(look)

    def _merged(self, missing: Sequence[int]) -> Ending:
        """The ending of all nodes."""
        there = [f"{self.number}/end/{rank}" for rank in range(len(self.members)) if rank not in missing]
        texts = self.session.notes.call(lambda store: store.multi_get(there))
        endings = [Ending.of(json.loads(text)) for text in texts]
        return Ending(
            failures=tuple(failure for one in endings for failure in one.failures),
            step=max(one.step for one in endings),
            asked=any(one.asked for one in endings),
            joining=any(one.joining for one in endings),
            lost=tuple(self.members[rank].name for rank in missing),
            warm_process=next((one.warm_process for one in endings if one.warm_process), ""),
            nodes=tuple(member.name for member in self.members),
            least=self.session.nodes.least,
        )

    def _set_verdict(self, number: int, ending: Ending) -> None:
        """Publish what all nodes base their decision on, unless another node was faster."""
        verdict = {"ending": ending.as_dict(), "history": asdict(self.history), "max_restarts": self.max_restarts}
        self.session.notes.call(lambda store: store.compare_set(f"{number}/verdict", "", json.dumps(verdict)))

    def _decision_of(self, number: int) -> Decision:
        """The decision that follows from the verdict on a start: the same on all nodes."""
        verdict = json.loads(self.session.notes.call(lambda store: store.get(f"{number}/verdict")))
        return decide(Ending.of(verdict["ending"]), StartHistory(**verdict["history"]), verdict["max_restarts"])

    # ---- to leave

    def leave(self) -> None:
        """Notify the others of a request to stop. The node with the store waits until all have read the last
        verdict."""
        with contextlib.suppress(StoreLostError):
            self.session.check_store()
            if self.stop.asked:
                text = f"{self.stop.asked_by} on node {self.session.name}"
                self.session.notes.call(lambda store: store.compare_set("stop", "", text))
            if self.members:
                self._wait_for_others()
            elif self.stop.asked and self.session.server is not None:
                time.sleep(_PULSE_S)
        self.session.close()

    def _wait_for_others(self) -> None:
        notes, clock = self.session.notes, ProcessClock()
        left = notes.call(lambda store: store.add(f"{self.number}/left", 1))
        while self.session.server is not None and clock.look() < _LEAVE_S:
            if left >= len(self.members) - len(self.session.pulse.gone()):
                return
            time.sleep(LOOK_S / 5)
            left = notes.call(lambda store: store.add(f"{self.number}/left", 0))


def _rest(seconds: float) -> None:
    """Sleep before the next poll, for less time in the first `seconds` of a wait."""
    time.sleep(LOOK_S / 5 if seconds < 5 else LOOK_S)


def _words(members: Sequence[Member]) -> str:
    """The nodes of a start, with their ranks."""
    first, parts = 0, []
    for member in members[:8]:
        last = first + member.nproc - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        parts.append(f"{member.name} ({member.address}, {ranks})")
        first = last + 1
    more = [f"{len(members) - 8} more"] if len(members) > 8 else []
    return f"{number_of(len(members), 'node')}: {', '.join(parts + more)}"
