"""Learning rates in closed form, from the config only. `docs/config.md` defines the keys.

Tests compare each curve with the scheduler of the same name in `torch.optim.lr_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any


def scaled_lr(optim: Mapping[str, Any], global_batch: int) -> float:
    """The factor on all learning rates: how `optim.lr_scaling` scales them with the global batch."""
    exponents = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
    return float((global_batch / optim["reference_batch"]) ** exponents[optim["lr_scaling"]])


def factor(
    schedule: Mapping[str, Any],
    updates: int,
    *,
    total: int,
    steps_per_epoch: int,
    own: Callable[[int], float] | None = None,
) -> float:
    """The factor on the learning rate of the next update.

    Args:
        schedule: the config's section.
        updates: updates made so far.
        total: updates of the whole training.
        steps_per_epoch: updates of an epoch.
        own: the user's function of the updates, which replaces `schedule.name`.
    """
    name, end = schedule["name"], float(schedule["end_factor"])
    length = int(schedule["total_steps"] or total)
    warmup = warmup_updates(schedule, length)
    if name in ("linear", "cosine", "polynomial", "one_cycle"):
        updates = min(updates, length - 1)  # after its end, a curve keeps its last value
    if name == "one_cycle":
        return _one_cycle(updates, warmup or Fraction(3, 10) * length, length)
    rising = Fraction(updates + 1, warmup) if updates < warmup else Fraction(1)
    left = 1 - Fraction(max(updates - warmup, 0), max(length - warmup, 1))  # the remaining fraction of the curve
    if own is not None:
        shape = float(own(updates))
    elif name == "step":
        passed = updates // (Fraction(str(schedule["step_epochs"])) * steps_per_epoch)
        shape = float(schedule["gamma"]) ** passed
    elif name == "linear":
        shape = end + (1 - end) * float(left)
    elif name == "polynomial":
        shape = end + (1 - end) * float(left) ** float(schedule["power"])
    elif name == "cosine":
        shape = end + (1 - end) * math.sin(math.pi / 2 * float(left)) ** 2
    else:
        shape = 1.0
    return shape * float(rising)


def warmup_updates(schedule: Mapping[str, Any], length: int) -> int:
    """The updates of the warm-up.

    Args:
        schedule: the config's section.
        length: updates of the whole curve.
    """
    share = schedule["warmup_share"]
    return int(schedule["warmup_steps"]) if share is None else math.ceil(Fraction(str(share)) * length)


def _one_cycle(updates: int, warmup: Fraction | int, length: int) -> float:
    """Half a cosine up from 1/25, then half a cosine down to 1/250000 (Smith and Topin 2018, arXiv:1708.07120)."""
    top = max(float(warmup) - 1, 1e-9)  # the update with the highest rate, counted from 0
    low, share = 1 / 25, updates / top
    if updates > top:
        low, share = 1 / 250_000, (length - 1 - updates) / max(length - 1 - top, 1e-9)
    return low + (1 - low) * math.sin(math.pi / 2 * share) ** 2
