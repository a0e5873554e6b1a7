"""The processes of a run: which of them this process is, and how they exchange values and fail together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import io
import operator
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.core import devices, shortages, this_process
from lockstep.core.errors import LockstepError, Preempted, UsageError, described, number_of
from lockstep.core.parallel import device_errors, heartbeat, torch_internals, tree, virtual
from lockstep.core.parallel.failure import FailureBoard
from lockstep.core.parallel.heartbeat import Heartbeat
from lockstep.core.parallel.launched import LAUNCHED, report_failure
from lockstep.core.parallel.local_sums import MOST_RANKS, MOST_VALUES, LocalSums, connected
from lockstep.core.parallel.nodes import NodeGroup, Nodes, group_of, own_key, own_name
from lockstep.core.parallel.rendezvous import store_of_ranks

T = TypeVar("T")
_MOST_IN_RING = 4  # this many ranks are as quick with gloo's ring, which is a single call
_ABORT_S = 10.0  # after a failure, so long for the end of the process groups
_retired: list[dist.ProcessGroup | None] = []


@atexit.register
def _release_groups() -> None:
    """Drop process groups that are no longer used, after everything else that refers to them.

    gloo's threads may still need the interpreter's lock to drop the tensors of the last collective. The destructor of
    the Python object waits for these threads without holding the lock. DDP's reducer, if it has the last reference,
    waits with the lock and never wakes (seen with torch 2.13). So the Python object must be dropped last.
    """
    if _retired:
        gc.collect()
        _retired.clear()


def retire(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Keep process groups alive until this process has left the world; see `_release_groups`."""
    _retired.extend(groups)


@dataclass(frozen=True)
class World:
    """This process among all processes of the run. One process is a world of size 1, with the same methods."""

    rank: int
    """0 to size - 1, over all nodes."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process on its node, from 0."""
    device: torch.device
    """The device on which this rank computes."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Where this rank notes its progress, for those who watch it from outside."""
    tag: int = 1
    """The tag of the messages by which this thread gathers and broadcasts; see `in_background`."""
    timeout: datetime.timedelta | None = None
    """How long a collective waits for other ranks. None: torch's default."""
    tensor: int = 1
    """So many neighbouring ranks, a tensor group, hold the layers of one model together, and get the same samples."""
    strategy: Callable[[World, Any], Any] | None = None
    """Makes the strategy from world and options, if ranks form a mesh; see `lockstep.mesh`. None: the options do."""
    held: contextlib.ExitStack | None = field(default=None, repr=False, compare=False)
    """Closes what the ranks share when they leave each other. None: this world was not joined."""
    virtual_ranks: int | None = None
    """Number of virtual ranks, over which samples are divided; see `virtual`. None: over the ranks themselves."""

    @functools.cached_property
    def replica(self) -> int:
        """The number of this rank's copy of the model: of its tensor group. Without a mesh, each rank is a group."""
        return self.rank // self.tensor

    @functools.cached_property
    def replicas(self) -> int:
        """Number of copies of the model."""
        return self.size // self.tensor

    @functools.cached_property
    def data_ranks(self) -> range:
        """The shards of a global batch that this rank computes. Samples and seeds depend on their numbers, not on the
        rank: its virtual ranks, or the number of its tensor group."""
        if self.virtual_ranks is None:
            return range(self.replica, self.replica + 1)
        return virtual.held(self.rank, self.size, self.virtual_ranks)

    @functools.cached_property
    def data_size(self) -> int:
        """Number of shards of a global batch, over all ranks."""
        return self.virtual_ranks or self.replicas

    @property
    def is_group_leader(self) -> bool:
        """True if this rank is the first of its tensor group, which counts what all of the group know alike."""
        return self.rank % self.tensor == 0

    @functools.cached_property
    def nodes(self) -> Nodes:
        """Which ranks share a node. The first use is a collective: all ranks make it at the same place."""
        found: list[tuple[str, str, str]] = self.broadcast(self.gather((own_key(), own_name(), str(self.device))))
        keys, names, devices = zip(*found, strict=True)
        return Nodes(keys, names, devices)

    @functools.cached_property
    def node_group(self) -> NodeGroup | None:
        """The ranks of this node; one of them reads for all. None: this rank has its node to itself.

        The first use is a collective: all ranks make it at the same place.
        """
        nodes = self.nodes
        # A rank that waits here for a failed rank learns of the failure. Within `new_group`, it would wait while it
        # holds the interpreter's lock.
        self.all_sum([0.0])
        found = group_of(nodes, self.rank, self.heartbeat)
        retire([found.group] if found else [])
        return found

    @functools.cached_property
    def local_sums(self) -> LocalSums | None:
        """Faster sums, for a few ranks on one machine. None: elsewhere. The first use is a collective."""
        if self.held is None or self.size > MOST_RANKS or self.nodes.count > 1:
            return None
        timeout_s = None if self.timeout is None else self.timeout.total_seconds()
        found = connected(self.rank, self.size, lambda own: self.broadcast(self.gather(own)), timeout_s)
        return found and self.held.enter_context(contextlib.closing(found))

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each of `values` over all ranks, in float64 on the host (exact for integers below 2**53)."""
        if self.size == 1:
            return list(values)
        return self._combined(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM, torch.add).tolist()

    def all_sum_later(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """As `all_sum`, but the ranks wait for each other in the function that is returned, if they are few."""
        if self.size > 1 and self.local_sums is not None and len(values) <= MOST_VALUES:
            return self.local_sums.begin(values)
        if self.size == 1 or self.size > _MOST_IN_RING:
            found = self.all_sum(values)
            return lambda: found
        packed = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(packed, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return packed.tolist()

        return wait

    def sum_once(self, values: Sequence[float]) -> list[float]:
        """As `all_sum`, of figures that belong to samples: each tensor group counts once."""
        return self.all_sum(values if self.is_group_leader else [0.0] * len(values))

    def sum_in_order(self, values: Sequence[Sequence[float]]) -> list[float]:
        """As `sum_once`, of each of `data_ranks`: the same bits on any number of ranks, if they are virtual."""
        return self.sum_in_order_later(values)()

    def sum_in_order_later(self, values: Sequence[Sequence[float]]) -> Callable[[], list[float]]:
        """As `sum_in_order`; see `all_sum_later`."""
        summed = self.all_sum_later(self.slots(values))
        return lambda: self.in_order(summed(), len(values[0]))

    def slots(self, values: Sequence[Sequence[float]]) -> list[float]:
        """The figures of `data_ranks`, each at its own place: `in_order` makes sums of the `all_sum` of all ranks."""
        if self.virtual_ranks is None:
            return list(values[0]) if self.is_group_leader else [0.0] * len(values[0])
        found = [0.0] * (self.virtual_ranks * len(values[0]))
        for number, figures in zip(self.data_ranks, values, strict=True):
            found[number * len(figures) : (number + 1) * len(figures)] = figures
        return found

    def in_order(self, slots: Sequence[float], width: int) -> list[float]:
        """The sums of `width` figures over all data ranks. For `slots`, see there."""
        if self.virtual_ranks is None:
            return list(slots)
        return [functools.reduce(operator.add, slots[place::width]) for place in range(width)]

    def all_max(self, value: int) -> int:
        """The largest of `value` over all ranks."""
        if self.size == 1:
            return value
        found: list[int] = self._combined(torch.tensor([value]), dist.ReduceOp.MAX, torch.maximum).tolist()
        return found[0]

    def _combined(self, values: torch.Tensor, op: Any, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
        if self.size > _MOST_IN_RING:
            return tree.combined(values, combine, self.rank, self.size)
        dist.all_reduce(values, op=op)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """The `value` of every rank, in rank order, on rank 0; None elsewhere. Any picklable object.

        Tensors in it arrive on the CPU.
        """
        if self.size == 1:
            return [value]
        found = tree.gathered(_packed(value), self.rank, self.size, self.tag)
        return None if found is None else [pickle.loads(packed.numpy().data) for packed in found]

    def gather_once(self, value: Any) -> list[Any] | None:
        """As `gather`, of what belongs to samples: the `value` of the first rank of each tensor group."""
        found = self.gather(value if self.is_group_leader else None)
        return None if found is None else found[:: self.tensor]

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have the same shape, in rank order, on every rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank. Any picklable object. On other ranks, tensors in it arrive on the CPU."""
        if self.size == 1:
            return value
        own = _packed(value) if self.rank == 0 else None
        packed = tree.passed_on(own, self.rank, self.size, self.tag)
        return value if self.rank == 0 else pickle.loads(packed.numpy().data)

    def on_rank0(self, call: Callable[[], T]) -> T:
        """The value that `call` returns on rank 0, on every rank.

        Raises:
            LockstepError: on every rank, if `call` raises it on rank 0.
        """
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = call()
            except LockstepError as error:
                outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, LockstepError):
            raise outcome
        value: T = outcome
        return value

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0. Tensors on the same device travel together."""
        if self.size == 1:
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        # The largest elements come first, so each tensor begins at a multiple of its element size.
        for tensor in sorted(tensors, key=torch.Tensor.element_size, reverse=True):
            by_device.setdefault(tensor.device, []).append(tensor)
        for alike in by_device.values():
            flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in alike]  # gloo does not know every dtype
            packed = flat[0] if len(flat) == 1 else torch.cat(flat)
            dist.broadcast(packed, 0)
            if self.rank and (len(alike) > 1 or not alike[0].is_contiguous()):
                parts = zip(alike, torch.split(packed, [tensor.nbytes for tensor in alike]), strict=True)
                torch._foreach_copy_(alike, [values.view(tensor.dtype).view(tensor.shape) for tensor, values in parts])

    def in_background(self) -> World:
        """The same ranks, for a background thread: it may `gather` and `broadcast`, whatever the main thread does.

        Collectives of two threads in one group take each other's messages. Messages with their own tag do not, so
        that no second group, with a connection for each pair of ranks, is needed.
        """
        return replace(self, tag=2)


class _HostPickler(pickle.Pickler):
    """Writes tensors as tensors on the CPU. A tensor on a GPU would arrive on that GPU, which is another rank's."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            on_host = value.detach().cpu().requires_grad_(value.requires_grad)
            return on_host.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _packed(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    _HostPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def pick_device(wanted: str, local_rank: int, local_size: int, *, size: int = 1) -> torch.device:
    """The device of a local rank: `auto` takes CUDA if there is a GPU, and mps for a single rank on a Mac.

    If a rank sees a single GPU, this is its GPU, whatever its number: a scheduler may show each rank its own GPU
    alone (srun --gpus-per-task=1). `join_world` checks that no other rank has the same GPU.

    Args:
        wanted: auto, cpu, cuda or mps.
        local_size: ranks on this machine.
        size: ranks on all machines.

    Raises:
        UsageError: `cuda` or `mps` is wanted and absent, a node has fewer GPUs than ranks, or there are several ranks
            with `mps`.
    """
    if wanted == "mps":
        return _mps(max(size, local_size))
    gpus = devices.gpus() if wanted != "cpu" else 0
    if wanted == "auto" and not gpus and max(size, local_size) == 1 and devices.has_mps():
        return _mps(1)
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if gpus == 0:
        raise UsageError("no CUDA device is visible", where="device=cuda", remedy="use device=cpu or device=auto")
    if gpus == 1 and LAUNCHED not in os.environ:  # our launcher gives all ranks the same environment
        return torch.device("cuda", 0)
    if local_size > gpus:
        raise UsageError(
            f"{local_size} ranks on a machine with {number_of(gpus, 'GPU')}",
            where="--nproc",
            remedy=f"use --nproc {gpus}, or device=cpu",
        )
    if local_rank >= gpus:
        raise UsageError(
            f"local rank {local_rank} needs its own GPU, and {number_of(gpus, 'GPU', 'is', 'are')} visible, "
            "numbered from 0",
            where=f"LOCAL_RANK={local_rank}",
            remedy=(
                f"start at most {number_of(gpus, 'rank')} on a machine, or let the scheduler bind one GPU to each rank"
            ),
        )
    return torch.device("cuda", local_rank)


def _mps(ranks: int) -> torch.device:
    if ranks > 1:
        raise UsageError(
            f"{ranks} ranks, but mps is a device for one rank: a Mac has one GPU, and gloo and NCCL do not support it",
            where="device=mps",
            remedy="use --nproc 1, or device=cpu",
        )
    if not devices.has_mps():
        what = "this machine has no Metal device, or its macOS is too old for torch"
        if not torch.backends.mps.is_built():
            what = "this build of torch has no mps"
        raise UsageError(what, where="device=mps", remedy="use device=cpu or device=auto")
    return torch.device("mps", 0)


Watch = Callable[[World, Store | None], Any]
"""Begins to watch for hangs, and gives an object with a method `close`."""


@contextlib.contextmanager
def join_world(device: str = "auto", timeout_s: float = 600.0, watch: Watch | None = None) -> Iterator[World]:
    """Join the ranks that RANK, WORLD_SIZE and LOCAL_RANK describe (set by torchrun), and leave them at the end.

    If this rank fails, the other ranks end with a `RankError` that names it and shows its traceback; see
    `FailureBoard`.

    Args:
        device: auto, cpu, cuda or mps.
        timeout_s: how long a rank waits for other ranks if nobody watches for hangs, in seconds.
        watch: begins to watch for hangs, and gives an object with a method `close`. It gets the world, and a store that
            all ranks reach (None if there is one rank), before the process group is made. `close` is called when the
            group is gone.
    """
    rank, size = this_process.rank(), this_process.ranks()
    local_rank = this_process.local_rank()
    place = pick_device(device, local_rank, this_process.local_ranks(), size=size)
    devices.of(place).select()
    # A rank that waits is not at fault. A watch finds the rank that makes the others wait.
    patience = datetime.timedelta(seconds=timeout_s) if watch is None else datetime.timedelta(days=7)
    world = World(rank, size, local_rank, place, heartbeat.own(), timeout=patience)
    if size == 1:
        with contextlib.suppress(shortages.ShortageError):  # what needs many files may not be used
            shortages.allow_open_files(size)
        with _watched(world, None, watch), device_errors.explained(), shortages.explained():
            yield world
        return
    if dist.is_initialized():
        raise UsageError(
            "there is a process group already",
            where="torch.distributed.init_process_group",
            remedy="leave this call out of the script: Lockstep makes the group; or call destroy_process_group first",
        )
    shortages.allow_open_files(size)
    # A process has one store. Each world has a part of it, because the same ranks may join and leave several times.
    shared, numbers = store_of_ranks(rank, size, timeout_s)
    store = PrefixStore(f"lockstep/{next(numbers)}", shared)
    backend = devices.of(place).group_backend
    # The failure board and the watch live until the group is gone: to leave a group may take forever, too.
    with (
        contextlib.ExitStack() as held,
        contextlib.closing(FailureBoard(store, rank, size)) as failures,
        _watched(world, PrefixStore("watchdog", store), watch),
    ):
        try:
            with device_errors.explained(), shortages.explained():
                _check_own_rank(world, PrefixStore("ranks", store))
                _check_own_device(world, PrefixStore("devices", store))
                dist.init_process_group(
                    backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=patience
                )
                _release_groups()
                _retired.append(dist.group.WORLD)
                yield replace(world, held=held)
        except Preempted:  # all ranks stop together
            _leave()
            raise
        except BaseException as error:
            other = failures.explain(error) if isinstance(error, Exception) else None
            _leave_after(other or error, rank)
            if other is not None:
                raise other from error
            raise
        _leave()


def _leave() -> None:
    """Leave the process groups, when all collectives have ended."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()


def _leave_after(error: BaseException, rank: int) -> None:
    """Leave the process groups after a failure, without waiting for collectives, which may never end.

    A rank that has failed may be missing in them. Even giving them up takes forever if a driver hangs. So the
    failure is reported first, and this process ends if the groups are not gone after `_ABORT_S`.
    """
    if dist.is_initialized():
        text = str(error) if isinstance(error, LockstepError) else described(error)
        if isinstance(error, Exception):
            report_failure(error, text)
        thread = threading.Thread(target=_abort, name="lockstep-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)
        if thread.is_alive():
            if LAUNCHED not in os.environ:
                print(f"[rank {rank}] error: {text}", file=sys.stderr, flush=True)
            os._exit(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1))
    _forget_meshes()


def _abort() -> None:
    try:
        torch_internals.abort_groups()
    except Exception as error:  # the failure of the run matters more
        print(f"note: the process groups could not be given up: {error}", file=sys.stderr, flush=True)


def _check_own_rank(world: World, store: Store) -> None:
    """Check that no other process has this rank.

    Raises:
        UsageError: another process has it; names both.
    """
    own = f"process {os.getpid()} on {own_name()}"
    owner = store.compare_set(str(world.rank), "", own).decode()
    if owner != own:
        raise UsageError(
            f"two processes are rank {world.rank}: {owner}, and {own}",
            where=f"RANK={world.rank}",
            remedy="give each process its own rank, from 0 to WORLD_SIZE - 1: with torchrun, let the nodes have "
            "different --node-rank, or use --rdzv-endpoint",
        )


def _check_own_device(world: World, store: Store) -> None:
    """Check that no other rank computes on this rank's device, if a device takes one rank.

    A rank that sees a single GPU cannot know whether the other ranks of its machine see another GPU, or the same. Two
    parts of a divided GPU (MIG) may have the same identity, but not the same environment.

    Raises:
        UsageError: another rank has this GPU; names both ranks.
    """
    identity = devices.of(world.device).identity()
    if identity is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = f"{own_name()}/{identity}/{visible}"
    owner = int(store.compare_set(name, "", str(world.rank)))
    if owner != world.rank:
        raise UsageError(
            f"ranks {owner} and {world.rank} on {own_name()} have the same GPU",
            where=f"LOCAL_RANK={world.local_rank}, CUDA_VISIBLE_DEVICES={visible or 'not set'}",
            remedy="give each rank a GPU: start fewer ranks, set LOCAL_RANK to 0, 1, ... on each machine, or let the "
            "scheduler bind a GPU to each task (srun --gpus-per-task=1)",
        )


def _forget_meshes() -> None:
    """Let torch forget the meshes of the groups that are gone.

    torch keeps these meshes in its cache of operations on sharded tensors, and gives them to the next tensors on an
    equal mesh. The names of their groups then belong to other groups, or to none.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # private; tested by joining again

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _watched(world: World, store: Store | None, watch: Watch | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if watch is None else contextlib.closing(watch(world, store))
