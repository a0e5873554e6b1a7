"""From the plan's indices to batches on the device: prepared under each sample's own RNG, in workers, ahead of use."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data.order import MicroBatchPlan, StepPlan, derive_seed, micro_batches
from lockstep.data.randomness import SampleSeeding, seed_all
from lockstep.errors import DataError, LockstepError, TrainingError, exits_are_failures

OnError = Literal["raise", "skip"]
Weights = dict[str, float] | None
Plan = Callable[[], Iterable[MicroBatchPlan]]
Bad = tuple[tuple[int, str], ...]

_NONE_BAD: Bad = ()
_LAST_BATCHES_S = 15.0
_OF_A_BATCH = 0x0BA7C4  # a word of the seeds of micro-batches, which tells them from those of samples
_SUBSTITUTES = 32  # how many samples are tried where a whole micro-batch cannot be read


class SampleTask(Protocol):
    """The part of a `Task` that runs in loader workers."""

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any: ...
    def collate(self, samples: list[Any]) -> Any: ...
    def weight(self, batch: Any) -> Any: ...


def is_default(method: Callable[..., Any]) -> bool:
    """Whether a bound method of a task is the one that `Task` has. Its function is marked by an attribute that holds the function
    itself: decorators copy attributes to what they make."""
    function = getattr(method, "__func__", None)
    return function is not None and getattr(function, "default", None) is function


@dataclass
class MicroBatch:
    """One micro-batch, ready for the forward pass.

    batch: what the task's `collate` returned. indices: of its samples. epoch: theirs.
    weights: units per head, as the task counts them, or None where the unit is the sample.
    filler: True where it counts for nothing (zero weight).
    bad: (index, message) of samples that could not be read and were left out.
    """

    batch: Any
    indices: tuple[int, ...]
    epoch: int
    weights: Weights
    filler: bool
    bad: Bad = ()

    @property
    def samples(self) -> int:
        """Samples that count."""
        return 0 if self.filler else len(self.indices)

    def pin_memory(self) -> MicroBatch:
        return replace(self, batch=map_tensors(self.batch, lambda t: t.pin_memory()))


class MicroBatches(Dataset[MicroBatch]):
    """A data set of micro-batches: `chunks[chunk]` reads, prepares and collates the samples of one `Chunk`.

    A sample's random numbers (torch, NumPy, Python) depend on (seed, epoch, index) alone, those of `collate` on the epoch
    and the first index of the micro-batch.
    """

    def __init__(
        self, data: Dataset[Any], task: SampleTask, seed: int, training: bool, on_error: OnError = "raise"
    ) -> None:
        self.data, self.task, self.seed, self.training, self.on_error = data, task, seed, training, on_error
        # Of the bound methods: a task may have methods set on the object, and wrappers pass on those of the task within.
        self.prepares, self.collates = not is_default(task.prepare), not is_default(task.collate)
        self.at_once = type(data) is TensorDataset and not self.prepares and not self.collates
        self.read_many = None if self.prepares else getattr(data, "__getitems__", None)
        self.seeding = SampleSeeding(lazily=self.read_many is not None)

    def __getitem__(self, chunk: MicroBatchPlan) -> MicroBatch:
        if self.at_once:  # what reading and collating these samples one by one gives
            rows = torch.tensor(chunk.indices)
            batch = [tensor[rows] for tensor in self.data.tensors]  # type: ignore[attr-defined]
            return self._micro(chunk, batch, chunk.indices, chunk.filler, _NONE_BAD)
        while True:
            self.seeding.begin(derive_seed(self.seed, chunk.epoch))
            samples, indices, bad = self._read(chunk)
            if not self.seeding.found_more():  # at most once for each generator
                break
        filler = chunk.filler or not indices
        if not indices:
            samples, indices = self._substitute(chunk)
        if self.collates:
            seed_all(derive_seed(self.seed, chunk.epoch, chunk.indices[0], _OF_A_BATCH))
        return self._micro(chunk, self.task.collate(samples), indices, filler, _NONE_BAD if chunk.filler else bad)

    def _micro(self, chunk: MicroBatchPlan, batch: Any, indices: tuple[int, ...], filler: bool, bad: Bad) -> MicroBatch:
        if batch is None:
            raise TrainingError(
                "it returned None",
                where="Task.collate",
                remedy="return a batch: tensors, or dicts, lists or tuples of them",
            )
        return MicroBatch(batch, indices, chunk.epoch, _as_floats(self.task.weight(batch), filler), filler, bad)

    def _read(self, chunk: MicroBatchPlan) -> tuple[list[Any], tuple[int, ...], Bad]:
        """Samples, their indices, and those that could not be read; raises on the first of these where they may not be skipped."""
        try:
            return self._read_all(chunk.indices, chunk.epoch), chunk.indices, _NONE_BAD
        except Exception:
            return self._one_by_one(chunk)

    def _read_all(self, indices: tuple[int, ...], epoch: int) -> list[Any]:
        if self.read_many is not None and not self.seeding.drawn:
            samples = list(self.read_many(list(indices)))
            if len(samples) == len(indices):
                return samples
        of_epoch = derive_seed(self.seed, epoch)
        return [self._read_one(index, epoch, of_epoch) for index in indices]

    def _one_by_one(self, chunk: MicroBatchPlan) -> tuple[list[Any], tuple[int, ...], Bad]:
        samples, indices, bad = [], [], []
        for index in chunk.indices:
            try:
                samples.append(self._read_one(index, chunk.epoch, derive_seed(self.seed, chunk.epoch)))
                indices.append(index)
            except Exception as error:
                if self.on_error == "raise":
                    raise self._unreadable(index, error) from error
                bad.append((index, str(self._unreadable(index, error))))
        return samples, tuple(indices), tuple(bad)

    def _read_one(self, index: int, epoch: int, of_epoch: int) -> Any:
        self.seeding.seed(derive_seed(index, state=of_epoch))
        sample = self.data[index]
        return self.task.prepare(sample, epoch, self.training) if self.prepares else sample

    def sample(self, index: int, epoch: int) -> Any:
        """Sample `index` as the task prepares it for `epoch`: the same on every rank, in every worker, after every restart."""
        seed_all(derive_seed(self.seed, epoch, index))
        return self.task.prepare(self.data[index], epoch, self.training)

    def _substitute(self, chunk: MicroBatchPlan) -> tuple[list[Any], tuple[int, ...]]:
        """Any readable sample: a micro-batch where all are bad still needs a forward pass, of weight zero."""
        length = len(self.data)  # type: ignore[arg-type]
        for step in range(1, min(length, _SUBSTITUTES) + 1):
            index = (chunk.indices[0] + step) % length
            try:
                return [self.sample(index, chunk.epoch)], (index,)
            except Exception:  # noqa: S112 - the next one may be readable; none is an error below
                continue
        raise DataError(
            f"none of {_SUBSTITUTES} samples in a row can be read",
            where=self._name(chunk.indices[0]),
            remedy="data.on_error=skip is for single bad samples; check the path and format of the data",
        )

    def _unreadable(self, index: int, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return DataError(error.what, where=error.where or self._name(index), remedy=error.remedy)
        return DataError(
            f"sample {index} cannot be read: {type(error).__name__}: {error}",
            where=self._name(index),
            remedy="repair or remove it, or set data.on_error=skip to train without it",
        )

    def _name(self, index: int) -> str:
        """File name, where the data set knows it."""
        where = getattr(self.data, "where", None)
        return str(where(index)) if where else f"{type(self.data).__name__}[{index}]"


@dataclass
class Failure:
    """An exception on its way out of a loader worker: torch would rebuild it from its text alone."""

    error: Exception

    def pin_memory(self) -> Failure:
        return self


class Loader:
    """Micro-batches of this rank in the order of a plan, prepared by `workers` processes, copied to the device ahead.

    Args:
        chunks: what to read.
        workers: processes that prepare; 0 prepares in this process.
        device: where batches end up.
        channels_last: give tensors of four dimensions (images) that memory format.
    """

    def __init__(self, chunks: MicroBatches, workers: int, device: torch.device, channels_last: bool = False) -> None:
        self.chunks, self.device, self.channels_last = chunks, device, channels_last
        self.order = _Order()
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.batches: DataLoader[MicroBatch] = DataLoader(
            _Caught(chunks),
            batch_size=None,
            sampler=self.order,
            num_workers=workers,
            collate_fn=_same,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_leave_signals_to_the_rank,
            generator=torch.Generator(),  # the loader's own seed must not come out of the training's RNG
        )

    def run(self, plan: Plan) -> Generator[MicroBatch, None, None]:
        """The micro-batches of `plan`, one after the other."""
        self.order.plan = plan
        for micro in self.batches:
            if isinstance(micro, Failure):
                raise micro.error
            yield self._to_device(micro)

    def one(self, index: int) -> Any:
        """The batch of one sample, read in this process."""
        return self._to_device(self.chunks[MicroBatchPlan((index,), 0, False)]).batch

    def _to_device(self, micro: MicroBatch) -> MicroBatch:
        if self.channels_last:
            micro.batch = map_tensors(
                micro.batch, lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t
            )
        if self.copies is None:
            return micro
        # On a stream of its own: the host is ahead of the device, so this copy overlaps the step before.
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copies):
            micro.batch = map_tensors(micro.batch, lambda t: t.to(self.device, non_blocking=True))
        compute.wait_stream(self.copies)
        map_tensors(micro.batch, lambda t: t.record_stream(compute))
        return micro


class StepIterator:
    """This rank's micro-batches of steps `start` to `stop` - 1, step by step, as `plan` cuts them."""

    def __init__(self, loader: Loader, plan: StepPlan, rank: int, start: int, stop: int) -> None:
        self.loader, self.plan, self.rank, self.stop = loader, plan, rank, stop
        self._steps = _steps(loader, plan, rank, start, stop)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        return next(self._steps)

    def halve(self, step: int) -> None:
        """Begin again at `step`, with micro-batches of half the size: the same samples."""
        self._steps.close()
        self.plan = replace(self.plan, micro_batch=-(-self.plan.micro_batch // 2))
        self._steps = _steps(self.loader, self.plan, self.rank, step, self.stop)


def _steps(loader: Loader, plan: StepPlan, rank: int, start: int, stop: int) -> Generator[list[MicroBatch], None, None]:
    """No method: a generator that refers to its owner is freed late, and the loader's workers would be left to the end of the process."""

    def chunks() -> Iterator[MicroBatchPlan]:
        for step in range(start, stop):
            yield from plan.rank_micro_batches(step, rank)

    with contextlib.closing(loader.run(chunks)) as micros:
        for step in range(start, stop):
            yield [next(micros) for _ in range(micro_batches(plan.samples(step), plan.world, plan.micro_batch))]


class _Order(torch.utils.data.Sampler[MicroBatchPlan]):
    """What the data loader reads next; one loader (and its workers) serves one plan after the other."""

    plan: Plan = staticmethod(tuple)

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self.plan())


class _Caught(Dataset[Any]):
    def __init__(self, chunks: MicroBatches) -> None:
        self.chunks = chunks

    def __getitem__(self, chunk: MicroBatchPlan) -> MicroBatch | Failure:
        try:
            with exits_are_failures():
                return self.chunks[chunk]
        except LockstepError as error:
            return Failure(error)


def _leave_signals_to_the_rank(_: int) -> None:
    """In a loader worker: requests to stop are the rank's to follow, which still needs batches until all ranks agree.

    A terminal or a scheduler signals all processes of a job. On SIGTERM, which may also be how the rank ends its
    workers, a worker stays long enough for the agreement, and then goes without complaint.
    """
    signal.set_wakeup_fd(-1)  # the rank's own, which a fork shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)


def _leave_soon(*_: object) -> None:
    timer = threading.Timer(_LAST_BATCHES_S, os._exit, (0,))
    timer.daemon = True  # no reason to stay when the work is done
    timer.start()


def _same(micro: Any) -> Any:
    return micro


def _as_floats(weights: Any, filler: bool) -> Weights:
    """What `Task.weight` returned, as numbers by head, in the order of the heads' names: the same on every rank.

    Raises:
        TrainingError: not a number, or a number that counts nothing: negative, or not finite.
    """
    if weights is None:
        return None
    by_head = weights if isinstance(weights, Mapping) else {"loss": weights}
    if not by_head:
        raise TrainingError(
            "it returned an empty dict", where="Task.weight", remedy="return None where the unit is the sample"
        )
    named = {head: _number(head, value) for head, value in by_head.items()}
    return {head: 0.0 if filler else named[head] for head in sorted(named)}


def _number(head: Any, value: Any) -> float:
    remedy = "return how many units the loss sums over: a number, a tensor of one number, or a dict of these by head"
    if not isinstance(head, str):
        raise TrainingError(
            f"a head is called {head!r}, a {type(head).__name__}", where="Task.weight", remedy="use text as keys"
        )
    is_number = isinstance(value, torch.Tensor | numbers.Real | np.ndarray | np.generic) and not isinstance(value, bool)
    try:
        number = float(value.item() if isinstance(value, np.ndarray) else value) if is_number else math.nan
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers
        is_number = False
    if not is_number:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else f" {value!r}"
        raise TrainingError(
            f"the weight of head {head!r} is a {type(value).__name__}{shape}", where="Task.weight", remedy=remedy
        )
    if not 0 <= number < math.inf:
        raise TrainingError(f"the weight of head {head!r} is {number}", where="Task.weight", remedy=remedy)
    return number


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with every tensor in it changed: dicts, sequences, named tuples, dataclasses, and whatever has `.to`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(
        value, type
    ):  # before mappings: the outputs of Hugging Face models are both
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value
