"""Before the first step: does a task change the samples of a data set that returns its own memory?

And does the data set or the task return memory that it fills again, so that a sample becomes the next one?
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.core.data import unseeded, worker_deaths, workers
from lockstep.core.data.executed_files import ExecutedFiles
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import restored_generators
from lockstep.core.data.tensors import is_plain
from lockstep.core.errors import UsageError

_SAMPLES = 8
_CONTROLS = 16


def check(loader: Loader, indices: Sequence[int], last_epoch: int = 0) -> list[str]:
    """Read some samples as batches do, and check whether the data set then returns different samples.

    A data set that returns new objects at each read cannot be changed like that, so only one of its samples is read. If
    the loader has workers, the samples are read in another process, because workers must not inherit files. A change is
    harmless if the batch stays the same, such as tokens that `prepare` keeps in its sample.

    Args:
        indices: of samples; the first 8 are read.
        last_epoch: the last epoch of the training, from 0. Samples are prepared for this epoch and for epoch 0.

    Returns:
        a warning if a sample differs at the second read, although all generators have the same seeds; or if
        `prepare` or `collate` then returns a different result.

    Raises:
        UsageError: `prepare` or `collate` changes the data set; names the method.
    """
    micro_batches = loader.micro_batches

    def make() -> DataLoader[Any]:
        reads = _Reads(micro_batches, sorted({0, last_epoch}))
        count = int(loader.workers > 0)
        keys = [tuple(indices[:_SAMPLES])]
        return workers.data_loader(reads, keys, count, stays=False, start_method=loader.start_method)

    with restored_generators(loader.device):
        (found,) = worker_deaths.read_all(make, "samples to look at")
    which = "training" if micro_batches.training else "evaluation"
    data = type(micro_batches.data).__name__
    if found is None:
        return []
    if found.method is None:
        return [
            f"warning: sample {found.index} of the {which} data ({data}) differs when it is read again, with "
            "the same seeds of torch, NumPy and Python. So training depends on what was read before, and cannot be "
            "repeated or resumed exactly: resuming needs --allow-change data. Draw random numbers from these "
            "generators, or from one that the data set keeps, and do not change samples when reading. "
            f"{unseeded.causes(data=micro_batches.data)}".rstrip()
        ]
    if found.draws:
        return [
            f"warning: the result of Task.{found.method} for sample {found.index} of the {which} data ({data}) changes "
            "when it is called again, with the same seeds of torch, NumPy and Python. So training cannot be "
            "repeated or resumed exactly. Draw from the global generators of torch, NumPy or random, which Lockstep "
            "seeds before each call, or from a generator that the task keeps. "
            f"{unseeded.causes(**{f'Task.{found.method}': getattr(micro_batches.task, found.method)})}".rstrip()
        ]
    if found.next is not None:
        raise _refusal_of_reuse(micro_batches, found)
    raise _refusal(micro_batches, found)


@contextlib.contextmanager
def watched(loader: Loader, index: int) -> Iterator[None]:
    """Inside, `Task.loss` and `Task.predict` run. If a task's `collate` passes memory through, they may change the
    data.

    Raises:
        UsageError: they did change the data.
    """
    look = _Reads(loader.micro_batches)
    before: set[str] = set()
    if not loader.workers and loader.micro_batches.collates:
        with contextlib.suppress(Exception), restored_generators(loader.device):
            before = {look.digest_when_used(index) for _ in range(2)}
    yield
    if len(before) == 1:
        with restored_generators(loader.device):
            after = look.digest_when_used(index)
        if after not in before:
            raise _refusal(loader.micro_batches, Changed(index, "loss"))


def _refusal(micro_batches: MicroBatches, found: Changed) -> UsageError:
    which = "training" if micro_batches.training else "evaluation"
    remedy = "change a copy: sample.clone() for a tensor, sample.copy() for an array or an image, "
    remedy += "copy.deepcopy(sample) for nested values"
    if found.method == "loss":
        remedy = "change a copy (clone), or let Task.collate return one, as torch.stack does"
    return UsageError(
        f"it changes a sample in place, and with it the {which} data: sample {found.index} of "
        f"{type(micro_batches.data).__name__} differs afterwards. Training would depend on the number of "
        "earlier epochs, evaluations and workers",
        where="Task.loss or Task.predict" if found.method == "loss" else f"Task.{found.method}",
        remedy=remedy,
    )


def _refusal_of_reuse(micro_batches: MicroBatches, found: Changed) -> UsageError:
    which = "training" if micro_batches.training else "evaluation"
    made = "the batch of sample" if found.method == "collate" else "sample"
    is_data = found.method == "__getitem__"
    return UsageError(
        f"it returns memory that it fills again: {made} {found.index} of the {which} data changes its values when "
        f"{made} {found.next} is made. Batches would contain one sample many times",
        where=f"{type(micro_batches.data).__name__}.__getitem__" if is_data else f"Task.{found.method}",
        remedy="return new memory each time: array.copy() or tensor.clone()",
    )


@dataclass
class Changed:
    """A sample of a data set that differs when it is read again."""

    index: int
    method: str | None
    """The method of the task that changed it. None: reading itself."""
    draws: bool = False
    """Whether the method changed nothing, but returns a different result when called again."""
    next: int | None = None
    """The sample that makes the method refill the memory that it returned for the first."""


class _Reads(Dataset[Changed | None]):
    """The findings about some samples, by their indices."""

    def __init__(self, micro_batches: MicroBatches, epochs: Sequence[int] = (0,)) -> None:
        self.files = ExecutedFiles()  # comes before objects of the classes in them
        self.micro_batches, self.epochs = micro_batches, epochs

    def __getitem__(self, indices: tuple[int, ...]) -> Changed | None:
        with contextlib.suppress(Exception):  # the loader decides what an unreadable sample means
            return self._look(indices)
        return None

    def _look(self, indices: tuple[int, ...]) -> Changed | None:
        one = self.micro_batches
        if type(one.data) is TensorDataset and not one.prepares and not one.collates:
            return None
        hands_out = False
        for index in indices:
            first = self._read(index)
            before, own = digest_of(first), set(_memory(first))
            again = self._read(index)
            if digest_of(again) != before:
                return Changed(index, None)
            if own.isdisjoint(_memory(again)):
                break
            hands_out = True
            if changed := self._use(index, before):
                return changed
        prepared = [self._prepared(indices[0], 0, self._read(indices[0])) for _ in range(2)]
        batches = [self._collated(indices[0], 0, [sample]) for sample in prepared]
        shares = hands_out or _share_memory(*prepared) or _share_memory(*batches)
        filled = self._fills_again(indices) if shares else None
        return filled or self._draws(indices[0], batches)

    def _fills_again(self, indices: Sequence[int]) -> Changed | None:
        """The method whose result for one sample changes when another is made. None: there is none."""
        one, other = indices[0], next((index for index in indices if index != indices[0]), None)
        if other is None:
            return None

        def prepared(index: int) -> Any:
            return self._prepared(index, 0, self._read(index))

        changing = set[str]()
        makes: dict[str, Callable[[int], Any]] = {
            "__getitem__": self._read,
            "prepare": prepared,
            "collate": lambda index: self._collated(index, 0, [prepared(index)]),
        }
        for method, make in makes.items():
            made = make(one)
            before = digest_of(made)
            make(other)
            if digest_of(made) != before:
                changing.add(method)
        # `prepare` may copy a sample whose memory is filled again.
        for method in ("__getitem__", "prepare") if "prepare" in changing else ("collate",):
            if method in changing:
                return Changed(one, method, next=other)
        return None

    def _draws(self, index: int, batches: Sequence[Any]) -> Changed | None:
        """The method that turns equal samples into different batches with the same seeds. None: there is none.

        Args:
            batches: two batches of this sample.
        """
        if not all(map(_is_comparable, batches)) or digest_of(batches[0]) == digest_of(batches[1]):
            return None
        prepared = {digest_of(self._prepared(index, 0, self._read(index))) for _ in range(2)}
        method = "prepare" if len(prepared) > 1 else "collate"
        return Changed(index, method, draws=True) if self._has_own(method) else None

    def digest_of_batch(self, index: int) -> str | None:
        """The digest of a batch of one sample. None: it cannot be compared."""
        return self.batch(index, 0, [self._read(index)])

    def _use(self, index: int, before: str) -> Changed | None:
        """Prepare and collate a sample for each epoch, and read it again."""
        one, unused = self.micro_batches, None
        with contextlib.suppress(Exception):
            unused = copy.deepcopy(self._read(index))
        for epoch in self.epochs:
            value = self._read(index)
            for method in ("prepare", "collate"):
                value = self._prepared(index, epoch, value) if method == "prepare" else one.task.collate([value])
                if (after := self.digest(index)) == before:
                    continue
                if not self._has_own(method) or not self._repeats(index):
                    return Changed(index, None)
                if unused is None or not self._is_harmless(index, unused):
                    return Changed(index, method)
                before = after
        return None

    def _prepared(self, index: int, epoch: int, sample: Any) -> Any:
        one = self.micro_batches
        one.seeding.seed_all(derive_seed(one.seed, epoch, index))
        return one.task.prepare(sample, epoch, one.training)

    def _is_harmless(self, index: int, unused: Any) -> bool:
        """True if a sample that was used before gives the same batches as an unused copy of it, in each epoch.

        The batches also contain an unused copy of the sample, before and after it.
        """
        epochs = {*self.epochs, 1} if self.micro_batches.training else self.epochs  # a training may be extended

        def batch(epoch: int, sample: Any, place: int) -> str | None:
            samples = [copy.deepcopy(unused)]
            samples.insert(place, sample)
            return self.batch(index, epoch, samples)

        return all(
            (first := batch(epoch, copy.deepcopy(unused), place)) is not None
            and batch(epoch, self._read(index), place) == first
            for epoch in epochs
            for place in (0, 1, 0)
        )

    def batch(self, index: int, epoch: int, samples: Sequence[Any]) -> str | None:
        """The digest of a batch of raw samples, all of them of this index. None: it cannot be compared."""
        batch = self._collated(index, epoch, [self._prepared(index, epoch, sample) for sample in samples])
        return digest_of(batch) if _is_comparable(batch) else None

    def _collated(self, index: int, epoch: int, prepared: list[Any]) -> Any:
        self.micro_batches.seeding.seed_all(derive_seed(self.micro_batches.seed, epoch, index))
        return self.micro_batches.task.collate(prepared)

    def _has_own(self, method: str) -> bool:
        """A task without its own method has changed nothing: the data set itself reads different samples."""
        return self.micro_batches.prepares if method == "prepare" else self.micro_batches.collates

    def _repeats(self, index: int) -> bool:
        """Read a sample several more times. It differs again if the data set draws its samples."""
        return len({self.digest(index) for _ in range(_CONTROLS)}) == 1

    def digest_when_used(self, index: int) -> str:
        """The digest of a batch of one sample, or of the raw sample if batches cannot be compared."""
        return self.digest_of_batch(index) or self.digest(index)

    def digest(self, index: int) -> str:
        """The digest of a raw sample."""
        return digest_of(self._read(index))

    def _read(self, index: int) -> Any:
        one = self.micro_batches
        one.seeding.seed_all(derive_seed(one.seed, 0, index))
        return one.data[index]


def _memory(value: Any) -> Iterator[int]:
    """Contents of a sample that may change in place: addresses of tensors and arrays, identities of other objects."""
    if isinstance(value, Tensor):
        yield value.data_ptr() if is_plain(value) else id(value)
    elif isinstance(value, np.ndarray):
        yield value.__array_interface__["data"][0]
    elif isinstance(value, str | bytes | int | float | complex | None | np.generic):
        return
    else:
        if not isinstance(value, tuple | frozenset):
            yield id(value)
        for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
            yield from _memory(item)


def _share_memory(one: Any, other: Any) -> bool:
    return not set(_memory(one)).isdisjoint(_memory(other))


def _is_comparable(value: Any) -> bool:
    """True if `digest_of` covers everything in a value, and not only the names of types."""
    if isinstance(value, Mapping):
        return all(map(_is_comparable, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_comparable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_comparable(getattr(value, field.name)) for field in fields(value))
    known = isinstance(value, Tensor | np.ndarray | np.generic | str | bytes | int | float | complex | None)
    return known or (hasattr(value, "tobytes") and hasattr(value, "size"))
