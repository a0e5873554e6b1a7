"""Evaluation and prediction on all ranks: every sample once, the numbers of one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loader import Loader, MicroBatch, map_tensors
from lockstep.data.order import EvaluationPlan, derive_seed
from lockstep.data.randomness import seed_forward
from lockstep.distributed import strategy
from lockstep.distributed.precision import Precision
from lockstep.distributed.world import World
from lockstep.engine import metric_sync, task_checks
from lockstep.errors import DataError, TrainingError

if TYPE_CHECKING:
    from lockstep.tasks.task import Task


Tick = Callable[[], None]
Show = Callable[[dict[str, Any], list[tuple[int, Any]]], None]
_SHOWN = 4  # samples
_EVALUATION = 0xE7A1  # a word of the seeds of evaluation, which tells them from those of training


def _nothing(*_: Any) -> None:
    pass


def evaluate(
    task: Task,
    forward: nn.Module,
    loader: Loader,
    plan: EvaluationPlan,
    world: World,
    precision: Precision,
    tick: Tick = _nothing,
    show: Show = _nothing,
    show_samples: bool = False,
) -> dict[str, float]:
    """Loss (sum over units, divided by their number) and the task's metrics over the samples of `plan`.

    Micro-batches are the same for every world size, and their sums are added in their order, in float64, on rank 0.

    Args:
        forward: a `Forward`, see `Strategy.inference`.
        tick: called after each of this rank's micro-batches, which are equally many on all ranks.
        show: called on rank 0 with the results of the metrics, and with pairs (index, output) of some samples.
        show_samples: whether `show` gets samples. They are the same for every world size.

    Returns:
        `loss`, `loss/<head>` where there are several, one entry per metric, `samples` (evaluated) and `bad`
        (unreadable, left out). An empty data set has no loss and no metric: only `samples` and `bad`.
    """
    metrics, update = task_checks.metrics(task)
    if metrics is not None:
        metrics.to(world.device)
    sums: list[tuple[dict[str, Tensor], dict[str, float]]] = []
    samples = bad = 0
    shown: list[tuple[int, Any]] = []
    for micro in _forwards(forward, loader, plan, world, tick):
        by_head, output = measure(task, forward, micro, precision, metrics is not None)
        bad += len(micro.bad)
        if micro.filler:
            continue
        sums.append((by_head, micro.weights or dict.fromkeys(by_head, float(micro.samples))))
        samples += micro.samples
        if metrics is not None:
            update(metrics, output, micro.batch)
            if world.rank == 0 and not shown and show_samples:
                with contextlib.suppress(DataError):  # metrics may look at outputs that are not one per sample
                    shown = list(zip(micro.indices, split(output, len(micro.indices)), strict=True))[:_SHOWN]
    parts = [({head: float(value) for head, value in by_head.items()}, weights) for by_head, weights in sums]
    results: dict[str, float] = world.broadcast(_means(world.data_gather(parts), task.coefficients))
    if metrics is not None:
        flat, values = metric_sync.compute(metrics, world)
        results |= flat
        if values:
            show(values, shown)
    counted = world.data_sum([samples, bad])
    return results | {"samples": int(counted[0]), "bad": int(counted[1])}


def predict(
    task: Task, forward: nn.Module, loader: Loader, plan: EvaluationPlan, world: World, precision: Precision
) -> list[Any] | None:
    """The task's output for each sample of `plan`, in their order, on the CPU: on rank 0; None elsewhere.

    A sample that could not be read (with `on_error="skip"`) has the output None.
    """
    outputs: list[tuple[tuple[int, ...], Any]] = []
    for micro in _forwards(forward, loader, plan, world):
        with precision.autocast():
            output = forward(micro.batch, task.predict)
        if not micro.filler:
            split(output, len(micro.indices))  # a wrong shape is an error before the other batches are computed
            outputs.append((micro.indices, map_tensors(output, metric_sync.compact)))
    gathered = world.data_gather(outputs)  # batches: of a tensor for each sample, most would be pickle's own bytes
    if gathered is None:
        return None
    merged: dict[int, Any] = {}
    for indices, output in (batch for rank in gathered for batch in rank):
        parts = map_tensors(split(output, len(indices)), Tensor.clone)  # a view would keep its whole batch alive
        merged |= zip(indices, parts, strict=True)
    return [merged.get(index) for index in range(plan.length)]


def measure(
    task: Task,
    forward: nn.Module,
    micro: MicroBatch,
    precision: Precision,
    wants_output: bool,
) -> tuple[dict[str, Tensor], Any]:
    """Loss sums of a micro-batch by head (a single one is the head `loss`), and the output, where it is wanted.

    Raises:
        TrainingError: the losses are no scalar tensors, or have other heads than the units.
    """

    def call(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        losses, output = strategy.split_output(task.loss(model, batch))
        return losses, task.predict(model, batch) if output is None and wants_output else output

    with precision.autocast():
        losses, output = forward(micro.batch, call)
    if wants_output and output is None:
        raise TrainingError("the output is None", where="Task.predict", remedy="return what the metrics and users need")
    where = "Task.loss, in evaluation"
    by_head = strategy.by_head(losses, where)
    if micro.weights is not None and by_head.keys() != micro.weights.keys():
        raise TrainingError(
            f"the loss has the heads {sorted(by_head)}, Task.weight has {sorted(micro.weights)}",
            where=where,
            remedy="return the same keys from both; a single tensor is the head 'loss'",
        )
    return by_head, output


def split(output: Any, count: int, name: str = "") -> list[Any]:
    """A batch's output as `count` outputs of one sample each, on the CPU: along tensors' and arrays' first dimension.

    Mappings, tuples and dataclasses are split into as many of them (a dataclass into mappings); a list holds one item
    per sample; None stays None.

    Args:
        name: of `output` in what it is a part of, for errors.

    Raises:
        DataError: what has no part per sample; names it.
    """
    what = f"output {name!r}" if name else "an output"
    if output is None:
        return [None] * count
    if isinstance(output, Tensor | np.ndarray):
        if output.ndim == 0 or len(output) != count:
            raise DataError(
                f"{what} of shape {tuple(output.shape)} for {count} samples",
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
        return output
    kind = f"list of {len(output)}" if isinstance(output, list) else type(output).__name__
    remedy = "return tensors whose first dimension is the batch, dicts or tuples of them, or one item per sample"
    raise DataError(f"{what} of type {kind} cannot be split into {count} samples", where="Task.predict", remedy=remedy)


def _forwards(
    forward: nn.Module, loader: Loader, plan: EvaluationPlan, world: World, tick: Tick = _nothing
) -> Generator[MicroBatch, None, None]:
    """This rank's micro-batches, with the model in evaluation mode and no gradients while they last."""
    chunks = plan.by_rank(world.data_size)[world.data_rank]
    was_training = forward.training
    forward.eval()
    try:
        with torch.no_grad(), contextlib.closing(loader.run(lambda: chunks)) as micros:
            for micro in micros:
                seed_forward(derive_seed(loader.micro_batches.seed, _EVALUATION, micro.indices[0]), world.device)
                yield micro
                world.heartbeat.beats += 1
                tick()
    finally:
        forward.train(was_training)


def _means(
    ranks: list[list[tuple[dict[str, float], dict[str, float]]]] | None, coefficients: Mapping[str, float]
) -> dict[str, float]:
    """Loss over all ranks' micro-batches, in their order."""
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
    """`loss` = sum_k c[k] * sums[k] / units[k], and its parts where there are several; empty without any unit."""
    means = {head: sums[head] / units[head] for head in sums if units[head]}
    if not means:
        return {}
    total = sum(coefficients.get(head, 1.0) * mean for head, mean in means.items())
    return {"loss": total} | ({f"loss/{head}": mean for head, mean in means.items()} if len(sums) > 1 else {})
