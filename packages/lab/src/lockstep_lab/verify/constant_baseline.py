"""The best constant output, fitted to the training labels: the best prediction that ignores its input."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.core import task_checks
from lockstep.core.defaults import is_default
from lockstep.core.parallel.world import join_world
from lockstep.core.run_model import seed_everything
from lockstep.core.task import Task
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.free_outputs import FreeOutputs, fit_outputs
from lockstep_lab.verify.reference.evaluation import evaluate_constants, evaluate_model

_EVAL_SAMPLES = 2000
_MOST_CLASSES = 10  # each is tried as the constant answer; if there are more, the most frequent ones
_CERTAIN = 30.0  # added to the output of a class, this makes its probability 1 up to rounding
_STANDARD_ERRORS = 2.6  # by chance, more happens once in 200 trainings


@dataclass
class ConstantBaseline:
    """Loss and metrics of the best constant output."""

    values: dict[str, float] = field(default_factory=dict)
    """The loss of the best constant output. For each metric, the best value of any constant output that was tried."""
    units: float = 0.0
    """Number of units (samples, labels, pixels) of the evaluation data; of the head with the most."""
    untrained: dict[str, float] = field(default_factory=dict)
    """Of the model before training."""
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    """By metric, if torchmetrics knows it."""
    obstacle: str = ""
    """Why there are no values."""
    no_data: bool = False
    """Whether there is no evaluation data."""
    no_predict: bool = False
    """Whether the task has no `predict`."""

    @property
    def comparable_metrics(self) -> list[str]:
        """Names of the metrics whose direction is known: whether higher values are better."""
        return [name for name in self.values if name in self.higher_is_better]

    def chance(self, name: str) -> float:
        """The margin over a constant output that an untrained model may have by chance; 0 if unknown.

        A mean of n values between 0 and 1 has a standard error of at most sqrt(p (1 - p) / n), where p is the mean.
        """
        value = self.values[name]
        if not self.higher_is_better[name] or not 0 <= value <= 1 or not self.units:
            return 0.0
        return _STANDARD_ERRORS * math.sqrt(value * (1 - value) / self.units)

    def is_beaten(self, name: str, value: float) -> bool:
        """True if `value` of the metric `name` beats all constant outputs by more than chance."""
        constant = self.values[name]
        return self.is_better(name, value, constant) and abs(value - constant) > self.chance(name)

    def is_better(self, name: str, value: float, other: float) -> bool:
        """True if `value` of the metric `name` is better than `other`."""
        return value > other if self.higher_is_better[name] else value < other


def constant_baseline(config: Mapping[str, Any], train_samples: int) -> ConstantBaseline:
    """Fit the best constant output to up to `train_samples` samples and evaluate it, on one process."""
    trainer = Trainer(config, quiet=True)
    config = trainer.config.model_dump(by_alias=True)
    task = ComparableTask(task_of(trainer), TaskChanges(train_samples=train_samples, eval_samples=_EVAL_SAMPLES))
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        model = task.model().to(world.device).eval()
        held_out = task.eval_data()
        if held_out is None or not len(held_out):  # type: ignore[arg-type]  # a tensor has no truth value
            return ConstantBaseline(obstacle="there is no evaluation data", no_data=True)
        baseline = ConstantBaseline(no_predict=is_default(task.task.predict))
        baseline.untrained = evaluate_model(task, model, config, world.device)
        try:
            constant = FreeOutputs(model, constant=True)
            fit_outputs(task, constant, world.device)
            baseline.values = evaluate_model(task, constant, config, world.device)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            baseline.obstacle = f"no constant output could be fitted instead of the model's output: {reason}"
            baseline.values = {}
            return baseline
        metrics, _ = task_checks.metrics(task)
        for name, metric in metrics.items() if metrics is not None else ():
            if metric.higher_is_better is not None:
                baseline.higher_is_better[str(name)] = bool(metric.higher_is_better)
        _try_classes(baseline, task, constant, config, world.device)
    return baseline


def _try_classes(
    baseline: ConstantBaseline,
    task: Task,
    outputs: FreeOutputs,
    config: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Make the constant output certain of one class after the other, and keep the best value of each metric.

    The loss has one best constant, but a metric often a different one: the most frequent class of the evaluation data.
    """
    fitted = [output.detach().clone() for output in outputs.outputs]
    largest = max((output.numel() for output in fitted), default=0)
    # A single number encodes two classes.
    constants = [
        [_certain(output, place) for output in fitted]
        for place in range(min(largest, _MOST_CLASSES) if largest > 1 else 2 * largest)
    ]
    with contextlib.suppress(Exception):  # metrics may refuse some constants
        found, baseline.units = evaluate_constants(task, outputs, list(outputs.outputs), constants, config, device)
        for values in found:
            for name in baseline.comparable_metrics:
                if baseline.is_better(name, values[name], baseline.values[name]):
                    baseline.values[name] = values[name]


def _certain(fitted: torch.Tensor, place: int) -> torch.Tensor:
    """A constant output that is certain of the class at `place`. The most frequent class has place 0.

    Classes are in the last dimension, or are the channels of a map.
    """
    if fitted.numel() == 1:
        return torch.full_like(fitted, -_CERTAIN if place else _CERTAIN)
    rows = fitted.reshape(-1, fitted.shape[-1]) if fitted.shape[-1] > 1 else fitted.reshape(1, -1)
    chosen = rows.argsort(dim=-1, descending=True)[:, min(place, rows.shape[-1] - 1)]
    return rows.scatter_add(-1, chosen[:, None], torch.full_like(rows[:, :1], _CERTAIN)).reshape(fitted.shape)
