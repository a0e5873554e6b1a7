"""The best that can be predicted without looking at the input: a constant output, fitted to the training labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.build import seed_everything
from lockstep.distributed.precision import Precision
from lockstep.distributed.world import join_world
from lockstep.engine import task_checks
from lockstep.tasks.task import Task
from lockstep.trainer import Trainer
from lockstep.verify.adjusted import Adjusted, Adjustment
from lockstep.verify.outputs import Outputs, fit
from lockstep.verify.plain import evaluate_plainly

_EVALUATED = 2000


@dataclass
class Trivial:
    """values: loss and metrics of the best constant output. before: those of the untrained model. directed: metrics of which it is known
    whether more is better. obstacle: why there are no values."""

    values: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    obstacle: str = ""
    no_data: bool = False
    no_predict: bool = False

    @property
    def directed(self) -> list[str]:
        """Names of the metrics that can be compared."""
        return [name for name in self.values if name in self.higher_is_better]

    def is_better(self, name: str, one: float, other: float) -> bool:
        """Whether metric `name` is better at `one`."""
        return one > other if self.higher_is_better[name] else one < other


def trivial(config: Mapping[str, Any], samples: int) -> Trivial:
    """Fit the best constant output to up to `samples` training samples, and evaluate it; on one process."""
    trainer = Trainer(config, quiet=True)
    task = Adjusted(trainer.task(), Adjustment(part=samples, eval_part=_EVALUATED))
    with join_world(trainer.config.device) as world:
        seed_everything(trainer.config)
        model = task.model().to(world.device).eval()
        if not task.eval_data():
            return Trivial(obstacle="there is no evaluation data", no_data=True)
        found, precision = (
            Trivial(no_predict=getattr(task.task.predict, "__func__", None) is Task.predict),
            Precision(trainer.config.precision, world.device),
        )
        found.before = evaluate_plainly(task, model, precision, on_error=trainer.config.data.on_error)
        try:
            constant = Outputs(model, constant=True)
            fit(task, constant, world.device)
            found.values = evaluate_plainly(task, constant, precision, on_error=trainer.config.data.on_error)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.obstacle, found.values = (
                f"no constant output could be fitted in the place of the model's: {reason}",
                {},
            )
            return found
        metrics, _ = task_checks.metrics(task)
        for name, one in metrics.items() if metrics is not None else ():
            if one.higher_is_better is not None:
                found.higher_is_better[str(name)] = bool(one.higher_is_better)
    return found
