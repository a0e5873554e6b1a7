"""Where the ranks of a run meet: a store that all of them reach, and that holds nothing of an earlier start."""

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

from lockstep.errors import RankError, UsageError

FILE = "LOCKSTEP_STORE"  # environment variable: a file by which ranks of one machine meet, without a port; a new one for each start
_LONGEST_NAP_S = 0.25
_stores: dict[tuple[str | None, str | None, str | None], tuple[Store, Iterator[int]]] = {}
_REMEDY = "look at their output; where torchrun has replaced a node, start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def store_of_ranks(rank: int, size: int, timeout_s: float) -> tuple[Store, Iterator[int]]:
    """The store of all ranks, and a counter of stays in it that is equal on all of them. One per process, made at the first call.

    Args:
        timeout_s: how long to wait for the store, and for the other ranks where they must be waited for.

    Raises:
        UsageError: the environment does not say where ranks meet.
        RankError: they did not meet in time.
    """
    place = (os.environ.get(FILE), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if place not in _stores:
        _stores[place] = (_made(*place, rank, size, timeout_s), itertools.count())
    return _stores[place]


def forget_stores() -> None:
    """Let go of the stores of earlier worlds, when all their ranks have left."""
    _stores.clear()


def _made(file: str | None, host: str | None, port: str | None, rank: int, size: int, timeout_s: float) -> Store:
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
    """A part of torchrun's own store that the processes of this start have for themselves.

    torchrun's agents keep that store when they restart ranks, and a rank would find the addresses of processes that are
    gone. No variable tells one start from the next: each node counts its restarts for itself. So rank 0 makes a name up at
    each start. The others say hello under the name that they find, and stay where rank 0 answers to all of them: one that is
    gone does not, and they look for the next name.

    Raises:
        RankError: they did not meet within `timeout_s`; names the ranks that were missing.
    """
    return (_call if rank == 0 else _follow)(store, rank, size, _Patience(timeout_s))


class _Patience:
    """Short naps, which grow. In Python: a signal would not be heard by a rank that waits inside the store."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.deadline, self.nap_s = timeout_s, time.monotonic() + timeout_s, 0.002

    def rest(self, missing: str) -> None:
        """Nap; or raise, naming who is `missing`, where that has lasted too long."""
        if time.monotonic() > self.deadline:
            raise RankError(f"{missing} did not join within {self.timeout_s:g} s", remedy=_REMEDY)
        time.sleep(self.nap_s)
        self.nap_s = min(_LONGEST_NAP_S, 1.5 * self.nap_s)


def _call(store: Store, rank: int, size: int, patience: _Patience) -> Store:
    """Rank 0: name a part, wait until all others are there, and answer to them."""
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
    """Any other rank: say hello under the newest name until rank 0 answers."""
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
