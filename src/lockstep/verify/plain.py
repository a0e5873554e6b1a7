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
from lockstep.verify.adjusted import Adjusted, Adjustment, readable
from lockstep.verify.compare import last_checkpoint


def evaluate_plainly(
    task: Task, model: nn.Module, precision: Precision, micro_batch: int = 64, on_error: OnError = "raise"
) -> dict[str, float]:
    """Loss and metrics by a plain loop over the evaluation data on one process: every sample once, in order."""
    device = precision.device
    data = task.eval_data()
    assert data is not None
    length, bad = len(data), 0  # type: ignore[arg-type]
    chunks = MicroBatches(data, task, 0, False, on_error)
    metrics, update = task_checks.metrics(task)
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    model.eval()
    with torch.no_grad(), precision.autocast():
        for chunk in EvaluationPlan(length, micro_batch).chunks(1)[0]:
            samples = readable(chunks, chunk.indices, 0)
            bad += len(chunk.indices) - len(samples)
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
    found = {"loss": sum(task.coefficients.get(head, 1.0) * mean for head, mean in means.items())} if means else {}
    found |= {f"loss/{head}": mean for head, mean in means.items()} if len(sums) > 1 else {}
    found |= flatten(metrics.compute()) if metrics is not None and length > bad else {}
    return found | {"samples": length - bad, "bad": bad}


def evaluate_by_hand(
    config: Mapping[str, Any], folder: str, adjustment: Adjustment, micro_batch: int
) -> dict[str, float]:
    """A trial's newest checkpoint, evaluated without the engine."""
    with _loaded(config, folder, adjustment) as (task, model, precision, on_error):
        return evaluate_plainly(task, model, precision, micro_batch, on_error)


def predict_by_hand(config: Mapping[str, Any], folder: str, adjustment: Adjustment) -> list[dict[str, Any]]:
    """Predictions of a trial's newest checkpoint without the engine, one sample at a time, each with its truth under `truth`."""
    with _loaded(config, folder, adjustment) as (task, model, precision, _), torch.no_grad(), precision.autocast():
        data: Any = task.eval_data()
        chunks = MicroBatches(data, task, 0, training=False)
        presenter = task.presenter(task)
        found = []
        for index in range(len(data)):
            batch = map_tensors(task.collate([chunks.sample(index, 0)]), lambda tensor: tensor.to(precision.device))
            (output,) = split(task.predict(model.eval(), batch), 1)
            found.append({"truth": presenter.truth(data[index])} | presenter.describe(output))
        return found


@contextlib.contextmanager
def _loaded(
    config: Mapping[str, Any], folder: str, adjustment: Adjustment
) -> Iterator[tuple[Adjusted, nn.Module, Precision, OnError]]:
    """The task, its model with the weights of a trial's newest checkpoint, the precision, and what an unreadable sample does."""
    trainer = Trainer(config, run_dir=folder, quiet=True)
    task = Adjusted(trainer.task(), adjustment)
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        model = task.model().to(world.device)
        found = last_checkpoint(folder)
        assert found is not None
        load_trained_weights(found, model)
        yield task, model, Precision(trainer.config.precision, world.device), trainer.config.data.on_error
