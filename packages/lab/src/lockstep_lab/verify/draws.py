"""Drawn samples: those of a part of a data set, and whether a training used what its data set says."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core.data.dataset import Member, member_of
from lockstep_lab.verify.reference.order import positions_of_step
from lockstep_lab.verify.reference.sampling import draws_of, of_each

_ABSENT = object()
OF_EACH_SAMPLE: tuple[Member, ...] = ("sample_weights", "sample_labels", "labels", "targets")
"""Attributes of a data set that have a value for each sample."""


def of_part(data: Any, name: Member, indices: Sequence[int]) -> Any:
    """An attribute of a data set for its samples `indices`: of `OF_EACH_SAMPLE`, or `order`.

    Raises:
        AttributeError: the data set has no such attribute, or the attribute is not per sample.
    """
    value = member_of(data, name, _ABSENT)
    if name == "order" and value is not _ABSENT:
        is_order = isinstance(getattr(value, "length", None), int)
        return _OrderOfPart(value, len(data), len(indices)) if is_order else value
    values = None if name == "order" else of_each(data, name)
    if values is None and value is None:  # `sample_labels = None` means that there are no labels
        return None
    if values is None or values.shape[:1] != (len(data),):
        raise AttributeError(name)
    return values[list(indices)]


def set_of_part(part: Any, data: Any, indices: Sequence[int]) -> None:
    """Give a part of a data set the attributes that define which samples are drawn."""
    names: tuple[Member, ...] = ("order", *OF_EACH_SAMPLE)
    for name in names:
        with contextlib.suppress(AttributeError):
            setattr(part, name, of_part(data, name, indices))


class _OrderOfPart:
    """The user's own order, for evenly spread samples of the data set: those nearest to the samples that it draws."""

    def __init__(self, order: Any, whole: int, part: int) -> None:
        self.order, self.whole, self.part = order, whole, part
        self.length = max(1, order.length * part // whole)

    def __call__(self, positions: npt.NDArray[np.int64], *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.order(positions, seed=seed, epoch=epoch)
        return found * self.part // self.whole


def planned(data: Any, config: Mapping[str, Any], steps: int) -> list[list[int]] | None:
    """The indices of the samples of the first steps, sorted. None: an epoch has each sample once."""
    draws = draws_of(data, config)
    if not draws.may_repeat:
        return None
    rule = {
        "length": draws.length,
        "global_batch": int(config["batch"]["global"]),
        "seed": config["seed"],
        "drop_last": config["data"]["drop_last"],
        "group_by_length": config["data"]["group_by_length"],
        "lengths": member_of(data, "lengths"),
        "index": draws.index_at,
    }
    found = [positions_of_step(step, **rule) for step in range(steps)]
    return [sorted(draws.index_at(place, epoch) for place in positions) for positions, epoch in found]


def complaint(step: int, wanted: Sequence[int], by_rank: Sequence[Sequence[int]], *, skips: bool) -> str:
    """A complaint if the ranks of a step used different samples, or used them more or less often; else empty.

    Args:
        step: counted from 0.
        wanted: with repetitions.
        skips: whether unreadable samples are left out.
    """
    asked, used = Counter(wanted), Counter(index for indices in by_rank for index in indices)
    lost, foreign = asked - used, used - asked
    if not foreign and (skips or not lost):
        return ""
    return (
        f"step {step + 1} uses {used.total()} draws of {asked.total()}; lost: {sorted(lost.elements())[:5] or 'none'}, "
        f"of a different step: {sorted(foreign.elements())[:5] or 'none'}"
    )
