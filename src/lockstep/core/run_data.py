"""The data of a run: which samples a step and an evaluation take, and how they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.core import task_checks
from lockstep.core.config.sections import RunConfig
from lockstep.core.data import fingerprint, same_samples, unseeded
from lockstep.core.data.dataset import member_of
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import EvaluationPlan, Order, StepPlan
from lockstep.core.data.randomness import restored_generators
from lockstep.core.errors import DataError, UsageError, number_of
from lockstep.core.parallel.world import World
from lockstep.core.task import Samples, Task


@dataclass
class EvaluationData:
    """A set of samples to evaluate, and how they are read."""

    task: Task
    """The task that has these data."""
    data: Dataset[Any]
    loader: Loader
    plan: EvaluationPlan
    name: str = ""
    """Empty if there is one set."""

    def limit(self) -> list[str]:
        """A line on an evaluation of some samples. None, if all are evaluated."""
        plan, of = self.plan, f" of {self.name}" if self.name else ""
        if plan.count >= plan.length:
            return []
        return [f"note: evaluated on {plan.count:,} of {plan.length:,} samples{of}, evenly spread (data.eval_limit)"]


def asked_micro_batches(config: RunConfig, world: World) -> list[list[int]]:
    """The sizes of micro-batches that the config asks for: pairs of an epoch and the size in samples from it on."""
    batch = config.batch
    global_batch = batch.global_ or 1
    by_epoch = batch.micro if isinstance(batch.micro, dict) else {0: batch.micro or global_batch}
    whole = -(-global_batch // world.data_size)
    return [[epoch, min(size, whole)] for epoch, size in sorted(by_epoch.items())]


def evaluated_at_once(config: RunConfig) -> int:
    """Samples of a micro-batch of an evaluation: the same for every number of ranks."""
    return config.batch.smallest_micro or min(config.batch.global_ or 32, 256)


def step_plan(
    config: RunConfig, data: Dataset[Any], world: World, micro_batch: int, order: Order | None = None
) -> StepPlan:
    """The samples that every step takes.

    Args:
        micro_batch: largest number of samples in a forward pass, also if the config asks for more.
        order: draws the samples of an epoch. None: an epoch has each sample once.

    Raises:
        DataError: the data set is empty, or smaller than the only batch of an epoch, or its lengths are not numbers.
        UsageError: samples are to be grouped by length, and their lengths are not known.
    """
    length = len(data)  # type: ignore[arg-type]
    if length == 0:
        raise DataError("the training data set is empty", where="Task.train_data", remedy="check data.train")
    length = order.length if order is not None else length
    global_batch = config.batch.global_ or 1
    if config.data.drop_last and length < global_batch:
        remedy = "lower batch.global, or set data.drop_last=false"
        raise DataError(
            f"{number_of(length, 'sample', 'does', 'do')} not fill one batch of {global_batch}",
            where="data.drop_last",
            remedy=remedy,
        )
    lengths = _sample_lengths(data, "Task.train_data")
    if config.data.group_by_length and lengths is None:
        raise UsageError(
            "the lengths of the samples are not known",
            where="data.group_by_length",
            remedy="leave it out, or let Task.train_data return a data set with the attribute `lengths`: "
            "an array of the length of each sample",
        )
    micros = config.batch.micro if isinstance(config.batch.micro, dict) else None
    grouped, drop_last = config.data.group_by_length, config.data.drop_last
    sizes = (length, global_batch, micro_batch, world.data_size)
    return StepPlan(*sizes, config.seed, drop_last, lengths, micros, grouped, order)


def grouping(plan: StepPlan) -> list[str]:
    """Lines for the log if lengths choose the samples of a batch."""
    count, batches = plan.group_by_length, plan.length // plan.global_batch
    if not count:
        return []
    lines = [f"data.group_by_length={count}: windows of {count} batches are sorted by the length of their samples"]
    if count >= batches:
        lines.append(
            f"  a window holds the whole epoch ({number_of(batches, 'batch')}), so every epoch has almost the "
            "same batches; "
            f"data.group_by_length={max(1, batches // 4)} makes four windows"
        )
    return lines


def make_loader(config: RunConfig, data: Dataset[Any], task: Task, world: World, *, training: bool) -> Loader:
    """The loader of this rank's micro-batches of `data`."""
    micro_batches = MicroBatches(data, task, config.seed, training=training, on_error=config.data.on_error)
    return Loader(
        micro_batches,
        config.data.workers,
        world.device,
        channels_last=config.compute.channels_last,
        ahead=config.data.prefetch,
        start_method=config.data.start_method,
    )


def evaluation_data(
    config: RunConfig,
    task: Task,
    world: World,
    data: Samples | None = None,
    *,
    micro_batch: int,
    limit: int | None = None,
    name: str = "",
) -> EvaluationData:
    """`data`, by default the task's evaluation data, ready to be read: split in the same way for every world size.

    Args:
        micro_batch: samples of a micro-batch, see `memory_shortage.fitting`.
        limit: at most this many samples, spread evenly. None: all samples.
        name: of the set, if there are several.

    Raises:
        DataError: the task has no evaluation data, or an empty data set.
    """
    if data is None:
        data = required_evaluation_data(task)
    else:
        data = task_checks.data(data, "the data to predict")
    lengths = _sample_lengths(data, "the evaluation data")
    plan = EvaluationPlan(len(data), micro_batch, lengths, limit)  # type: ignore[arg-type]
    return EvaluationData(task, data, make_loader(config, data, task, world, training=False), plan, name)


class NoEvaluationData(DataError):
    """A task has no evaluation data."""


def required_evaluation_data(task: Task) -> Dataset[Any]:
    """The task's evaluation data.

    Raises:
        NoEvaluationData: the task has none.
        DataError: the data set is empty.
    """
    evaluation_data = task.eval_data()
    if evaluation_data is None:
        remedy = "set data.eval, or let Task.eval_data return a data set; train.eval_every_epochs=0 trains without it"
        raise NoEvaluationData("there is no evaluation data", where="Task.eval_data", remedy=remedy)
    data = task_checks.data(evaluation_data, "Task.eval_data")
    if len(data) == 0:  # type: ignore[arg-type]
        raise DataError("the evaluation data set is empty", where="Task.eval_data", remedy="check data.eval")
    return data


def _sample_lengths(data: Dataset[Any], where: str) -> Any:
    """Lengths of the samples, if the data set has the attribute `lengths`.

    Raises:
        DataError: the attribute is not an array of one number for each sample.
    """
    lengths = member_of(data, "lengths")
    if lengths is None:
        return None
    found, expected = np.asarray(lengths), (len(data),)  # type: ignore[arg-type]
    if found.shape != expected or found.dtype.kind not in "iuf":
        raise DataError(
            f"`lengths` of the data set has the shape {found.shape} and the type {found.dtype}; expected: one number "
            f"for each of {len(data)} samples",  # type: ignore[arg-type]
            where=where,
            remedy="correct `lengths`, or give the attribute another name",
        )
    return found


def agreed_fingerprint(
    task: Task,
    data: Dataset[Any],
    world: World,
    order: Order | None = None,
    *,
    in_worker: bool,
    start_method: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The fingerprint of the training data, and warnings about them. Each rank reads a few samples from its data.

    Args:
        order: see `step_plan`. Its digest belongs to the fingerprint.
        in_worker, start_method: see `fingerprint.digests`.

    Raises:
        UsageError: the nodes or the ranks have different data, or draw them in different orders.
    """
    indices = fingerprint.looked_at(data)
    is_first = world.size == 1 or world.rank in world.nodes.first_ranks
    # The generators of other ranks stay as they are: no rank draws other numbers because it is looked at.
    with contextlib.nullcontext() if is_first else restored_generators(world.device):
        digests = fingerprint.digests(data, indices, in_worker, start_method)
    own = fingerprint.of_digests(len(data), digests) | member_of(data, "content_digests", {})  # type: ignore[arg-type]
    own |= {} if order is None else {"order": order.digest}
    if world.size == 1:
        return own, []
    made_by = {"data": data, "Task.train_data": task.train_data}
    gathered = world.gather(own)
    first: dict[str, Any] = world.on_rank0(lambda: _first_of_nodes(gathered or [], world, made_by))

    def read(index: int) -> Any:
        with restored_generators(world.device):
            return fingerprint.sample(data, index, in_worker, start_method)

    readable = ["" if digest == fingerprint.UNREADABLE else digest for digest in digests]
    place = {"what": "training", "where": "Task.train_data"}
    remarks = same_samples.check(readable, indices, read, world=world, made_by=made_by, **place)
    return first, remarks


def _first_of_nodes(gathered: Sequence[dict[str, Any]], world: World, made_by: Mapping[str, object]) -> dict[str, Any]:
    """The fingerprint of rank 0.

    Args:
        gathered: fingerprints by rank.
        made_by: the objects that make the samples, by their names.

    Raises:
        UsageError: the first ranks of the nodes have different data, or a rank has a different number of samples.
    """
    first, names = gathered[0], world.nodes.names
    others = {rank: gathered[rank] for rank in world.nodes.first_ranks if gathered[rank] != first}
    if others:
        counts = {names[rank]: found["samples"] for rank, found in others.items()}
        differ = [
            f"{number_of(count, 'sample')} on node {name}"
            for name, count in counts.items()
            if count != first["samples"]
        ]
        remedy = "give all nodes the same data under this path, or put the data on a shared disk"
        what = "; ".join(differ) or f"different samples on node {', '.join(counts)}"
        raise UsageError(
            f"the nodes have different training data: {number_of(first['samples'], 'sample')} on node "
            f"{names[0]}, {what}",
            where="data.train",
            remedy=". ".join(filter(None, [remedy, unseeded.causes(**made_by)])),
        )
    for key, name in (("samples", "number of samples"), ("order", "digest of the order of the samples")):
        values = [found.get(key) for found in gathered]
        if len(set(values)) > 1:
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            what = f"{same_samples.DIFFERENT} training data: the {name} is {listed}"
            raise UsageError(what, where="Task.train_data", remedy=same_samples.REMEDY)
    return first
