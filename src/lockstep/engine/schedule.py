"""Learning-rate schedules as pure functions of applied updates. No state, nothing to save, nothing to forget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

ScheduleName = Literal["constant", "linear", "cosine", "step", "one_cycle", "polynomial"]
_OF_A_LENGTH = ("linear", "cosine", "one_cycle", "polynomial")


@dataclass(frozen=True)
class Schedule:
    """The factor on every group's learning rate. Call it with the number of updates applied so far.

    Args:
        name: shape after the warm-up (`one_cycle` has its own rise; `warmup_steps` sets its length).
        total: updates of the whole training.
        steps_per_epoch: updates of one epoch (for `step`).
        warmup_steps: updates over which the factor rises linearly: update u (from 0) gets (u + 1) / warmup_steps.
        warmup_share: the same as a share of the curve's length, rounded up; it counts instead of `warmup_steps` where it is given.
        end_factor: factor that linear, cosine and polynomial reach after `total` updates.
        step_epochs, gamma: `step` multiplies by `gamma` every `step_epochs` epochs.
        power: of `polynomial`.
        total_steps: length of the curve in updates, where it is not that of the training: a longer training keeps the
            rate of the curve's last update, a shorter one sees its beginning. `constant` and `step` have no length.
    """

    name: ScheduleName = "constant"
    total: int = 1
    steps_per_epoch: int = 1
    warmup_steps: int = 0
    end_factor: float = 0.0
    step_epochs: float = 1
    gamma: float = 0.1
    power: float = 1.0
    total_steps: int | None = None
    warmup_share: float | None = None

    @property
    def length(self) -> int:
        """Of the curve, in updates."""
        return self.total_steps or self.total

    @property
    def warmup(self) -> int:
        """Updates of the warm-up."""
        if self.warmup_share is None:
            return self.warmup_steps
        return math.ceil(self.warmup_share * self.length - 1e-9)  # 0.1 * 30 is a little above 3

    def same_until(self, other: Schedule, updates: int) -> bool:
        """Whether the first `updates` updates have the same rates with `other`, the same schedule of another length."""
        if self.length == other.length or updates == 0 or (self.name not in _OF_A_LENGTH and not self.warmup_share):
            return True
        # Warm-ups of two lengths differ from the first update on; curves that have parted after them do not meet again.
        return self(0) == other(0) and self(updates - 1) == other(updates - 1)

    def __call__(self, update: int) -> float:
        if self.total_steps is not None and self.name in _OF_A_LENGTH:
            update = min(update, self.total_steps - 1)
        if self.name == "one_cycle":
            return self._one_cycle(update)
        if update < self.warmup:
            return self._shape(update) * (update + 1) / self.warmup
        return self._shape(update)

    def _shape(self, update: int) -> float:
        if self.name == "step":  # decays at epoch ends, wherever the warm-up ended
            return float(self.gamma ** math.floor(update / (self.step_epochs * self.steps_per_epoch) + 1e-9))
        done = min(1.0, max(0, update - self.warmup) / max(1, self.length - self.warmup))
        if self.name == "linear":
            return self.end_factor + (1 - self.end_factor) * (1 - done)
        if self.name == "cosine":
            return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * done)) / 2
        if self.name == "polynomial":
            return float(self.end_factor + (1 - self.end_factor) * (1 - done) ** self.power)
        return 1.0

    def _one_cycle(self, update: int) -> float:
        """Smith and Topin 2018, with the phases and factors of torch's OneCycleLR: 1/25 up to 1, down to 1/250000."""
        start, end = 1 / 25, 1 / 25 / 1e4
        peak = float(self.warmup) if self.warmup else 0.3 * self.length
        peak = max(peak - 1, 1e-9)
        if update <= peak:
            low, done = start, update / peak
        else:
            low, done = end, 1 - min(1.0, (update - peak) / max(self.length - 1 - peak, 1e-9))
        return low + (1 - low) * (1 - math.cos(math.pi * done)) / 2


def scaled_lr(lr: float, scaling: Literal["none", "linear", "sqrt"], global_batch: int, reference_batch: int) -> float:
    """Learning rate for `global_batch` samples per update, given the one that was tuned at `reference_batch`.

    linear: Goyal et al. 2017, arXiv:1706.02677. sqrt: Krizhevsky 2014, arXiv:1404.5997.
    """
    ratio = global_batch / reference_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling]


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Give each group its base learning rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
