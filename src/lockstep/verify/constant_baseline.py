"""The best constant output, fitted to the training labels: the best prediction that ignores its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.distributed.world import join_world
from lockstep.engine import task_checks
from lockstep.run_model import seed_everything
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer
from lockstep.verify.comparable_task import ComparableTask, TaskChanges
from lockstep.verify.free_outputs import FreeOutputs, fit_outputs
from lockstep.verify.reference.evaluation import evaluate_model

_EVAL_SAMPLES = 2000


@dataclass
class ConstantBaseline:
    """Loss and metrics of the best constant output."""

    values: dict[str, float] = field(default_factory=dict)
    """Of the best constant output."""
    untrained: dict[str, float] = field(default_factory=dict)
    """Of the model before training."""
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    """By metric, where torchmetrics knows it."""
    obstacle: str = ""
    """Why there are no values."""
    no_data: bool = False
    """There is no evaluation data."""
    no_predict: bool = False
    """The task has no `predict`."""

    @property
    def comparable_metrics(self) -> list[str]:
        """Names of the metrics of which it is known whether higher values are better."""
        return [name for name in self.values if name in self.higher_is_better]

    def is_better(self, name: str, value: float, other: float) -> bool:
        """Whether `value` of the metric `name` is better than `other`."""
        return value > other if self.higher_is_better[name] else value < other


def constant_baseline(config: Mapping[str, Any], train_samples: int) -> ConstantBaseline:
    """Fit the best constant output to up to `train_samples` samples and evaluate it, on one process."""
    trainer = Trainer(config, quiet=True)
    config = trainer.config.model_dump(by_alias=True)
    task = ComparableTask(trainer.task(), TaskChanges(train_samples=train_samples, eval_samples=_EVAL_SAMPLES))
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        model = task.model().to(world.device).eval()
        if not task.eval_data():
            return ConstantBaseline(obstacle="there is no evaluation data", no_data=True)
        baseline = ConstantBaseline(no_predict=getattr(task.task.predict, "__func__", None) is Task.predict)
        baseline.untrained = evaluate_model(task, model, config, world.device)
        try:
            constant = FreeOutputs(model, constant=True)
            fit_outputs(task, constant, world.device)
            baseline.values = evaluate_model(task, constant, config, world.device)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            baseline.obstacle = f"no constant output could be fitted in place of the model's output: {reason}"
            baseline.values = {}
            return baseline
        metrics, _ = task_checks.metrics(task)
        for name, metric in metrics.items() if metrics is not None else ():
            if metric.higher_is_better is not None:
                baseline.higher_is_better[str(name)] = bool(metric.higher_is_better)
    return baseline
