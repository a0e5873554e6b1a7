"""The place where the ranks of a run meet: a store that all reach, and that holds nothing of an earlier start."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lockstep.core.errors import RankError, UsageError, listed
from lockstep.core.parallel import launched

FILE = "LOCKSTEP_STORE"
"""Environment variable: a file in which ranks of one machine meet, without a port. Each start needs a new file."""
TELL_S = 10.0
"""A rank that waits for others says so after this time."""
_LONGEST_NAP_S = 0.25
_UNSET = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
_stores: dict[tuple[str | None, str | None, str | None], tuple[Store, Iterator[int]]] = {}
_REMEDY = "look at their output; if torchrun has replaced a node, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def store_of_ranks(rank: int, size: int, timeout_s: float) -> tuple[Store, Iterator[int]]:
    """The store of all ranks, and a counter of the worlds that were joined in it, which is equal on all ranks.

    A process has one store. It is made at the first call.

    Args:
        timeout_s: seconds to wait for the store, and for the other ranks if this is necessary.

    Raises:
        UsageError: the environment does not say where ranks meet.
        RankError: the ranks did not meet in time.
    """
    place = (os.environ.get(FILE), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if place not in _stores:
        _stores[place] = (_make_store(*place, rank, size, timeout_s), itertools.count())
    return _stores[place]


def forget_stores() -> None:
    """Drop the stores of earlier worlds. Call it when all their ranks have left."""
    _stores.clear()


def _make_store(file: str | None, host: str | None, port: str | None, rank: int, size: int, timeout_s: float) -> Store:
    timeout = datetime.timedelta(seconds=timeout_s)
    if file:
        store: Store = FileStore(file, size)
        store.set_timeout(timeout)
        return store
    if not host or not port:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={size} ask for {size} ranks, but MASTER_ADDR or MASTER_PORT is not set",
            where="environment",
            remedy=f"start ranks with --nproc or torchrun; if the variables are left over: {_UNSET}",
        )
    place = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with _said(f"rank {rank} waits for the store of torchrun at {place}"):
                store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
            store = own_part(store, rank, size, timeout_s)
        else:
            store = _store_of_rank_0(host, int(port), rank, size, timeout_s)
    except dist.DistError as error:
        what = f"rank {rank} did not meet the other ranks: {str(error).splitlines()[0]}"
        raise RankError(what, where=place, remedy=_REMEDY) from error
    return store


def _store_of_rank_0(host: str, port: int, rank: int, size: int, timeout_s: float) -> Store:
    """The store that rank 0 holds, when all ranks have reached it.

    torch's store can wait for them too, but neither says for whom, nor notices signals.
    """
    patience, timeout = _Patience(timeout_s, rank, size), datetime.timedelta(seconds=timeout_s)
    with _said(f"rank {rank} waits for rank 0 at MASTER_ADDR={host}, MASTER_PORT={port}{_why(rank, size)}"):
        store = TCPStore(
            host, port, size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True, use_libuv=_uses_libuv()
        )
    if rank:
        store.set(f"reached/{rank}", "")
        return store
    missing = list(range(1, size))
    while missing := [other for other in missing if not store.check([f"reached/{other}"])]:
        patience.rest(_named(missing))
    return store


def _uses_libuv() -> bool:
    return os.environ.get("USE_LIBUV", "1") == "1"  # as torch's rendezvous


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed([str(rank) for rank in ranks], 32)}"


def _why(rank: int, size: int) -> str:
    """Why a rank waits for others. Nobody may have started them, if variables of an earlier launch are left."""
    text = f", because WORLD_SIZE={size} is in the environment"
    if not any(name in os.environ for name in (launched.LAUNCHED, "TORCHELASTIC_RUN_ID")):
        text += f". If you want one process, and the variables are left over: {_UNSET}"
    return text


@contextlib.contextmanager
def _said(text: str) -> Iterator[None]:
    """Print `text` if the block takes long. A thread does it, because the main thread waits inside the store."""
    timer = threading.Timer(TELL_S, launched.tell, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_part(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A part of torchrun's own store that belongs only to the processes of this start.

    torchrun's agents keep their store when they restart ranks, so a rank would find the addresses of processes that are
    gone. No variable tells one start from the next, because each node counts its own restarts. So rank 0 makes up a
    name at each start. The other ranks say hello under the name that they find, and stay there once rank 0 has answered
    to all of them. A rank 0 that is gone does not answer; then they look for the next name.

    Raises:
        RankError: the ranks did not meet within `timeout_s` seconds; names the missing ranks.
    """
    return (_call if rank == 0 else _follow)(store, rank, size, _Patience(timeout_s, rank, size))


class _Patience:
    """Sleeps that grow longer. They are in Python: a rank that waits inside the store does not notice signals."""

    def __init__(self, timeout_s: float, rank: int, size: int) -> None:
        self.timeout_s, self.nap_s, self.rank, self.size = timeout_s, 0.002, rank, size
        self.began, self.is_said = time.monotonic(), False

    def rest(self, missing: str) -> None:
        """Sleep a little.

        Raises:
            RankError: the time is over; names the ranks that are `missing`.
        """
        waited_s = time.monotonic() - self.began
        if waited_s > TELL_S and not self.is_said:
            self.is_said = True
            launched.tell(f"rank {self.rank} waits for {missing}{_why(self.rank, self.size)}")
        if waited_s > self.timeout_s:
            raise RankError(f"{missing} did not join within {self.timeout_s:g} s", remedy=_REMEDY)
        time.sleep(self.nap_s)
        self.nap_s = min(_LONGEST_NAP_S, 1.5 * self.nap_s)


def _call(store: Store, rank: int, size: int, patience: _Patience) -> Store:
    """Rank 0: name a part of the store, wait until all other ranks have said hello, and answer to them."""
    name = uuid.uuid4().hex
    part = PrefixStore(f"lockstep/{name}", store)
    store.set("lockstep/name", name)
    missing = list(range(1, size))
    while True:
        missing = [other for other in missing if not part.check([f"hello/{other}"])]
        if not missing:
            break
        patience.rest(_named(missing))
    part.set("answer", json.dumps([part.get(f"hello/{other}").decode() for other in range(1, size)]))
    return part


def _follow(store: Store, rank: int, size: int, patience: _Patience) -> Store:
    """Every other rank: say hello under the newest name until rank 0 answers."""
    name, me = "", uuid.uuid4().hex
    part = store
    while True:
        if store.check(["lockstep/name"]):
            newest = store.get("lockstep/name").decode()
            if newest != name:
                name, part = newest, PrefixStore(f"lockstep/{newest}", store)
                part.set(f"hello/{rank}", me)
            if part.check(["answer"]) and me in json.loads(part.get("answer")):
                return part
        patience.rest("some of the other ranks" if name else "rank 0")
