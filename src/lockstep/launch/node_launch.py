"""Ranks on several nodes: one launcher on each node, which meet, start their ranks, and decide alike when ranks end.

The launchers share a store, which the node with the address HOST serves. Each start of all ranks has a number, a
rendezvous of torch of its own, and keys of its own in the store:

    alive/NODE        counts up every second while the launcher of the node lives
    stop              who asked the run to stop
    start             the number of the newest start
    N/member/RANK     a node of start N, by its group rank
    N/over            ranks of start N have failed, or a node is gone: all launchers end their ranks
    N/end/RANK        how the ranks of a node ended
    N/verdict         the endings of all nodes: the same text for all launchers, so that they decide the same
    N/left            how many nodes have read the last verdict
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.nodes import NODE
from lockstep.launch import agent, launch_folder, warm_process
from lockstep.launch.decision import Action, Decision, Ending, History, decide
from lockstep.launch.launch import LOST_NODE, RESTARTS, Forwarding, follow, furthest_step, quiet_torch, rank_failures
from lockstep.launch.node_meeting import GivenUpError, Round, meet
from lockstep.launch.node_session import LOOK_S, Nodes, Session
from lockstep.launch.node_store import Clock, StoreLostError

_TELL_EVERY_S = 30.0
_WATCHED = 3  # so many neighbours each node watches while ranks run
_END_S = 90.0  # after ranks have failed, so long for the launchers that live to tell how theirs ended
_LOST_S = 300.0  # a file server keeps the lock of a machine that is off for a while (NFS: 90 s)
_PULSE_S = 2.0  # in which all nodes look for a request to stop
_LEAVE_S = 10.0  # the node with the store waits so long for the others at the end


def launch(
    arguments: Sequence[str],
    nproc: int,
    nodes: Nodes,
    max_restarts: int = 0,
    *,
    main: Callable[[Sequence[str]], None],
) -> None:
    """Run `lockstep ARGUMENTS` as `nproc` ranks on this node, together with the ranks of the other nodes.

    Returns when all ranks of all nodes have ended without error. Restarts are as in `lockstep.launch.launch`.

    Args:
        max_restarts: most restarts after failures of ranks. Restarts because nodes leave or join do not count.
        main: the main function of a rank. It is called with `arguments`, and can be imported by its name.

    Raises:
        RankError: a rank failed, or too few nodes are there. Exit code 75 where the same command may go on.
        UsageError: another node was started with something else.
        Preempted: a signal asked a node to stop, and the ranks of all nodes have saved and stopped.
    """
    quiet_torch()
    stop = Forwarding()
    run = NodeRun(Session(nodes), nproc, max_restarts, stop)
    try:
        run.train(arguments, main)
    except StoreLostError as error:
        if run.has_begun:
            error.exit_code = Preempted.exit_code
            error.what += ". The ranks of this node were ended"
        raise
    finally:
        run.leave()


class NodeRun:
    """The starts of the ranks of one node."""

    def __init__(self, session: Session, nproc: int, max_restarts: int, stop: Forwarding) -> None:
        self.session, self.nproc, self.max_restarts, self.stop = session, nproc, max_restarts, stop
        self.now: Round | None = None
        """The start whose ranks run, or ran last."""
        self.history = History()
        self.joining = False
        """Whether the ranks were asked to stop for a node that joins."""

    @property
    def has_begun(self) -> bool:
        """Whether ranks of this node were started."""
        return self.now is not None

    def train(self, arguments: Sequence[str], main: Callable[[Sequence[str]], None]) -> None:
        """Start the ranks again and again, until the run ends."""
        notes = self.session.notes
        number = notes.call(lambda store: int(store.get("start")) if store.check(["start"]) else 0)
        while True:
            if number:
                self.history = self._decision_of(number - 1).history
            self.session.check()
            if self.stop.asked:
                raise Preempted("stopped between two starts; the checkpoints stay")
            self.stop.folder, self.stop.defers = None, False  # until the nodes have met, a signal raises Preempted
            now = self._meet(number)
            if now is not None:
                self.now = now
                self._start(now, arguments, main)
            decision = self._decision_of(number)
            if decision.action is Action.DONE:
                if now is None:
                    print("the training had ended when this node came", file=sys.stderr, flush=True)
                return
            if decision.action is Action.STOP and now and now.rank and "saved" in decision.text:
                print(decision.text, file=sys.stderr, flush=True)  # on the first node, the log of rank 0 says so
            follow(decision)
            number += 1
            text = str(number)
            notes.call(lambda store, text=text: store.set("start", text))  # type: ignore[misc]

    def _meet(self, number: int) -> Round | None:
        try:
            return meet(self.session, number, self.nproc, met=self._have_met)
        except GivenUpError as error:
            ending = Ending((), lost=(str(error),))
            self._set_verdict(number, ending)
            return None

    def _have_met(self) -> None:
        """From now on the others count on this node: a request to stop waits until `_look` can tell its ranks."""
        self.stop.defers = True

    def _start(self, now: Round, arguments: Sequence[str], main: Callable[[Sequence[str]], None]) -> None:
        """Start the ranks of this node, wait for their end, and agree on a verdict."""
        print(now, file=sys.stderr, flush=True)
        self.joining = False
        neighbours = [now.members[(now.rank + far) % len(now.members)].node for far in range(1, _WATCHED + 1)]
        has_place = len(now.members) < self.session.nodes.most
        self.session.pulse.watch(
            neighbours, f"{now.number}/over", now.handler.num_nodes_waiting if has_place else lambda: 0
        )
        os.environ[RESTARTS] = str(now.number)
        if now.number:  # rank 0 may be on another node than before
            os.environ[LOST_NODE] = str(min(_LOST_S, self.session.nodes.wait_s))
        os.environ[NODE] = self.session.name
        with launch_folder.made(self.nproc) as folder:
            self.stop.folder = folder
            os.environ[heartbeat.FOLDER] = str(folder)
            start = agent.Start(
                rank=now.rank,
                sizes=now.sizes,
                address=now.info.master_addr,
                port=now.info.master_port,
                run_id=self.session.launch_id,
                look=self._look,
            )
            failures = agent.run_ranks(main, (list(arguments),), nproc=self.nproc, folder=folder, start=start)
            gone = warm_process.how_it_ended() if failures else None
            ending = Ending(
                rank_failures(failures, self.session.name),
                furthest_step(folder),
                asked=self.stop.asked or bool(self.session.pulse.stopped_by),
                joining=self.joining,
                warm_process=f"on node {self.session.name}, {gone}" if gone else "",
            )
        self._agree(now, ending)
        now.close()

    def _look(self) -> bool:
        """Pass on requests to stop. Whether the ranks of this node must end, because those of other nodes have failed.

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
        if pulse.gone() and self.now is not None:
            self._set_over(self.now.number)
            return True
        return pulse.is_over

    def _tell_of_request(self) -> None:
        if self.stop.asked:
            self.session.pulse.ask_to_stop(f"{self.stop.asked_by} on node {self.session.name}")

    def _set_over(self, number: int) -> None:
        self.session.notes.call(lambda store: store.set(f"{number}/over", "1"))

    # ---- to agree

    def _agree(self, now: Round, own: Ending) -> None:
        """Tell how the ranks of this node ended, wait for the other nodes, and agree with them on what happened."""
        notes, pulse, number = self.session.notes, self.session.pulse, now.number
        pulse.watch([member.node for member in now.members], f"{number}/over")
        if any(failure.exit_code != Preempted.exit_code for failure in own.failures):
            self._set_over(number)
        text = json.dumps(own.as_dict())
        notes.call(lambda store: store.set(f"{number}/end/{now.rank}", text))
        clock, told = Clock(), _TELL_EVERY_S
        while not notes.call(lambda store: store.check([f"{number}/verdict"])):
            self.session.check_store()
            self._tell_of_request()
            missing, seconds = self._without_ending(now), clock.look()
            gone = [rank for rank in missing if now.members[rank].node in pulse.gone()]
            if seconds > _END_S and pulse.is_over:  # and not where ranks are still saving
                gone = missing
            if gone == missing:
                self._set_verdict(number, self._merged(now, missing))
                break
            if seconds > told:
                names = ", ".join(now.members[rank].name for rank in missing)
                print(f"waiting for the ranks of {names} to end ({seconds:.0f} s)", file=sys.stderr, flush=True)
                told += _TELL_EVERY_S
            time.sleep(LOOK_S / 5 if seconds < 5 else LOOK_S)

    def _without_ending(self, now: Round) -> list[int]:
        """The group ranks of nodes that have not told how their ranks ended."""
        keys = [f"{now.number}/end/{rank}" for rank in range(len(now.members))]

        def look(store: Store) -> list[int]:
            return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]

        return self.session.notes.call(look)

    def _merged(self, now: Round, missing: Sequence[int]) -> Ending:
        """The ending of all nodes."""
        there = [f"{now.number}/end/{rank}" for rank in range(len(now.members)) if rank not in missing]
        texts = self.session.notes.call(lambda store: store.multi_get(there))
        endings = [Ending.of(json.loads(text)) for text in texts]
        return Ending(
            failures=tuple(failure for one in endings for failure in one.failures),
            step=max(one.step for one in endings),
            asked=any(one.asked for one in endings),
            joining=any(one.joining for one in endings),
            lost=tuple(now.members[rank].name for rank in missing),
            warm_process=next((one.warm_process for one in endings if one.warm_process), ""),
        )

    def _set_verdict(self, number: int, ending: Ending) -> None:
        """Say what all nodes decide from, unless another node was faster."""
        verdict = {"ending": ending.as_dict(), "history": asdict(self.history), "max_restarts": self.max_restarts}
        text = json.dumps(verdict)
        self.session.notes.call(lambda store: store.compare_set(f"{number}/verdict", "", text))

    def _decision_of(self, number: int) -> Decision:
        """What follows from the verdict on a start: the same on all nodes."""
        verdict = json.loads(self.session.notes.call(lambda store: store.get(f"{number}/verdict")))
        return decide(Ending.of(verdict["ending"]), History(**verdict["history"]), verdict["max_restarts"])

    # ---- to leave

    def leave(self) -> None:
        """Tell the others of a request to stop. The node with the store waits until they have read the last verdict."""
        with contextlib.suppress(StoreLostError):
            self.session.check_store()
            if self.stop.asked:
                text = f"{self.stop.asked_by} on node {self.session.name}"
                self.session.notes.call(lambda store: store.compare_set("stop", "", text))
            if self.now is not None:
                self._wait_for_others(self.now)
            elif self.stop.asked and self.session.server is not None:
                time.sleep(_PULSE_S)
        self.session.close()

    def _wait_for_others(self, now: Round) -> None:
        notes, clock = self.session.notes, Clock()
        left = notes.call(lambda store: store.add(f"{now.number}/left", 1))
        while self.session.server is not None and clock.look() < _LEAVE_S:
            if left >= len(now.members) - len(self.session.pulse.gone()):
                return
            time.sleep(LOOK_S / 5)
            left = notes.call(lambda store: store.add(f"{now.number}/left", 0))
