"""Learning-rate schedules as pure functions of the number of applied updates: there is no state to save."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section

if TYPE_CHECKING:
    from torch.optim import Optimizer

_WITH_LENGTH = ("linear", "cosine", "one_cycle", "polynomial")


class ScheduleConfig(Section):
    """The learning rate as a function of the updates.

    `one_cycle` has its own rise, whose length the warm-up sets. After the end of its curve, a training keeps the last
    factor. A training that ends earlier sees the beginning of the curve. `constant` and `step` have no length.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("warmup_steps", "warmup_share"),)

    name: Literal["constant", "linear", "cosine", "step", "one_cycle", "polynomial"] = "constant"
    """Shape of the curve after the warm-up."""
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
    total_steps: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Length of the curve in updates. None: the length of the run."""


class Schedule(ScheduleConfig):
    """The factor on every group's learning rate. Call it with the number of updates applied so far."""

    model_config = ConfigDict(frozen=True)

    total: int = 1
    """Updates of the whole training."""
    steps_per_epoch: int = 1
    """Updates of an epoch; for `step`."""
    kept_warmup: int | None = None
    """Updates of the warm-up with which the training began, where its share is of another length now."""

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
        """This schedule with the warm-up of `other`, of another length, where both have the same share of warm-up."""
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
    """Set the learning rate of each parameter group to its base learning rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
