"""Read the data, the config keys and the sample order from a DataLoader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from lockstep.core import task_checks
from lockstep.core.data.dataset import member_of
from lockstep.core.errors import number_of
from lockstep.core.foreign_task import Keys, refused

KEPT = frozenset(
    ["dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "drop_last", "num_workers"]
)
"""Arguments of a DataLoader that become the data, their order or config keys, or are refused."""
NAMED: dict[str, Any] = {
    "worker_init_fn": None,
    "generator": None,
    "pin_memory": False,
    "timeout": 0,
    "multiprocessing_context": None,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""Ignored arguments of a DataLoader, with their defaults. The log names those that are set."""


@dataclass
class Loaded:
    """What Lockstep takes from a DataLoader."""

    data: Any
    collate: Any
    keys: Keys = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class InOrder:
    """The order of a DataLoader without shuffle: position n has sample n, in every epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.digest = length, "in order"

    def __call__(self, positions: Any, *, seed: int, epoch: int) -> Any:
        """The index of the sample at each position."""
        return positions


class Marked(Dataset[Any]):
    """A data set with additional attributes: an `order`, `sample_weights`, or a mark on each of its samples."""

    def __init__(self, data: Any, *, validates: bool = False, **attributes: Any) -> None:
        self.data, self.validates, self.at_once = data, validates, reads_at_once(data)
        self.lengths = member_of(data, "lengths")
        if (where := member_of(data, "where")) is not None:
            self.where = where
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        sample = self.data.__getitems__([index])[0] if self.at_once else self.data[index]
        return Validated(sample) if self.validates else sample


def reads_at_once(data: Any) -> bool:
    """True if a data set returns samples only through `__getitems__`, the batched access that torch's DataLoader
    calls."""
    by_index = getattr(type(data), "__getitem__", None)
    return by_index in (None, Dataset.__getitem__) and member_of(data, "__getitems__") is not None


@dataclass
class Validated:
    """A sample of the evaluation data: validation_step gets it."""

    sample: Any


def single(found: Any, where: str) -> DataLoader[Any]:
    """The single DataLoader that a method returned.

    Raises:
        UsageError: it returned something else.
    """
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if not isinstance(found, DataLoader):
        kind = (
            number_of(len(found), "loader") if isinstance(found, list | tuple | dict) else f"a {type(found).__name__}"
        )
        remedy = "return one torch.utils.data.DataLoader; join several data sets with ConcatDataset"
        raise refused(f"it returns {kind}", where, remedy)
    if isinstance(found.dataset, torch.utils.data.IterableDataset):
        what = f"the loader reads a {type(found.dataset).__name__}, which is an IterableDataset"
        remedy = "write a Task that returns lockstep.Stream(data) (lockstep --explain streams), or use shards"
        raise refused(what, where, remedy)
    return found


def read(loader: DataLoader[Any], where: str) -> Loaded:
    """Read the loader of the training data.

    Raises:
        UsageError: it draws samples in an unknown way, or makes batches itself. Names the line.
    """
    whole = loader.dataset
    data = task_checks.data(Marked(whole) if reads_at_once(whole) else whole, where)
    loaded = Loaded(data, loader.collate_fn)
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler
    if loader.batch_size is None or type(batches) is not BatchSampler:
        what = f"the loader makes batches by a {type(batches).__name__}" if batches else "the loader has no batch_size"
        remedy = "give it batch_size; data.group_by_length puts samples of similar length into one batch"
        raise refused(what, where, remedy)
    length = len(data)  # type: ignore[arg-type]
    kind = type(sampler)
    if kind is RandomSampler and not sampler.replacement and len(sampler) == length:
        pass
    elif kind is SequentialSampler and len(sampler) == length:
        loaded.data = Marked(data, order=InOrder(length))
        loaded.notes.append(f"{where}: shuffle=False: every epoch reads the samples in the order of the data set")
    elif kind is WeightedRandomSampler and sampler.replacement:
        loaded.data = Marked(data, sample_weights=sampler.weights)
        loaded.keys["data.samples_per_epoch"] = sampler.num_samples
    else:
        what = f"the loader draws its samples by a {kind.__name__}"
        remedy = "ranks and resumed runs need any position of an epoch: write an `order`, lockstep --explain sampling"
        raise refused(what, where, remedy)
    loaded.keys["batch.global"] = loader.batch_size
    if loader.drop_last:
        loaded.keys["data.drop_last"] = True
    if loader.num_workers:
        loaded.keys["data.workers"] = loader.num_workers
    loaded.notes += _ignored(loader, where)
    return loaded


def read_evaluated(loader: DataLoader[Any], where: str) -> Loaded:
    """Read the loader of the evaluation data. Each sample is evaluated once, whatever the batches and the order.

    Raises:
        UsageError: it leaves out samples, or draws them in an unknown way. Names the line.
    """
    sampler: Any = loader.sampler
    whole = len(loader.dataset) if isinstance(sampler, RandomSampler | SequentialSampler) else None  # type: ignore[arg-type]
    by_batch = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if whole is None or len(sampler) != whole or getattr(sampler, "replacement", False) or by_batch:
        kind = type(loader.batch_sampler if by_batch else sampler).__name__
        remedy = "evaluate all samples of a data set; for some of them, pass torch.utils.data.Subset(data, indices)"
        raise refused(f"the loader draws its samples by a {kind}", where, remedy)
    if loader.drop_last and whole % (loader.batch_size or 1):
        remedy = "remove it: every sample is evaluated once"
        raise refused("drop_last=True would leave out samples of the evaluation", where, remedy)
    return Loaded(Marked(loader.dataset, validates=True), loader.collate_fn, notes=_ignored(loader, where))


def _ignored(loader: DataLoader[Any], where: str) -> list[str]:
    """A line for the log, if ignored arguments are set."""
    values = {name: getattr(loader, name, default) for name, default in NAMED.items()}
    found = [name for name, value in values.items() if value is not None and value != NAMED[name]]
    return [f"{where}: ignored arguments of the DataLoader: {', '.join(found)}"] if found else []
