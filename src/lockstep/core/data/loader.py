"""From planned indices to batches: samples are read in worker processes, each under its own seed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.core.data import private_generators, worker_deaths, workers
from lockstep.core.data.dataset import forward, member_of, name_of
from lockstep.core.data.device_copies import Copy, DeviceCopies
from lockstep.core.data.handover import Failure
from lockstep.core.data.order import MicroBatchPlan, StepPlan, derive_seed, derive_seeds
from lockstep.core.data.randomness import SampleSeeding, restored_generators, seed_all
from lockstep.core.data.sample_errors import error_of_batch, error_of_sample
from lockstep.core.data.tensors import pinned
from lockstep.core.data.worker_memory import Growth
from lockstep.core.data.workers import Plans
from lockstep.core.defaults import is_default
from lockstep.core.errors import DataError, TrainingError, exit_of_task

OnError = Literal["raise", "skip"]
Weights = dict[str, float] | None
Bad = tuple[tuple[int, str], ...]  # index and message of each sample that could not be read

_NONE_BAD: Bad = ()
_COLLATE = 0x0BA7C4  # a word in the seeds of micro-batches, so that no sample has the same seed
_SUBSTITUTES = 32  # how many samples are tried if no sample of a micro-batch can be read


class SampleTask(Protocol):
    """The part of a `Task` that runs in loader workers."""

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any: ...
    def collate(self, samples: list[Any]) -> Any: ...
    def weight(self, batch: Any) -> Any: ...


@dataclass
class MicroBatch:
    """A micro-batch, ready for the forward pass."""

    collated: Any
    """The batch that the task's `collate` returned, in the host's memory."""
    indices: tuple[int, ...]
    """Indices of its samples."""
    epoch: int
    """Epoch of its samples."""
    weights: Weights
    """Units by head, as the task counts them; None: the unit is the sample."""
    filler: bool
    """True if the micro-batch counts with weight zero."""
    bad: Bad = ()
    """Index and message of each sample that could not be read and was left out."""
    words: tuple[int, ...] = ()
    """What distinguishes its samples within the epoch, see `MicroBatchPlan.words`."""
    places: Sequence[Any] = ()
    """What data that are read in one direction report of their place; see `streams.Stream.take_places`."""
    copy: Callable[[Any], Copy] | None = field(default=None, repr=False)
    """Begins to copy `collated` to the device. None: it is there already."""
    _copied: Copy | None = field(default=None, repr=False)

    def begin_copy(self) -> None:
        """Begin to copy the batch to the device, if that has not begun yet."""
        if self._copied is None and self.copy is not None:
            self._copied = self.copy(self.collated)

    @property
    def batch(self) -> Any:
        """The batch on the device. It is copied when it is first asked for, if its copy has not begun yet."""
        self.begin_copy()
        return self.collated if self._copied is None else self._copied.wait()

    def let_go(self) -> None:
        """Free the copy on the device."""
        self._copied = None

    @property
    def samples(self) -> int:
        """Number of samples that count."""
        return 0 if self.filler else len(self.indices)

    def pin_memory(self) -> MicroBatch:
        """A copy in page-locked memory. Called by torch's DataLoader."""
        return replace(self, collated=pinned(self.collated))


def one_ahead(micro_batches: Sequence[MicroBatch]) -> Generator[MicroBatch, None, None]:
    """The micro-batches. Each is on the device until the next is asked for, and the copy of the next has begun."""
    for place, micro_batch in enumerate(micro_batches):
        micro_batch.begin_copy()
        if place + 1 < len(micro_batches):
            micro_batches[place + 1].begin_copy()
        yield micro_batch
        micro_batch.let_go()


class MicroBatches(Dataset[MicroBatch]):
    """A data set of micro-batches: `micro_batches[plan]` reads, prepares and collates samples.

    The random numbers of a sample (from torch, NumPy, Python, or a generator of the data or the task) depend only on
    the run's seed, the epoch and the index. If an order draws samples, they depend on the position instead of the
    index, so that a sample drawn twice differs.
    Those of `collate` depend on the seed, the epoch and the first index, or position, of the micro-batch.

    Args:
        data: raw samples by index.
        task: prepares and collates them.
        seed: of the run.
        training: passed on to `Task.prepare`.
        on_error: `raise`, or `skip` samples that cannot be read.
    """

    def __init__(
        self, data: Dataset[Any], task: SampleTask, seed: int, *, training: bool, on_error: OnError = "raise"
    ) -> None:
        self.data, self.task, self.seed, self.training, self.on_error = data, task, seed, training, on_error
        # Bound methods are compared: methods may be set on the object, and a wrapper may pass on those of another task.
        self.prepares, self.collates = not is_default(task.prepare), not is_default(task.collate)
        self.at_once = type(data) is TensorDataset and not self.prepares and not self.collates
        self.read_many = None if self.prepares else member_of(data, "__getitems__")
        self.seeding = self._new_seeding()
        self.stream = forward(data)

    def _new_seeding(self) -> SampleSeeding:
        private = [] if self.at_once else private_generators.on_host(data=self.data, Task=self.task)
        return SampleSeeding(lazily=self.read_many is not None, private=private)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "seeding"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A worker that is not forked finds the generators again: it has its own global variables and classes."""
        vars(self).update(state)
        self.seeding = self._new_seeding()

    @property
    def made_by(self) -> str:
        """What makes its batches, for errors."""
        own = "Task.collate" if self.collates else "Task.prepare" if self.prepares else ""
        return own or f"{type(self.data).__name__}.__getitem__"

    def __getitem__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self.at_once:  # the same as reading each sample and collating them
            indices = torch.tensor(plan.indices)
            batch = [tensor[indices] for tensor in self.data.tensors]  # type: ignore[attr-defined]
            return self._micro_batch(plan, batch, plan.filler, _NONE_BAD)
        if self.stream is not None:
            self.stream.read_ahead(plan.indices)
        while True:
            self.seeding.begin(derive_seed(self.seed, plan.epoch))
            samples, read, bad = self._read(plan)
            if not self.seeding.found_more():  # otherwise read again, at most once for each generator
                break
        filler = plan.filler or not samples
        if not samples:
            samples, read = self._substitute(plan)
        if self.collates:
            seed_all(derive_seed(self.seed, plan.epoch, plan.words[0], _COLLATE), self.seeding.private)
        try:
            batch = self.task.collate(samples)
        except Exception as raised:
            if (error := error_of_batch(read.indices, raised)) is None:
                raise
            raise error from raised
        return self._micro_batch(read, batch, filler, _NONE_BAD if plan.filler else bad)

    def _micro_batch(self, read: MicroBatchPlan, batch: Any, filler: bool, bad: Bad) -> MicroBatch:
        if batch is None:
            raise TrainingError(
                "it returned None",
                where="Task.collate",
                remedy="return a batch: tensors, or dicts, lists or tuples of them",
            )
        weights = _as_floats(self.task.weight(batch), filler)
        places = () if self.stream is None else self.stream.take_places()
        return MicroBatch(batch, read.indices, read.epoch, weights, filler, bad, words=read.words, places=places)

    def _read(self, plan: MicroBatchPlan) -> tuple[list[Any], MicroBatchPlan, Bad]:
        """The samples, which they are, and the samples that could not be read.

        Raises:
            DataError: a sample cannot be read, and `on_error` is `raise`.
            TrainingError: the code that reads or prepares samples is at fault; see `error_of_sample`.
        """
        try:
            if self.read_many is not None and not self.seeding.drawn:
                samples = list(self.read_many(list(plan.indices)))
                if len(samples) == len(plan.indices):
                    return samples, plan, _NONE_BAD
            return self._read_seeded(plan), plan, _NONE_BAD
        except Exception:
            return self._read_each(plan)

    def _read_each(self, plan: MicroBatchPlan) -> tuple[list[Any], MicroBatchPlan, Bad]:
        samples, read, bad = [], [], []
        for index, word in zip(plan.indices, plan.words, strict=True):
            method = f"{type(self.data).__name__}.__getitem__"
            try:
                self.seeding.seed(derive_seed(word, state=derive_seed(self.seed, plan.epoch)))
                sample = self.data[index]
                method = "Task.prepare"
                samples.append(self.task.prepare(sample, plan.epoch, self.training) if self.prepares else sample)
                read.append((index, word))
            except Exception as raised:
                error = error_of_sample(index, raised, where=name_of(self.data, index), method=method)
                if self.on_error == "raise" or not isinstance(error, DataError):
                    raise error from raised
                bad.append((index, f"{error.where}: {error.what}"))  # the remedy would advise to leave the sample out
        kept = plan._replace(indices=tuple(index for index, _ in read), positions=tuple(word for _, word in read))
        return samples, kept, tuple(bad)

    def _read_seeded(self, plan: MicroBatchPlan) -> list[Any]:
        """The samples, each under its own seed. This runs for every sample, so it calls little else."""
        data, prepares, prepare, training, samples = self.data, self.prepares, self.task.prepare, self.training, []
        epoch, seeders = plan.epoch, self.seeding.seeders()
        seeds = derive_seeds(plan.words, state=derive_seed(self.seed, epoch)).tolist()
        for index, seed in zip(plan.indices, seeds, strict=True):
            for seed_generator in seeders:
                seed_generator(seed)
            sample = data[index]
            samples.append(prepare(sample, epoch, training) if prepares else sample)
        return samples

    def sample(self, index: int, epoch: int) -> Any:
        """Sample `index` as the task prepares it for `epoch`: the same in every process and after every restart."""
        self.seeding.seed_all(derive_seed(self.seed, epoch, index))
        return self.task.prepare(self.data[index], epoch, self.training)

    def _substitute(self, plan: MicroBatchPlan) -> tuple[list[Any], MicroBatchPlan]:
        """A readable sample, and which it is: a micro-batch of bad samples still needs a pass, of weight zero."""
        length = len(self.data)  # type: ignore[arg-type]
        for step in range(1, min(length, _SUBSTITUTES) + 1):
            index = (plan.indices[0] + step) % length
            try:
                return [self.sample(index, plan.epoch)], MicroBatchPlan((index,), plan.epoch, True)
            except Exception:  # noqa: S112 - the next sample may be readable; if none is, an error follows
                continue
        raise DataError(
            f"none of {_SUBSTITUTES} samples in a row can be read",
            where=name_of(self.data, plan.indices[0]),
            remedy="data.on_error=skip is for single bad samples; check the path and format of the data",
        )


class Loader:
    """Micro-batches of this rank in the order of a plan, prepared by worker processes, and copied to the device ahead.

    Workers of a training stay until its end. Those of an evaluation end with it: a rank may have many sets of data.

    Args:
        micro_batches: reads the micro-batches.
        count: number of worker processes that read samples; 0: this process does.
        device: device of the batches.
        channels_last: give tensors of four dimensions (images) that memory format.
        ahead: micro-batches that each worker prepares ahead.
        start_method: how workers start; see `DataConfig`.
    """

    def __init__(
        self,
        micro_batches: MicroBatches,
        count: int,
        device: torch.device,
        *,
        channels_last: bool = False,
        ahead: int = 2,
        start_method: str | None = None,
    ) -> None:
        self.micro_batches, self.workers, self.ahead, self.device = micro_batches, count, ahead, device
        self.start_method, self.warned = start_method, False
        self.order = workers.PlanSampler()
        self.copies = DeviceCopies(device, channels_last=channels_last)
        self.tell: Callable[[str], None] = workers.print_warning
        """Shows a warning. By default, it goes to stderr."""
        self.batches = self._new_batches()

    def _new_batches(self) -> DataLoader[Any]:
        return workers.data_loader(
            workers.CatchErrors(self.micro_batches),
            self.order,
            self.workers,
            pins=self.copies.stream is not None,
            ahead=self.ahead,
            stays=self.micro_batches.training,
            start_method=self.start_method,
        )

    def run(self, plans: Plans) -> Generator[MicroBatch, None, None]:
        """The micro-batches of `plans`, in order.

        If a worker was killed, all workers are started again, and continue with the next micro-batch. As a sample
        depends only on its index, the epoch and the seed, nothing changes.

        Raises:
            LockstepError: a sample cannot be read, the task failed to prepare it, or a worker was killed again and
                again without a micro-batch in between.
        """
        stream = self.micro_batches.stream
        for micro_batch in self._by_workers(plans) if self.workers else self._read_here(plans):
            micro_batch.copy = None if self.copies.changes_nothing else self.copies.begin
            if stream is not None and micro_batch.places:
                stream.passed(micro_batch.places)
            yield micro_batch
            micro_batch.let_go()

    def _read_here(self, plans: Plans) -> Iterator[MicroBatch]:
        for plan in plans():
            try:
                micro_batch = self.micro_batches[plan]
            except SystemExit as error:
                raise exit_of_task(error) from None
            yield micro_batch if self.copies.stream is None else micro_batch.pin_memory()

    def _by_workers(self, plans: Plans) -> Iterator[MicroBatch]:
        done = deaths = 0
        self.order.plans = plans
        for text in workers.remarks(self.batches) if not self.warned else ():
            self.tell(text)
        self.warned = True
        batches, processes = self._started()
        growth = Growth([process.pid or 0 for process in worker_deaths.newest(self.workers)])

        def where() -> str:
            return self._where(plans, done)

        while True:
            try:
                micro_batch = worker_deaths.given(batches, processes, where, self.tell)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not worker_deaths.caused(error, processes):
                    raise
                deaths += 1
                how = worker_deaths.describe(processes, error)
                if deaths == worker_deaths.MOST_DEATHS:
                    raise worker_deaths.killed_again(how, self._where(plans, done)) from error
                self.tell(f"warning: {how}: workers are started again, and continue with the same samples")
                del batches  # ends the other workers
                self.batches = self._new_batches()
                self.order.plans = functools.partial(workers.after, plans, done)
                batches, processes = worker_deaths.start(self.batches)
                continue
            if isinstance(micro_batch, Failure):
                raise micro_batch.error
            done, deaths = done + 1, 0
            if note := growth.count():
                self.tell(note)
            yield micro_batch

    def _started(self) -> tuple[Iterator[Any], Sequence[BaseProcess]]:
        """Start to iterate. Workers that have ended since the last iteration, or still read for it, are replaced."""
        try:
            return worker_deaths.start(self.batches)
        except RuntimeError as error:
            if not worker_deaths.left_over(error):
                raise
            if worker_deaths.caused(error, ()):
                how = worker_deaths.describe(worker_deaths.newest(self.workers), error)
                self.tell(f"warning: {how}: workers are started again")
        self.batches = self._new_batches()
        return worker_deaths.start(self.batches)

    def _where(self, plans: Plans, done: int) -> str:
        indices = next(iter(workers.after(plans, done))).indices
        listed = f"{list(indices[:8])}{' ...' if len(indices) > 8 else ''}"
        return f"while samples {listed} and later ones were read"

    def read_apart(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[Any, Any]]:
        """Read samples for people to look at. No random state of this process changes.

        If there are workers, another worker reads the samples: this process then opens no file of the data, which later
        workers would inherit.

        Args:
            keys: index and epoch of each sample.

        Returns:
            the raw and the prepared sample by key. Samples that cannot be read are left out.

        Raises:
            DataError: the worker was killed again and again.
        """

        pairs_of = workers.SamplePairs(self.micro_batches)
        make = functools.partial(
            workers.data_loader, pairs_of, keys, int(self.workers > 0), stays=False, start_method=self.start_method
        )
        with restored_generators(self.device):
            pairs = dict(zip(keys, worker_deaths.read_all(make, "samples to look at"), strict=True))
        return {key: pair for key, pair in pairs.items() if pair is not None and not isinstance(pair, Failure)}

    def batch_of(self, index: int) -> Any:
        """A batch of sample `index` alone."""
        (micro_batch,) = self.run(lambda: [MicroBatchPlan((index,), 0, False)])
        return self.copies.begin(micro_batch.collated).wait()


@dataclass
class Extra:
    """Micro-batches that are wanted besides those of a step. The workers read them after these."""

    plans: Callable[[int], Sequence[MicroBatchPlan]] = lambda step: ()
    """Those of a step: the same at each call."""
    given: list[MicroBatch] = field(default_factory=list)
    """Those of the newest step."""


class StepIterator:
    """Iterates over steps `start` to `stop` - 1, and gives a list of this rank's micro-batches, as `plan` splits them.

    Args:
        ranks: the shards of each global batch that this rank computes, see `World.data_ranks`. Their micro-batches
            follow one another.
    """

    def __init__(self, loader: Loader, plan: StepPlan, *, ranks: range, start: int, stop: int) -> None:
        self.loader, self.plan, self.extra = loader, plan, Extra()
        self._steps = _steps(loader, plan, self.extra, ranks, range(start, stop))

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self._steps

    def __next__(self) -> list[MicroBatch]:
        return next(self._steps)


def _steps(
    loader: Loader, plan: StepPlan, extra: Extra, ranks: range, steps: range
) -> Generator[list[MicroBatch], None, None]:
    # Not a method: a generator that holds `self` is freed late, and the loader's workers would outlive the run.
    def plans() -> Iterator[MicroBatchPlan]:
        for step in steps:
            of_ranks = [plan.rank_micro_batches(step, rank) for rank in ranks]
            yield from itertools.chain(*zip(*of_ranks, strict=True))  # in the order of their samples, for a stream
            yield from extra.plans(step)

    with contextlib.closing(loader.run(plans)) as micro_batches:
        for step in steps:
            own = list(itertools.islice(micro_batches, plan.count(step) * len(ranks)))
            if len(ranks) > 1:
                own = [micro_batch for place in range(len(ranks)) for micro_batch in own[place :: len(ranks)]]
            extra.given = list(itertools.islice(micro_batches, len(extra.plans(step))))
            yield own


def _as_floats(weights: Any, filler: bool) -> Weights:
    """The weights that `Task.weight` returned, as numbers by head, sorted by name: the order is the same on all ranks.

    Raises:
        TrainingError: a weight is not a number, is negative, or is not finite.
    """
    if weights is None:
        return None
    by_head = weights if isinstance(weights, Mapping) else {"loss": weights}
    if not by_head:
        raise TrainingError(
            "it returned an empty dict", where="Task.weight", remedy="return None if the unit is the sample"
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
