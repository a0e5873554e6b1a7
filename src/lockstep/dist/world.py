"""The processes of a run: who am I, how do we agree, and how do we all stop when one of us fails."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import RankError, UsageError

_FAILURE = "failure"
_LEFT = "left"
_sessions = itertools.count()


@dataclass(frozen=True)
class World:
    """This process among all processes of the run. One process is a world of size 1, with the same methods.

    rank: 0 to size - 1 over all nodes. local_rank: on this node. device: where this rank computes.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each of `values` over all ranks, in float64 on the host (exact for integers below 2**53)."""
        if self.size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.tolist()  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any] | None:
        """The `value` of every rank, in rank order, on rank 0; None elsewhere. Any picklable object."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank. Any picklable object."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def pick_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a local rank: `auto` takes CUDA where there is any.

    Raises:
        UsageError: CUDA is wanted and absent, or a node has fewer GPUs than ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise UsageError("no CUDA device is visible", where="device=cuda", remedy="use device=cpu or device=auto")
    if local_size > gpus:
        raise UsageError(
            f"{local_size} ranks on a machine with {gpus} GPUs", where="--nproc", remedy=f"use --nproc {gpus}, or device=cpu"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def join_world(device: str = "auto", timeout_s: float = 600.0, init_method: str | None = None) -> Iterator[World]:
    """Join the ranks that RANK, WORLD_SIZE and LOCAL_RANK describe (set by torchrun), and leave them at the end.

    Where this rank fails, it tells the others and closes its connections; they end with a `RankError` that names the
    failed rank and shows its traceback, instead of waiting for it.

    Args:
        device: auto, cpu or cuda.
        timeout_s: a collective that takes longer is an error.
        init_method: a rendezvous URL instead of the environment's MASTER_ADDR and MASTER_PORT.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = pick_device(device, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    world = World(rank, size, local_rank, place)
    if size == 1:
        yield world
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    # One store per process, one name space per stay: the same ranks may join and leave several times.
    store = dist.PrefixStore(f"lockstep/{next(_sessions)}", _store(init_method or "env://", rank, size, timeout))
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout)
    try:
        yield world
    except Exception as error:
        other = _announce(store, world, error)
        dist.destroy_process_group()  # closes the connections: ranks that wait for this one wake with an error
        _linger(store, world)
        if other is not None:
            raise other from error
        raise
    else:
        dist.destroy_process_group()


@functools.cache
def _store(init_method: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    store: dist.Store = next(dist.rendezvous(init_method, rank, size, timeout=timeout))[0]
    return store


def _announce(store: dist.Store, world: World, error: Exception) -> RankError | None:
    """Tell the others that this rank failed; or, where another failed before, return an error that says so."""
    mine = {"rank": world.rank, "what": str(error), "traceback": traceback.format_exc()}
    lost = isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
    try:
        deadline = time.monotonic() + (3.0 if lost else 0.0)
        while not store.check([_FAILURE]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if lost and not store.check([_FAILURE]):
            return _silent_death(world, error)
        first = json.loads(store.compare_set(_FAILURE, "", json.dumps(mine)))
    except dist.DistError:  # the store went with rank 0's process: nobody can be asked or told
        return _silent_death(world, error) if lost else None
    if first["rank"] == world.rank:
        return None
    return RankError(
        f"rank {first['rank']} failed: {first['what']}\n{first['traceback']}",
        where=f"rank {world.rank} stopped because of it",
        remedy=f"the fault is on rank {first['rank']}; see its traceback above",
    )


def _silent_death(world: World, error: Exception) -> RankError:
    return RankError(
        f"lost the connection to another rank, which left no word: {str(error).splitlines()[0]}",
        where=f"rank {world.rank}",
        remedy="it was probably killed; look for the out-of-memory killer in the system's log",
    )


def _linger(store: dist.Store, world: World, patience_s: float = 5.0) -> None:
    """Rank 0 often holds the store: it stays until the others have read from it who failed."""
    with contextlib.suppress(dist.DistError):
        left = store.add(_LEFT, 1)
        deadline = time.monotonic() + patience_s
        while world.rank == 0 and left < world.size and time.monotonic() < deadline:
            time.sleep(0.05)
            left = store.add(_LEFT, 0)
