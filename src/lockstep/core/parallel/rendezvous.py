"""The place where the ranks of a run meet: a store that all reach, and that holds nothing of an earlier start."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lockstep.core.errors import RankError, UsageError

FILE = "LOCKSTEP_STORE"
"""Environment variable: a file in which ranks of one machine meet, without a port. Each start needs a new file."""
_LONGEST_NAP_S = 0.25
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
            "RANK is set, but MASTER_ADDR or MASTER_PORT is not",
            where="environment",
            remedy="start ranks with --nproc or torchrun",
        )
    try:
        store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = own_part(store, rank, size, timeout_s)
    except dist.DistError as error:
        what = f"rank {rank} did not meet the other ranks: {str(error).splitlines()[0]}"
        raise RankError(what, where=f"MASTER_ADDR={host}, MASTER_PORT={port}", remedy=_REMEDY) from error
    return store


def own_part(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A part of torchrun's own store that belongs only to the processes of this start.

    torchrun's agents keep their store when they restart ranks, so a rank would find the addresses of processes that are
    gone. No variable tells one start from the next, because each node counts its own restarts. So rank 0 makes up a
    name at each start. The other ranks say hello under the name that they find, and stay there once rank 0 has answered
    to all of them. A rank 0 that is gone does not answer; then they look for the next name.

    Raises:
        RankError: the ranks did not meet within `timeout_s` seconds; names the missing ranks.
    """
    return (_call if rank == 0 else _follow)(store, rank, size, _Patience(timeout_s))


class _Patience:
    """Sleeps that grow longer. They are in Python: a rank that waits inside the store does not notice signals."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.deadline, self.nap_s = timeout_s, time.monotonic() + timeout_s, 0.002

    def rest(self, missing: str) -> None:
        """Sleep a little.

        Raises:
            RankError: the time is over; names the ranks that are `missing`.
        """
        if time.monotonic() > self.deadline:
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
        patience.rest(f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}")
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
