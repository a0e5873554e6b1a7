"""The processes that read samples next to the training: what they run, what they return, and how they end."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.core import this_process
from lockstep.core.data.executed_files import ExecutedFiles
from lockstep.core.data.handover import Failure, packed
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import LockstepError, exit_of_task

Plans = Callable[[], Iterable[MicroBatchPlan]]
_PR_SET_PDEATHSIG = 1
_LAST_BATCHES_S = 15.0  # how long a worker stays after SIGTERM


def data_loader(
    data: Dataset[Any], order: Iterable[Any], count: int, *, pins: bool = False, ahead: int = 2, stays: bool = True
) -> DataLoader[Any]:
    """A DataLoader that gives `data[key]` for each key of `order`, read by `count` workers; 0: by this process.

    Args:
        pins: call `pin_memory` of each object.
        ahead: objects that each worker prepares ahead.
        stays: the workers stay for the next iteration.
    """
    return DataLoader(
        data,
        batch_size=None,
        sampler=order,
        num_workers=count,
        collate_fn=as_it_is,
        pin_memory=pins,
        prefetch_factor=ahead if count else None,
        persistent_workers=stays and count > 0,
        worker_init_fn=_leave_signals_to_the_rank,
        generator=torch.Generator(),  # else the DataLoader draws its seed from the training's generator
    )


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

    def __getitem__(self, plan: MicroBatchPlan) -> Any:
        try:
            return packed(self.micro_batches[plan], "batch", self.micro_batches.made_by)
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


def _leave_signals_to_the_rank(_: int) -> None:
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
