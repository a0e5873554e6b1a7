"""Evaluation and prediction by a plain loop, without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.build import seed_everything
from lockstep.data.loader import MicroBatches, OnError, map_tensors
from lockstep.data.order import EvaluationPlan
from lockstep.distributed.precision import Precision
from lockstep.distributed.strategy import split_output
from lockstep.distributed.world import join_world
from lockstep.engine import task_checks
from lockstep.engine.evaluate import split
from lockstep.engine.metric_sync import flatten
from lockstep.resume import load_trained_weights
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer
from lockstep.verify.comparable_task import ComparableTask, TaskChanges, readable_samples
from lockstep.verify.compare import last_checkpoint


def evaluate_model(
    task: Task, model: nn.Module, precision: Precision, *, micro_batch: int = 64, on_error: OnError = "raise"
) -> dict[str, float]:
    """Loss and metrics by a plain loop over the evaluation data on one process: every sample once, in order."""
    device = precision.device
    data = task.eval_data()
    assert data is not None
    length, bad = len(data), 0  # type: ignore[arg-type]
    micro_batches = MicroBatches(data, task, 0, training=False, on_error=on_error)
    metrics, update = task_checks.metrics(task)
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    model.eval()
    with torch.no_grad(), precision.autocast():
        for plan in EvaluationPlan(length, micro_batch).by_rank(1)[0]:
            samples = readable_samples(micro_batches, plan.indices, 0)
            bad += len(plan.indices) - len(samples)
            if not samples:
                continue
            batch = task.collate(samples)
            weight = task.weight(batch)
            batch = map_tensors(batch, lambda tensor: tensor.to(device))
            losses, _ = split_output(task.loss(model, batch))
            heads = losses if isinstance(losses, dict) else {"loss": losses}
            for head, loss in heads.items():
                sums[head] = sums.get(head, 0.0) + float(loss)
                count = len(samples) if weight is None else weight[head] if isinstance(weight, Mapping) else weight
                units[head] = units.get(head, 0.0) + float(count)
            if metrics is not None:
                update(metrics, task.predict(model, batch), batch)
    means = {head: sums[head] / units[head] for head in sums if units[head]}
    coefficients = task.coefficients
    values = {"loss": sum(coefficients.get(head, 1.0) * mean for head, mean in means.items())} if means else {}
    values |= {f"loss/{head}": mean for head, mean in means.items()} if len(sums) > 1 else {}
    values |= flatten(metrics.compute()) if metrics is not None and length > bad else {}
    return values | {"samples": length - bad, "bad": bad}


def evaluate_checkpoint(
    config: Mapping[str, Any], folder: str, changes: TaskChanges, micro_batch: int
) -> dict[str, float]:
    """Evaluate the newest checkpoint in `folder` without the engine."""
    with _load(config, folder, changes) as (task, model, precision, on_error):
        return evaluate_model(task, model, precision, micro_batch=micro_batch, on_error=on_error)


def predict_checkpoint(config: Mapping[str, Any], folder: str, changes: TaskChanges) -> list[dict[str, Any]]:
    """Predict all evaluation data with the newest checkpoint in `folder`, without the engine and one sample at a time.

    Returns:
        For each sample, the prediction as the task describes it, and the truth under `truth`.
    """
    with _load(config, folder, changes) as (task, model, precision, _), torch.no_grad(), precision.autocast():
        data: Any = task.eval_data()
        micro_batches = MicroBatches(data, task, 0, training=False)
        presenter = task.presenter(task)
        rows = []
        for index in range(len(data)):
            batch = task.collate([micro_batches.sample(index, 0)])
            batch = map_tensors(batch, lambda tensor: tensor.to(precision.device))
            (output,) = split(task.predict(model.eval(), batch), 1)
            rows.append({"truth": presenter.truth(data[index])} | presenter.describe(output))
        return rows


@contextlib.contextmanager
def _load(
    config: Mapping[str, Any], folder: str, changes: TaskChanges
) -> Iterator[tuple[ComparableTask, nn.Module, Precision, OnError]]:
    """The task, its model with the weights of the newest checkpoint, the precision, and `data.on_error`."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = ComparableTask(trainer.task(), changes)
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        model = task.model().to(world.device)
        checkpoint = last_checkpoint(folder)
        assert checkpoint is not None
        load_trained_weights(checkpoint, model)
        yield task, model, Precision(trainer.config.precision, world.device), trainer.config.data.on_error
