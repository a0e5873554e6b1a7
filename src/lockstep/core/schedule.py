"""Learning-rate schedules as pure functions of the number of applied updates: there is no state to save."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section
from lockstep.core.errors import TrainingError, UsageError, number_of
from lockstep.core.history import MetricHistory, result_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NAMES = ("constant", "linear", "cosine", "step", "one_cycle", "polynomial", "plateau")
_WITH_LENGTH = ("linear", "cosine", "one_cycle", "polynomial")


def _known(name: str) -> str:
    if name not in _NAMES and ":" not in name:
        raise ValueError(f"{name!r} is none of {', '.join(map(repr, _NAMES))}, and no FILE.py:function")
    return name


class Plateau(Section):
    """The learning rate falls when a result of the evaluations improves no more, as with torch's ReduceLROnPlateau.

    The factor follows from the results of all evaluations, which checkpoints hold. So a resumed run has the same rates.
    """

    metric: Annotated[str, AfterValidator(result_name)]
    """Name of the result in the log, such as `eval/loss`."""
    mode: Literal["min", "max"]
    """True if lower or higher results are better."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Evaluations without an improvement that are tolerated. The rate falls after the next."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """By which the learning rate is multiplied each time."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An evaluation is an improvement only if it is better than the best so far by more than this number."""
    min_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The least factor on the learning rate."""

    def factor_after(self, results: Sequence[float]) -> float:
        """The factor on the learning rate after evaluations with these results. NaN is not an improvement."""
        sign, best, since, factor = -1.0 if self.mode == "min" else 1.0, -math.inf, 0, 1.0
        for result in results:
            if sign * result > best + (self.min_delta if math.isfinite(best) else 0.0):
                best, since = sign * result, 0
            else:
                since += 1
            if since > self.patience:
                factor, since = max(factor * self.factor, self.min_factor), 0
        return factor


class ScheduleConfig(Section):
    """The learning rate as a function of the updates.

    `one_cycle` has its own rise, whose length the warm-up sets. After the end of its curve, a training keeps the last
    factor. A training that ends earlier sees the beginning of the curve. `constant` and `step` have no length.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("warmup_steps", "warmup_share"),)

    name: Annotated[str, AfterValidator(_known)] = "constant"
    """Shape of the curve after the warm-up: constant, linear, cosine, step, one_cycle, polynomial or plateau; or a
    function of the updates that returns a factor, as `FILE.py:function` or `package.module:function`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Length of the warm-up in updates."""
    warmup_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Length of the warm-up as a share of the curve's length."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """For linear, cosine and polynomial: the factor on the learning rate at the end of the curve."""
    step_epochs: PositiveFloat = 1
    """For step: epochs between two decreases of the learning rate."""
    gamma: PositiveFloat = 0.1
    """For step: the factor of each decrease."""
    power: PositiveFloat = 1.0
    """For polynomial: the exponent."""
    plateau: Plateau | None = None
    """For plateau: the result of the evaluations that the learning rate follows."""
    total_steps: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Length of the curve in updates. None: the length of the run."""

    @model_validator(mode="after")
    def _plateau_has_a_metric(self) -> Self:
        if (self.name == "plateau") != (self.plateau is not None):
            raise ValueError("name=plateau needs the section plateau: metric and mode; only plateau has it")
        return self


class Schedule(ScheduleConfig):
    """The factor on every group's learning rate. Call it with the number of updates applied so far."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    total: int = 1
    """Updates of the whole training."""
    steps_per_epoch: int = 1
    """Updates of an epoch; for `step`."""
    kept_warmup: int | None = None
    """Updates of the warm-up that the training began with, if its share has a different length now."""
    own: Callable[[int], float] | None = None
    """The user's function of the updates, instead of `name`."""
    history: MetricHistory | None = None
    """The results that `plateau` follows. They grow with each evaluation."""

    @property
    def length(self) -> int:
        """Length of the curve, in updates."""
        return self.total_steps or self.total

    @property
    def warmup(self) -> int:
        """Length of the warm-up, in updates."""
        if self.warmup_share is None:
            return self.warmup_steps
        if self.kept_warmup is not None:
            return self.kept_warmup
        return math.ceil(self.warmup_share * self.length - 1e-9)  # 0.1 * 30 is a little above 3

    def add(self, step: int, results: Mapping[str, float]) -> None:
        """Add the results of an evaluation, which `plateau` follows."""
        if self.history is not None:
            self.history.add(step, results)

    def same_until(self, other: Schedule, updates: int) -> bool:
        """True if the first `updates` updates have the same factors with `other`.

        The two differ only in length, and have the same warm-up; see `with_warmup_of`.
        """
        if self.length == other.length or updates == 0 or self.name not in _WITH_LENGTH:
            return True
        # The curves separate once, and do not meet again but where one rises and the other falls (`one_cycle`). They
        # are not equal at two updates in a row then.
        return all(self(update) == other(update) for update in range(max(0, updates - 2), updates))

    def with_warmup_of(self, other: Schedule) -> Schedule:
        """This schedule with the warm-up of `other`, of a different length, if both have the same share of warm-up."""
        if self.warmup_share is None or self.warmup_share != other.warmup_share or self.warmup == other.warmup:
            return self
        return self.model_copy(update={"kept_warmup": other.warmup})

    def __call__(self, update: int) -> float:
        if self.total_steps is not None and self.name in _WITH_LENGTH:
            update = min(update, self.total_steps - 1)
        if self.name == "one_cycle":
            return self._one_cycle(update)
        warmup = self.warmup
        shape = self._shape(update, warmup)
        return shape * (update + 1) / warmup if update < warmup else shape

    def _shape(self, update: int, warmup: int) -> float:
        if self.own is not None:
            return self._own(self.own, update)
        if self.plateau is not None and self.history is not None:
            return self.plateau.factor_after(self.history.values)
        if self.name == "step":  # counts epochs from the beginning of training, not from the end of the warm-up
            return float(self.gamma ** math.floor(update / (self.step_epochs * self.steps_per_epoch) + 1e-9))
        if self.name == "constant":
            return 1.0
        done = min(1.0, max(0, update - warmup) / max(1, self.length - warmup))
        if self.name == "linear":
            return self.end_factor + (1 - self.end_factor) * (1 - done)
        if self.name == "cosine":
            return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * done)) / 2
        if self.name == "polynomial":
            return float(self.end_factor + (1 - self.end_factor) * (1 - done) ** self.power)
        return 1.0

    def _own(self, function: Callable[[int], float], update: int) -> float:
        factor = function(update)
        if not isinstance(factor, numbers.Real) or not math.isfinite(factor) or factor < 0:
            raise UsageError(
                f"it returned {factor!r} for update {update}, a {type(factor).__name__}",
                where=f"schedule.name={self.name}" if ":" in self.name else "Task.schedule",
                remedy="return a factor on the learning rate: a finite number, 0 or more, such as float(value)",
            )
        return float(factor)

    def _one_cycle(self, update: int) -> float:
        """The 1cycle policy (Smith and Topin 2018, arXiv:1708.07120) with the factors of torch's OneCycleLR.

        The factor rises from 1/25 to 1, and falls to 1/250000.
        """
        start, end = 1 / 25, 1 / 25 / 1e4
        peak = float(self.warmup) if self.warmup else 0.3 * self.length
        peak = max(peak - 1, 1e-9)
        if update <= peak:
            low, done = start, update / peak
        else:
            low, done = end, 1 - min(1.0, (update - peak) / max(self.length - 1 - peak, 1e-9))
        return low + (1 - low) * (1 - math.cos(math.pi * done)) / 2


def scaled_lr(
    lr: float, scaling: Literal["none", "linear", "sqrt"], *, global_batch: int, reference_batch: int
) -> float:
    """The learning rate for `global_batch` samples per update.

    Args:
        lr: learning rate that was tuned with `reference_batch` samples per update.
        scaling: `linear`: proportional to the batch (Goyal et al. 2017, arXiv:1706.02677). `sqrt`: proportional to the
            square root of the batch (Krizhevsky 2014, arXiv:1404.5997). `none`: `lr` as it is.
    """
    ratio = global_batch / reference_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling]


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of each parameter group to its base learning rate times `factor`.

    Raises:
        TrainingError: a group has no base learning rate, because code of the user has added it.
    """
    for group in optimizer.param_groups:
        if "base_lr" not in group:
            what = (
                f"a group of {number_of(len(group['params']), 'parameter')} was added to the optimizer "
                "after it was made"
            )
            remedy = "let Task.model make all parameters, and optim.groups or Task.optimizer their groups"
            raise TrainingError(what, where="optim", remedy=remedy)
        group["lr"] = group["base_lr"] * factor
