"""The nodes of one start meet, through a rendezvous of torch. Each start has a number, and a rendezvous of its own."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep.core.errors import Preempted
from lockstep.launch.node_session import LOOK_S, MissingNodesError, Session
from lockstep.launch.node_store import BoundedStore, Clock, append_word, gone_after_s

_LAST_CALL_S = 3  # after the least number of nodes is there, so long for further nodes
_FOR_EVER_S = 10**7
_CLOSE_S = 5.0
_LATER_S = 60  # torch waits longer than `meet`, which says for whom


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
    info: RendezvousStoreInfo
    """Where the ranks meet."""
    handler: DynamicRendezvousHandler
    store: BoundedStore
    """The connection of `handler`."""

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

    def close(self) -> None:
        """Close torch's rendezvous of this start. Nodes that wait for a place then look for the next start."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            self.store.submit(lambda store: self.handler.shutdown()).result(_CLOSE_S)
        self.store.close()


class GivenUpError(Exception):
    """A node came and went before the ranks of a start began. The text says which."""


def meet(session: Session, number: int, nproc: int, met: Callable[[], None] = lambda: None) -> Round | None:
    """Wait for the other nodes of start `number`. None: this start is over.

    Args:
        nproc: ranks of this node.
        met: is called as soon as all nodes of the start are there.

    Raises:
        GivenUpError: the nodes must try again, with the next number.
        MissingNodesError: too few nodes came in time.
        StoreLostError: the store does not answer.
        Preempted: another node was asked to stop.
    """
    notes, connection, given_up = session.notes, session.connection(), threading.Event()
    handler = connection.call(lambda store: _handler(session, store, number, given_up))
    notes.call(lambda store: append_word(store, f"{number}/here", str(session.id)))
    future = connection.submit(lambda store: handler.next_rendezvous())
    waiting = session.waiting()
    try:
        while not _is_done(future):
            session.check()
            if notes.call(lambda store: store.check([f"{number}/verdict"])):
                given_up.set()
                connection.close()
                return None
            waiting.look_at(lambda: session.who_is_missing(number), lambda: missing_nodes(session, number))
    except BaseException:
        given_up.set()
        connection.close()
        raise
    try:
        info = future.result()
        met()
    except RendezvousClosedError:
        return None
    except RendezvousTimeoutError:
        raise missing_nodes(session, number) from None
    except Exception as error:  # such as a node that died between two steps of the rendezvous
        session.check()
        raise GivenUpError(f"which came and went ({str(error).splitlines()[0]})") from error
    place = info.bootstrap_store_info
    assert place is not None
    return Round(number, info.rank, _members(session, number, nproc, info), place, handler, connection)


def _is_done(future: Future[RendezvousInfo]) -> bool:
    """Wait a moment. Whether the rendezvous has ended, well or not."""
    with contextlib.suppress(TimeoutError):
        future.exception(LOOK_S)
    return future.done()


class _Endable:
    """A store that refuses all calls from a moment on. torch's rendezvous ends so, which cannot be interrupted."""

    def __init__(self, store: Store, ended: threading.Event) -> None:
        self._store, self._ended = store, ended

    def __getattr__(self, name: str) -> Any:
        if self._ended.is_set():
            raise RuntimeError("the rendezvous was given up")
        return getattr(self._store, name)


def _handler(session: Session, store: Store, number: int, given_up: threading.Event) -> DynamicRendezvousHandler:
    """torch's rendezvous for one start.

    Its heartbeats are switched off, because they compare the clocks of different machines. `Pulse` does it.

    Args:
        given_up: ends a wait within a second or two.
    """
    run_id = f"{session.launch_id}/{number}"
    wait = datetime.timedelta(seconds=session.nodes.wait_s + _LATER_S)
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(_Endable(store, given_up), run_id),  # type: ignore[arg-type]
        session.nodes.least,
        session.nodes.most,
        local_addr=session.address,
        timeout=RendezvousTimeout(join=wait, last_call=datetime.timedelta(seconds=_LAST_CALL_S)),
        keep_alive_interval=_FOR_EVER_S,
        keep_alive_max_attempt=10,
    )
    return handler


def _members(session: Session, number: int, nproc: int, info: RendezvousInfo) -> tuple[Member, ...]:
    """The nodes of a start, when all have come."""
    own = json.dumps(asdict(Member(session.id, session.name, session.address, nproc)))
    session.notes.call(lambda store: store.set(f"{number}/member/{info.rank}", own))
    keys = [f"{number}/member/{rank}" for rank in range(info.world_size)]
    clock = Clock()
    while not session.notes.call(lambda store: store.check(keys)):
        if clock.look() > gone_after_s():
            raise GivenUpError("which came and went")
        session.check()
        time.sleep(LOOK_S / 5)
    return tuple(Member(**json.loads(text)) for text in session.notes.call(lambda store: store.multi_get(keys)))


def missing_nodes(session: Session, number: int) -> MissingNodesError:
    """The error that says which nodes did not come for start `number`."""
    error = MissingNodesError(
        f"waited {session.nodes.wait_s:g} s in vain for {session.who_is_missing(number)}",
        where="--nnodes",
        remedy="give the same command on the other nodes within this time (--wait-for-nodes SECONDS), or a smaller "
        "number, such as --nnodes 1:4",
    )
    if number:
        error.what += ". The checkpoints stay: the same command on all nodes goes on from the newest"
        error.exit_code = Preempted.exit_code
    return error
