"""The end of a training before its last step: by the results of its evaluations, or because its time is up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from lockstep.core.config.config_section import Section
from lockstep.core.errors import number_of
from lockstep.core.history import MetricHistory, result_name


class StopRule(Section):
    """A training ends before its last step when the results of its evaluations say so."""

    metric: Annotated[str, AfterValidator(result_name)]
    """Name of the result in the log, such as `eval/loss`."""
    mode: Literal["min", "max"]
    """True if lower or higher results are better."""
    patience: PositiveInt | None = None
    """Number of evaluations without an improvement after which the training ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An evaluation is an improvement only if it is better than the best so far by more than this number."""
    target: float | None = None
    """The training ends at a result as good as this, or better."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.patience is None and self.target is None:
            raise ValueError("never ends a training; give patience, target, or both")
        return self

    def reason(self, results: Sequence[float], steps: Sequence[int] = ()) -> str:
        """The reason why a training with these results ends, as a sentence; empty if it continues.

        Args:
            results: of all evaluations so far, in their order. NaN is not an improvement.
            steps: of the evaluations, to name the step of the best: the first of equal ones. Empty: not known.
        """
        sign = -1.0 if self.mode == "min" else 1.0
        best, since, first = -math.inf, 0, 0
        for number, result in enumerate(results):
            value = sign * result
            if self.target is not None and value >= sign * self.target:
                return f"{self.metric} reached {result:.6g} (train.stop_when.target={self.target:g})"
            if value > best + (self.min_delta if math.isfinite(best) else 0.0):
                best, since, first = value, 0, number
            else:
                since += 1
            if self.patience is not None and since >= self.patience:
                shown = f"{sign * best:.6g}" if math.isfinite(best) else "no number"
                shown += f" (step {steps[first]})" if steps and math.isfinite(best) else ""
                return (
                    f"{self.metric} has not improved on {shown} for {number_of(since, 'evaluation')} "
                    f"(train.stop_when.patience={self.patience})"
                )
        return ""


@dataclass
class Stopping:
    """Decides whether a training ends early. All ranks have the same results, and so decide the same.

    What it decides follows from the results and the seconds that a checkpoint holds. So a run that was killed and goes
    on ends at the same evaluation as a run without a break.
    """

    rule: StopRule | None = None
    max_time_s: float | None = None
    """Seconds of training, over all its starts. None: any time."""
    history: MetricHistory | None = None
    """The results that `rule` decides by."""
    earlier_s: float = 0.0
    """Seconds that earlier starts trained until the checkpoint from which this start resumed."""

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.history = MetricHistory(self.rule.metric)

    def add(self, step: int, results: Mapping[str, float]) -> None:
        """Add the results of an evaluation."""
        if self.history is not None:
            self.history.add(step, results)

    def reason(self) -> str:
        """The reason why the training ends at its last evaluation, as a sentence; empty if it continues."""
        if self.rule is None or self.history is None:
            return ""
        return self.rule.reason(self.history.values, [step for step, _ in self.history.results])

    def time_is_up(self, elapsed_s: float) -> bool:
        """True if the training has used up its time, `elapsed_s` seconds after it was started."""
        return self.max_time_s is not None and self.earlier_s + elapsed_s >= self.max_time_s
