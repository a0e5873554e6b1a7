"""Evaluation and prediction on all ranks. Every sample counts once, and the numbers are those of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core import metric_sync, task_checks
from lockstep.core.data.loader import Loader, MicroBatch
from lockstep.core.data.order import EvaluationPlan, MicroBatchPlan, derive_seed
from lockstep.core.data.randomness import seed_forward
from lockstep.core.data.tensors import map_tensors, to_cpu
from lockstep.core.errors import DataError, TrainingError, UsageError, number_of
from lockstep.core.parallel import strategy
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.task import Task, needs_global_batch
from lockstep.core.worst import WorstSamples

Tick = Callable[[], None]
Show = Callable[[dict[str, Any], list[tuple[int, Any]]], None]
"""Gets the values of the metrics, and pairs (index, output) of the samples that were asked for."""
_RESULTS = ("loss", "samples", "bad", "of_samples")
Finish = Callable[[tuple[int, ...], Any], Any]
"""Gets the indices of a micro-batch and its output. Returns what travels to rank 0: an output, or a list with an item
for each sample."""
_EVALUATION = 0xE7A1  # a word of the seeds of evaluations: they differ from the seeds of training


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Replaces an output, if the sample could not be read."""

    what: str
    """The fault, and the file of the sample."""


def _nothing(*_: Any) -> None:
    pass


def evaluate(
    task: Task,
    forward: nn.Module,
    loader: Loader,
    *,
    plan: EvaluationPlan,
    world: World,
    precision: Precision,
    tick: Tick = _nothing,
    tell: Callable[[str], None] = _nothing,
    show: Show = _nothing,
    show_samples: Sequence[int] = (),
    worst: WorstSamples | None = None,
) -> dict[str, float]:
    """The loss and the task's metrics over the samples of `plan`. All ranks call it.

    The loss is a sum over units, divided by the number of units. The micro-batches are the same for every number of
    ranks. Rank 0 adds their sums in the order of the micro-batches, in float64.

    Args:
        forward: a `Forward`, see `Strategy.inference`.
        tick: called after each of this rank's micro-batches; all ranks have equally many.
        tell: called on rank 0 for each sample that cannot be read, with its file and the reason.
        show: called on rank 0, if there are metrics or outputs to show.
        show_samples: indices of the samples whose outputs `show` gets, in this order. Left out are samples that cannot
            be read or have no output, and all samples if the output has no part for each sample.
        worst: collects the samples whose outputs are most wrong. `show` is called after that.

    Returns:
        `loss`, `loss/<head>` if there are several heads, an entry for each metric, `samples` (evaluated) and `bad`
        (unreadable and left out). An empty data set has only `samples` and `bad`. If `plan` has a limit, there is
        also `of_samples`: the size of the data set.
    """
    tally = EvaluationSums(task, forward, world, precision=precision, show_samples=show_samples, worst=worst)
    per_shard = plan.per_rank(world.data_size)
    plans = _consecutive(plan, world)
    for number, micro_batch in enumerate(micro_batches(forward, loader, plans=plans, world=world, tick=tick)):
        if number and number % per_shard == 0:
            tally.begin_shard()
        tally.add(micro_batch)
    results = tally.results(show, tell)
    return results if plan.limit is None else results | {"of_samples": plan.length}


class EvaluationSums:
    """The sums of an evaluation on this rank: losses, metrics, outputs to show. For the arguments, see `evaluate`."""

    def __init__(
        self,
        task: Task,
        forward: nn.Module,
        world: World,
        *,
        precision: Precision,
        show_samples: Sequence[int] = (),
        worst: WorstSamples | None = None,
    ) -> None:
        self.task, self.forward, self.world, self.precision = task, forward, world, precision
        self.show_samples, self.wanted, self.worst = show_samples, set(show_samples), worst
        self.metrics, self.update = task_checks.metrics(task)
        if self.metrics is not None:
            self.update = metric_sync.place(self.metrics, self.update, world.device)
        self.sums: list[tuple[dict[str, Tensor], dict[str, float]]] = []  # loss sums and units of each micro-batch
        self.shown: dict[int, Any] = {}
        self.samples = 0
        self.bad: dict[int, str] = {}  # the message about each sample that could not be read, by its index
        self.earlier: list[list[metric_sync.State]] = []  # the states of the metrics of earlier shards

    def begin_shard(self) -> None:
        """Begin the next of this rank's shards. The metrics of shards are merged, on any number of ranks alike."""
        if self.metrics is not None:
            self.earlier.append(metric_sync.states(self.metrics))
            self.metrics.reset()

    def add(self, micro_batch: MicroBatch) -> None:
        """Evaluate a micro-batch."""
        task, metrics, indices = self.task, self.metrics, micro_batch.indices
        wants = metrics is not None
        by_head, output = measure(task, self.forward, micro_batch, precision=self.precision, wants_output=wants)
        self.bad |= dict(micro_batch.bad)
        if micro_batch.filler:
            return
        self.sums.append((by_head, micro_batch.weights or dict.fromkeys(by_head, float(micro_batch.samples))))
        self.samples += micro_batch.samples
        if metrics is not None:
            self.update(metrics, output, micro_batch.batch)
        if output is not None and not self.wanted.isdisjoint(indices):
            with contextlib.suppress(DataError):  # metrics may use an output that has no part for each sample
                outputs = zip(indices, split(output, len(indices)), strict=True)
                # A view would keep the memory of its batch, and take it along to rank 0.
                self.shown |= {
                    index: map_tensors(part, Tensor.clone) for index, part in outputs if index in self.wanted
                }
        if self.worst is not None and output is not None:
            self.worst.add(indices, output, micro_batch.batch, split)

    def losses(self) -> list[tuple[dict[str, float], dict[str, float]]]:
        """The loss sums and the units of each micro-batch. This waits for the device."""
        return [({head: float(value) for head, value in by_head.items()}, weights) for by_head, weights in self.sums]

    def results(self, show: Show, tell: Callable[[str], None]) -> dict[str, float]:
        """The results of `evaluate`. Brings the ranks together, and calls `tell` and `show`. A collective."""
        task, world, worst = self.task, self.world, self.worst
        gathered = world.gather_once((self.losses(), self.shown, self.bad))
        losses = None if gathered is None else [sums_of_rank for sums_of_rank, *_ in gathered]
        bad = {index: message for *_, of_rank in gathered or () for index, message in of_rank.items()}
        for _, message in sorted(bad.items()):
            tell(f"evaluation, left out: {message}")
        results: dict[str, float] = world.broadcast(means(losses, task.coefficients))
        by_index = {index: part for _, of_rank, _ in gathered or () for index, part in of_rank.items()}
        values: dict[str, Any] = {}
        if self.metrics is not None:
            flat, values = metric_sync.compute(self.metrics, world, self.earlier)
            check_names(flat)
            results |= flat
        if worst is not None:
            worst.gather(world)
        if values or by_index or (worst is not None and (worst.found or worst.problem)):
            show(values, [(index, by_index[index]) for index in self.show_samples if index in by_index])
        counted = world.sum_once([self.samples, len(self.bad)])
        return results | {"samples": int(counted[0]), "bad": int(counted[1])}


def check_names(metrics: Mapping[str, float]) -> None:
    """Raises UsageError if a metric has the name of a result that every evaluation has."""
    taken = [name for name in metrics if name in _RESULTS or name.startswith("loss/")]
    if taken:
        remedy = f"give it another name; {', '.join(_RESULTS)} and loss/HEAD are results of every evaluation"
        raise UsageError(f"a metric is called {taken[0]!r}", where="Task.metrics", remedy=remedy)


def predict(
    task: Task, forward: nn.Module, loader: Loader, *, plan: EvaluationPlan, world: World, precision: Precision
) -> list[Any] | None:
    """The task's output for each sample of `plan`. All ranks call it.

    Returns:
        on rank 0: the outputs on the CPU, in the order of the samples. The output of a sample that could not be read
        (with `on_error="skip"`) is None. On other ranks: None.

    Raises:
        DataError: an output cannot be split into samples.
    """
    each = predict_each(task, forward, loader, plan=plan, world=world, precision=precision)
    # A view would keep the memory of its batch.
    outputs = [None if isinstance(output, Unreadable) else map_tensors(output, Tensor.clone) for _, output in each]
    return outputs if world.rank == 0 else None


def _compacted(indices: tuple[int, ...], output: Any) -> Any:
    split(output, len(indices))  # raises before the other micro-batches are computed
    return to_cpu(output, metric_sync.compact)


def predict_each(
    task: Task,
    forward: nn.Module,
    loader: Loader,
    *,
    plan: EvaluationPlan,
    world: World,
    precision: Precision,
    finish: Finish = _compacted,
) -> Generator[tuple[int, Any], None, None]:
    """The task's output for each sample of `plan`, as soon as it is known. All ranks iterate to the end.

    Ranks take the micro-batches in turn, and rank 0 collects the outputs after each turn. So no rank holds more outputs
    than those of a turn; if samples have lengths, rank 0 may hold those of a window, see `EvaluationPlan.in_turns`.

    Args:
        finish: is called on the rank that computed the output. Default: the output itself, on the CPU.

    Yields:
        on rank 0: the index of each sample in ascending order, and its part of what `finish` returned, or
        `Unreadable`. On other ranks: nothing.

    Raises:
        DataError: an output cannot be split into samples.
    """
    waiting: dict[int, Any] = {}
    expected = 0
    plans = plan.in_turns(world.replica, world.replicas)
    for micro_batch in micro_batches(forward, loader, plans=plans, world=world):
        with precision.autocast():
            output = forward(micro_batch.batch, task.predict)
        indices = () if micro_batch.filler else micro_batch.indices
        finished = finish(indices, output) if indices else []
        # Whole batches travel, because pickle adds many bytes to each small tensor.
        for numbers, values, bad in world.gather_once((indices, finished, micro_batch.bad)) or ():
            waiting |= zip(numbers, split(values, len(numbers)), strict=True)
            waiting |= {index: Unreadable(message.partition("\n  remedy:")[0]) for index, message in bad}
        while expected in waiting:
            yield expected, waiting.pop(expected)
            expected += 1


def measure(
    task: Task, forward: nn.Module, micro_batch: MicroBatch, *, precision: Precision, wants_output: bool
) -> tuple[dict[str, Tensor], Any]:
    """The loss sums of a micro-batch by head, and the output, if it is wanted. A single loss is the head `loss`.

    Raises:
        TrainingError: the losses are not scalar tensors, or their heads differ from those of the units; or there is no
            output.
    """

    def call(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        losses, output = strategy.split_output(task.loss(model, batch)) if has_loss else ({}, None)
        return losses, predicted(task, model, batch) if output is None and wants_output else output

    has_loss = not needs_global_batch(task)  # that loss depends on which samples are in one batch
    with precision.autocast():
        losses, output = forward(micro_batch.batch, call)
    if not has_loss:
        return {}, output
    where = "Task.loss, in evaluation"
    by_head = strategy.by_head(losses, where)
    if micro_batch.weights is not None and by_head.keys() != micro_batch.weights.keys():
        raise TrainingError(
            f"the loss has the heads {sorted(by_head)}, Task.weight has {sorted(micro_batch.weights)}",
            where=where,
            remedy="return the same keys from both; a single tensor is the head 'loss'",
        )
    return by_head, output


def predicted(task: Task, model: nn.Module, batch: Any) -> Any:
    """The output of `Task.predict`, for metrics.

    Raises:
        TrainingError: it is None.
    """
    output = task.predict(model, batch)
    if output is None:
        remedy = "return the output that metrics and users need"
        raise TrainingError("the output is None", where="Task.predict", remedy=remedy)
    return output


def split(output: Any, count: int, name: str = "") -> list[Any]:
    """Split the output of a batch into the outputs of its `count` samples, on the CPU.

    Tensors and arrays are split along their first dimension. Mappings and tuples give a mapping or a tuple for each
    sample; a dataclass gives mappings. A list must hold an item for each sample. None gives None for each sample.

    Args:
        name: name of `output` inside the whole output; for errors.

    Raises:
        DataError: a part of the output has no part for each sample; names it.
    """
    what = f"output {name!r}" if name else "an output"
    if output is None:
        return [None] * count
    if isinstance(output, Tensor | np.ndarray):
        if output.ndim == 0 or len(output) != count:
            raise DataError(
                f"{what} of shape {tuple(output.shape)} for {number_of(count, 'sample')}",
                where="Task.predict",
                remedy="return tensors whose first dimension is the batch",
            )
        return list(output.detach().cpu()) if isinstance(output, Tensor) else list(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type | Mapping):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        parts = {key: split(value, count, f"{name}/{key}" if name else str(key)) for key, value in output.items()}
        return [{key: part[number] for key, part in parts.items()} for number in range(count)]
    if isinstance(output, tuple):
        columns = [split(value, count, f"{name}/{place}" if name else str(place)) for place, value in enumerate(output)]
        return list(zip(*columns, strict=True)) if columns else [()] * count
    if isinstance(output, list) and len(output) == count:
        return [to_cpu(item) for item in output]
    kind = f"list of {len(output)}" if isinstance(output, list) else type(output).__name__
    remedy = "return tensors whose first dimension is the batch, dicts or tuples of them, or one item per sample"
    raise DataError(
        f"{what} of type {kind} cannot be split into {number_of(count, 'sample')}", where="Task.predict", remedy=remedy
    )


def _consecutive(plan: EvaluationPlan, world: World) -> list[MicroBatchPlan]:
    """This rank's share of the micro-batches: consecutive ones."""
    by_rank, ranks = plan.by_rank(world.data_size), world.data_ranks
    missing = -(-world.data_size // world.replicas) - len(ranks)  # `tick` needs equally many on each rank
    fillers = [MicroBatchPlan((0,), 0, True)] * (missing * plan.per_rank(world.data_size))
    return [*itertools.chain.from_iterable(by_rank[rank] for rank in ranks), *fillers]


def micro_batches(
    forward: nn.Module, loader: Loader, *, plans: Iterable[MicroBatchPlan], world: World, tick: Tick = _nothing
) -> Generator[MicroBatch, None, None]:
    """Micro-batches for evaluation. Until the last of them, the model is in evaluation mode, and gradients are off."""
    was_training = forward.training
    forward.eval()
    try:
        with torch.no_grad(), contextlib.closing(loader.run(lambda: plans)) as read:
            for micro_batch in read:
                seed = derive_seed(loader.micro_batches.seed, _EVALUATION, micro_batch.indices[0])
                seed_forward(seed, world.device, strategy.private_of(forward))
                yield micro_batch
                world.heartbeat.beats += 1
                tick()
    finally:
        forward.train(was_training)


def means(
    ranks: list[list[tuple[dict[str, float], dict[str, float]]]] | None, coefficients: Mapping[str, float]
) -> dict[str, float]:
    """The loss over the micro-batches of all ranks, which are added in their order.

    Args:
        ranks: of each rank and each of its micro-batches, the loss sums and the units by head. None: not on rank 0.
    """
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    for losses, weights in (part for rank in ranks or [] for part in rank):
        for head, value in losses.items():
            sums[head] = sums.get(head, 0.0) + value
            units[head] = units.get(head, 0.0) + weights[head]
    return combine(sums, units, coefficients)


def combine(
    sums: Mapping[str, float], units: Mapping[str, float], coefficients: Mapping[str, float]
) -> dict[str, float]:
    """`loss` = sum_k c[k] * sums[k] / units[k]; with several heads also `loss/<head>`. Empty without units."""
    means = {head: sums[head] / units[head] for head in sums if units[head]}
    if not means:
        return {}
    total = sum(coefficients.get(head, 1.0) * mean for head, mean in means.items())
    return {"loss": total} | ({f"loss/{head}": mean for head, mean in means.items()} if len(sums) > 1 else {})
