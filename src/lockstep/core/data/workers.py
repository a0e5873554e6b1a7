"""The processes that read samples next to the training: what they run, what they return, and how they end."""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.core import shortages, this_process
from lockstep.core.data import handover, inherited, reachable, worker_stacks
from lockstep.core.data.executed_files import ExecutedFiles
from lockstep.core.data.handover import Failure, packed
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import LockstepError, exit_of_task

Plans = Callable[[], Iterable[MicroBatchPlan]]
_PR_SET_PDEATHSIG = 1
LOOK_S = 5.0
"""After this time without a batch, a rank looks whether its workers are alive."""
_LAST_BATCHES_S = 15.0  # how long a worker stays after SIGTERM


def data_loader(
    data: Dataset[Any],
    order: Iterable[Any],
    count: int,
    *,
    pins: bool = False,
    ahead: int = 2,
    stays: bool = True,
    start_method: str | None = None,
) -> DataLoader[Any]:
    """A DataLoader that gives `data[key]` for each key of `order`, read by `count` workers; 0: by this process.

    Args:
        pins: call `pin_memory` of each object.
        ahead: objects that each worker prepares ahead.
        stays: the workers stay for the next iteration.
        start_method: how workers start; see `DataConfig`.
    """
    if count:
        shortages.allow_short_sockets()
    room = shortages.free_files() // (2 * max(1, count) * (ahead + 2))  # for training and evaluation
    return DataLoader(
        data,
        batch_size=None,
        sampler=order,
        num_workers=count,
        collate_fn=as_it_is,
        pin_memory=pins,
        prefetch_factor=ahead if count else None,
        persistent_workers=stays and count > 0,
        timeout=LOOK_S if count else 0,
        multiprocessing_context=(start_method or start_method_for(data)) if count else None,
        worker_init_fn=functools.partial(_begin, room),
        generator=torch.Generator(),  # else the DataLoader draws its seed from the training's generator
    )


def start_method_for(data: Any) -> str | None:
    """How to start workers that read `data`. None: as Python does, which forks on Linux.

    polars hangs in a process that was forked after it had started its threads.
    """
    has_threads = "polars" in sys.modules and any("polars" in name for name in worker_stacks.other_threads())
    return "spawn" if has_threads and reachable.can_be_sent(data) else None


def remarks(loader: DataLoader[Any]) -> list[str]:
    """Warnings about what the workers of a loader will share."""
    reads: Any = loader.dataset
    return inherited.warnings(reads.micro_batches.data) if are_forked(loader) else []


def are_forked(loader: DataLoader[Any]) -> bool:
    """True if the workers of a loader are forked from this process."""
    context: Any = loader.multiprocessing_context or multiprocessing
    return bool(loader.num_workers) and context.get_start_method() == "fork"


class PlanSampler(torch.utils.data.Sampler[MicroBatchPlan]):
    """The plans that the DataLoader reads next. A DataLoader keeps its workers while this object gets other plans."""

    plans: Plans = staticmethod(tuple)

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self.plans())


class SampleReader(Protocol):
    """What a worker calls: see `loader.MicroBatches`."""

    data: Dataset[Any]

    @property
    def made_by(self) -> str: ...
    def __getitem__(self, plan: MicroBatchPlan, /) -> Any: ...
    def sample(self, index: int, epoch: int, /) -> Any: ...


class _InWorker(Dataset[Any]):
    def __init__(self, micro_batches: SampleReader) -> None:
        self.files = ExecutedFiles()  # comes before objects of the classes in them
        self.micro_batches = micro_batches


class CatchErrors(_InWorker):
    """Returns errors of Lockstep instead of raising them."""

    read = 0
    connections: inherited.Connections | None = None

    def __getitem__(self, plan: MicroBatchPlan) -> Any:
        try:
            if torch.utils.data.get_worker_info() is None:
                return self.micro_batches[plan]
            self.connections = self.connections or inherited.Connections(self.micro_batches.data)
            self.read += 1
            batch = self.micro_batches[plan]
            if self.read.bit_count() == 1:  # after 1, 2, 4, ... micro-batches
                self.connections.check()
            return packed(batch, "batch", self.micro_batches.made_by)
        except LockstepError as error:
            return Failure(error)
        except SystemExit as error:
            return Failure(exit_of_task(error))


class SamplePairs(_InWorker):
    """Raw and prepared sample by index and epoch; None for a sample that cannot be read, or not be handed over."""

    def __getitem__(self, key: tuple[int, int]) -> Any:
        try:
            prepared = self.micro_batches.sample(*key)
            return packed((self.micro_batches.data[key[0]], prepared), "sample", self.micro_batches.made_by)
        except Exception:
            return None


def _begin(room: int, _: int) -> None:
    """The first thing that a worker does."""
    _leave_signals_to_the_rank()
    worker_stacks.answer()
    handover.room = room
    for file in inherited.reopen_files():
        print_warning(f"warning: loader workers share their place in {file}. If they read it, samples are mixed up")


def _leave_signals_to_the_rank() -> None:
    """Make a loader worker ignore requests to stop. The rank follows them, and needs batches until all ranks agree.

    A terminal or a scheduler signals all processes of a job. On SIGTERM, which may also come from the rank itself, a
    worker stays long enough for the agreement, and then exits without an error. When the rank is killed, the system
    kills its workers.
    """
    signal.set_wakeup_fd(-1)  # a forked worker shares the rank's file
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)
    if sys.platform == "linux":  # a worker has the rank's files open, and with them the memory of its GPU
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_soon(*_: object) -> None:
    timer = threading.Timer(_LAST_BATCHES_S, os._exit, (0,))
    timer.daemon = True  # a worker that is done need not wait for it
    timer.start()


def after(plans: Plans, done: int) -> Iterable[MicroBatchPlan]:
    """`plans` without the first `done` of them."""
    return itertools.islice(plans(), done, None)


def print_warning(text: str) -> None:
    """Print `text` and the rank to stderr."""
    print(f"[rank {this_process.rank()}] {text}", file=sys.stderr, flush=True)


def as_it_is(value: Any) -> Any:
    return value
