"""Whether a training is better than another: intervals of the differences between their results.

Both are evaluated on the same samples, and each part of the samples is left out of both at once. So a sample that is
hard for both does not widen the interval. If each training has several runs, with different seeds, the interval covers
the effect of the seed, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lockstep.parts.entry_line import is_end_of_interval

Array = npt.NDArray[np.float64]
_LEVEL = 0.05
"""The share of intervals that may miss the true difference; of verdicts that may be wrong if there is none."""


@dataclass
class EvaluatedRun:
    """The results of one run, by names such as `eval/accuracy`."""

    step: int
    """Of the checkpoint."""
    full: dict[str, float] = field(default_factory=dict)
    """On all samples."""
    without: dict[str, list[float]] = field(default_factory=dict)
    """Without each part of the samples of its set. A part may leave no value for a metric: it is NaN then."""
    better: dict[str, int] = field(default_factory=dict)
    """1 if a higher value of a result is better, -1 if a lower one is. Absent: nobody knows."""
    samples: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """For each set of evaluation data: the number of its samples, and digests of some."""


@dataclass(frozen=True)
class ResultDifference:
    """How a result of the other training differs from that of the first."""

    name: str
    first: float
    """The mean over the runs of the first training."""
    other: float
    error: float
    """The standard error of the difference. NaN: unknown."""
    freedom: float
    """Degrees of freedom of the error."""
    sign: int
    """1 or -1 if a higher or a lower value is better; 0 if neither is known."""

    @property
    def value(self) -> float:
        return self.other - self.first

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        wide = _quantile(1 - _LEVEL / 2, self.freedom) * self.error
        return self.value - wide, self.value + wide

    @property
    def chance(self) -> float:
        """The probability of such a difference if there is none (two-sided)."""
        if math.isnan(self.error):
            return 1.0
        if self.error == 0:
            return float(self.value == 0)
        return 2 * (1 - _cumulative(abs(self.value) / self.error, self.freedom))


def differences(first: Sequence[EvaluatedRun], other: Sequence[EvaluatedRun]) -> list[ResultDifference]:
    """The differences of all results that all runs have, without the ends of intervals.

    Args:
        first: the runs of a training, which differ in their seeds.
        other: the runs of another training, on the same evaluation data.
    """
    shared = [name for name in first[0].full if all(name in one.full for one in [*first, *other])]
    names = [name for name in shared if not is_end_of_interval(name, first[0].full)]
    return [_difference(name, first, other) for name in names]


def _difference(name: str, first: Sequence[EvaluatedRun], other: Sequence[EvaluatedRun]) -> ResultDifference:
    means, without, spread = [], [], 0.0
    for runs in (first, other):
        values = np.array([one.full[name] for one in runs])
        means.append(float(values.mean()))
        spread += float(((values - values.mean()) ** 2).sum())
        without.append(np.mean([one.without[name] for one in runs], axis=0))
    changes: Array = without[1] - without[0]
    parts, repeated = len(changes), len(first) + len(other) - 2
    of_samples = (parts - 1) / parts * float(((changes - changes.mean()) ** 2).sum())
    of_seeds = spread / repeated * (1 / len(first) + 1 / len(other)) if repeated else 0.0
    total = of_samples + of_seeds
    shares = of_samples**2 / (parts - 1) + (of_seeds**2 / repeated if repeated else 0.0)
    freedom = total**2 / shares if shares else parts - 1.0  # Welch and Satterthwaite
    return ResultDifference(name, means[0], means[1], math.sqrt(total), freedom, first[0].better.get(name, 0))


def verdicts(found: Sequence[ResultDifference], main: str) -> dict[str, str]:
    """`better`, `worse` or `different` for each result whose difference is more than chance; others are not here.

    The main result is judged by itself. The others are judged together, by the method of Holm ("A Simple Sequentially
    Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6, 1979): if there is no difference, one of
    them is called better or worse with a probability of at most 5 %.
    """
    words: Mapping[int, str] = {1: "better", -1: "worse", 0: "different"}
    judged = [one for one in found if one.name == main and one.chance < _LEVEL]
    rest = sorted((one for one in found if one.name != main), key=lambda one: one.chance)
    for place, one in enumerate(rest):
        if one.chance * (len(rest) - place) >= _LEVEL:
            break
        judged.append(one)
    return {one.name: words[one.sign * (1 if one.value > 0 else -1)] for one in judged}


@lru_cache
def _distribution(freedom: float) -> tuple[Array, Array]:
    """Student's distribution, by numerical integration: values from 0, and the cumulative probability of each."""
    values = np.concatenate([np.linspace(0, 20, 20_001), np.geomspace(20, 1e6, 5_000)[1:]])
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(constant - (freedom + 1) / 2 * np.log1p(values**2 / freedom))
    steps = np.diff(values) * (density[1:] + density[:-1]) / 2
    return values, 0.5 + np.concatenate([[0.0], np.cumsum(steps)])


def _cumulative(value: float, freedom: float) -> float:
    return min(1.0, float(np.interp(value, *_distribution(freedom))))


def _quantile(probability: float, freedom: float) -> float:
    values, cumulative = _distribution(freedom)
    return float(np.interp(probability, cumulative, values))
