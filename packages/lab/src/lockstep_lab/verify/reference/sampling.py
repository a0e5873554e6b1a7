"""The samples that an epoch draws if its data set defines them, in plain Python: see `docs/sampling.md`."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lockstep_lab.verify.reference import order as permutation
from lockstep_lab.verify.reference.order import seed_of

_DRAW = 0x3E1647
_LABELS = ("sample_labels", "labels", "targets")


@dataclass(frozen=True)
class Draws:
    """How an epoch draws its samples."""

    length: int
    """Samples that it draws."""
    index_at: Callable[[int, int], int]
    """The index of the sample at a position of an epoch, counted from 0."""
    may_repeat: bool = True
    """False: each sample once. Otherwise the seed of a sample depends on its position, and not on its index."""


def draws_of(data: Any, config: Mapping[str, Any]) -> Draws:
    """How the training data are drawn.

    Args:
        config: of the training, as `RunConfig` writes it.
    """
    order, seed = getattr(data, "order", None), config["seed"]
    if order is not None:
        return Draws(order.length, lambda place, epoch: int(order(np.array([place]), seed=seed, epoch=epoch)[0]))
    weights = of_each(data, "sample_weights")
    if config["data"]["balance"] is not None:
        labels = next(one for one in (of_each(data, name) for name in _LABELS) if one is not None).tolist()
        counts = Counter(labels)
        weights = [1 / counts[label] for label in labels]
    if weights is None:
        count = len(data)
        return Draws(count, lambda at, epoch: permutation.index_at(at, length=count, seed=seed, epoch=epoch), False)
    sums = list(itertools.accumulate(map(float, weights)))
    return Draws(config["data"]["samples_per_epoch"] or len(sums), _by_sums(sums, seed))


def _by_sums(sums: Sequence[float], seed: int) -> Callable[[int, int], int]:
    """A number from 0 to the sum of all weights, of 53 random bits, selects one sample."""

    def index_at(place: int, epoch: int) -> int:
        share = (seed_of(seed, epoch, _DRAW, place) >> 11) / (1 << 53)
        return bisect.bisect_right(sums, share * sums[-1])

    return index_at


def of_each(data: Any, name: str) -> Any:
    """A per-sample attribute, as an array; also from the data inside a `Subset` or a
    `ConcatDataset`. None: there is none."""
    value = getattr(data, name, None)
    if value is None and isinstance(data, Subset):
        inner = of_each(data.dataset, name)
        return None if inner is None else inner[list(data.indices)]
    if value is None and isinstance(data, ConcatDataset):
        parts = [of_each(part, name) for part in data.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    return None if value is None else np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
