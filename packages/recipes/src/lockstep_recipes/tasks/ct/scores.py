"""Scores of predicted risks against yes/no labels, in NumPy and float64.

Every function takes arrays of one question without unknown labels. scikit-learn computes the same numbers. It is not
used, because an interval needs thousands of weighted AUCs, which it would compute one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep_recipes.tasks.arrays import Array

_LARGEST = 4_000_000  # numbers in an array of resamples
_LEAST_IN_BIN = 5
_LEAST_DEFINED = 0.5  # an interval needs a defined score in this fraction of the resamples


class ComparablePairs(NamedTuple):
    """Pairs of a case and a control, for each resample."""

    concordant: Array
    """float64 (resamples): pairs in which the case has the higher risk. Equal risks count as half a pair."""
    all: Array
    """float64 (resamples): all pairs."""

    def share(self) -> Array:
        """The fraction of concordant pairs; NaN if there are no pairs."""
        with np.errstate(invalid="ignore"):
            return self.concordant / np.where(self.all > 0, self.all, np.nan)


def concordant_pairs(risks: Array, cases: Array, controls: Array, weights: Array) -> ComparablePairs:
    """Compare each case with each control, in O(n log n).

    Args:
        risks: (n).
        cases, controls: bool (n). A row may be neither.
        weights: (resamples, n): how often each resample contains each row.
    """
    order = np.argsort(risks, kind="stable")
    ordered = risks[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))  # starts of groups of equal risks
    above, below = [np.add.reduceat(weights[:, order] * part[order], starts, axis=1) for part in (cases, controls)]
    lower = below.cumsum(axis=1) - below
    return ComparablePairs((above * (lower + below / 2)).sum(axis=1), above.sum(axis=1) * below.sum(axis=1))


def auc(risks: Array, labels: Array, weights: Array | None = None) -> Array:
    """The area under the ROC curve: the fraction of pairs of a positive and a negative row in which the positive row
    has the higher risk (Hanley and McNeil 1982, doi:10.1148/radiology.143.1.7063747).

    Args:
        risks, labels: (n).
        weights: (resamples, n). Default: a single resample with each row once.

    Returns:
        (resamples). NaN if only one class is present.
    """
    if not len(risks):
        return np.full(1 if weights is None else len(weights), np.nan)
    weights = np.ones((1, len(risks))) if weights is None else weights
    return concordant_pairs(risks, labels == 1, labels == 0, weights).share()


def concordance(risks: Array, times: Array, events: Array, weights: Array | None = None) -> Array:
    """Harrell's concordance index (Harrell et al. 1996, Statistics in Medicine 15, pages 361-387).

    A pair is compared if one row has an event, and the other row is known to be free of the event at that time: its own
    event is later, or it is censored at this time or later. Two events at the same time are not compared.

    Args:
        risks, times: (n).
        events: bool (n): whether the event was seen at this time. Otherwise the row is censored at this time.
        weights: as in `auc`.

    Returns:
        (resamples). NaN if no pair can be compared.
    """
    weights = np.ones((1, len(risks))) if weights is None else weights
    concordant, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    for time in np.unique(times[events]):
        found = concordant_pairs(risks, events & (times == time), (times > time) | (~events & (times == time)), weights)
        concordant += found.concordant
        pairs += found.all
    return ComparablePairs(concordant, pairs).share()


def event_times(labels: Array, horizons: Sequence[float]) -> tuple[Array, Array]:
    """When an event was seen, or until when it is known not to have happened, from labels at several horizons.

    An event is placed at the first horizon whose label is 1. A row without such a label is censored at the last horizon
    whose label is 0.

    Args:
        labels: (n, horizons): 1, 0, or NaN for unknown.
        horizons: ascending, such as years.

    Returns:
        times (n), NaN for rows without a known label; and bool (n): whether the event was seen.
    """
    years = np.asarray(horizons, dtype=np.float64)
    first = np.where(labels == 1, years, np.inf).min(axis=1)
    free = np.where(labels == 0, years, -np.inf).max(axis=1)
    events = np.isfinite(first)
    return np.where(events, first, np.where(np.isfinite(free), free, np.nan)), events


def average_precision(risks: Array, labels: Array) -> float:
    """The sum of the precision at each threshold, times the recall that this threshold adds. NaN if only one class is
    present."""
    true, false = _counts_above(risks, labels)
    if not len(true) or not true[-1] or not false[-1]:
        return np.nan
    gained = np.diff(true, prepend=0.0) / true[-1]
    return float((gained * true / (true + false)).sum())


def roc(risks: Array, labels: Array, false_positive_rates: Array) -> Array:
    """The sensitivity at given false-positive rates, by linear interpolation between the points of the ROC curve. NaN
    if only one class is present."""
    true, false = _counts_above(risks, labels)
    if not len(true) or not true[-1] or not false[-1]:
        return np.full(len(false_positive_rates), np.nan)
    across, up = (np.concatenate([[0.0], counts / counts[-1]]) for counts in (false, true))
    sensitivities: Array = np.interp(false_positive_rates, across, up)
    return sensitivities


def _counts_above(risks: Array, labels: Array) -> tuple[Array, Array]:
    """Numbers of positive and of negative rows whose risk is at least each distinct risk, from the highest risk."""
    order = np.argsort(-risks, kind="stable")
    ordered, positive = risks[order], (labels[order] == 1).astype(np.float64)
    ends = np.flatnonzero(np.concatenate([ordered[1:] != ordered[:-1], [True]])) if len(risks) else np.zeros(0, int)
    return positive.cumsum()[ends], (1 - positive).cumsum()[ends]


def brier(risks: Array, labels: Array) -> float:
    """The mean squared difference of risk and label (Brier 1950). NaN without rows."""
    return float(((risks - labels) ** 2).mean()) if len(risks) else np.nan


def sensitivity_and_specificity(risks: Array, labels: Array, threshold: float) -> tuple[float, float]:
    """The fraction of positive rows with at least the risk `threshold`, and of negative rows below it. NaN without such
    rows."""
    said = risks >= threshold
    shares = (part.mean() if len(part) else np.nan for part in (said[labels == 1], ~said[labels == 0]))
    sensitivity, specificity = (float(share) for share in shares)
    return sensitivity, specificity


def calibration(risks: Array, labels: Array, bins: int) -> Array:
    """Predicted risks and observed frequencies, in bins between quantiles of the risks. There are fewer bins if a bin
    would have less than 5 rows. Equal risks are in the same bin.

    Returns:
        (bins, 3): mean risk, fraction of positive labels, number of rows. Bins without rows have NaN, NaN, 0.
    """
    table = np.full((bins, 3), np.nan)
    table[:, 2] = 0
    if not len(risks):
        return table
    edges = np.percentile(risks, 100 * np.linspace(0, 1, max(1, min(bins, len(risks) // _LEAST_IN_BIN)) + 1))
    places = np.searchsorted(edges[1:-1], risks)
    for place in np.unique(places):
        inside = places == place
        table[place] = risks[inside].mean(), labels[inside].mean(), inside.sum()
    return table


def resamples(groups: Array, count: int, seed: int) -> Iterator[Array]:
    """Bootstrap resamples of groups of rows, such as all scans of a patient. They depend only on the arguments.

    Args:
        groups: int (n): the number of the group of each row, from 0.

    Yields:
        float64 (some of `count`, n): how often each resample contains each row.
    """
    random, number = np.random.default_rng(seed), int(groups.max()) + 1 if len(groups) else 0
    at_once = max(1, _LARGEST // max(1, len(groups)))
    for start in range(0, count if number else 0, at_once):
        rows = min(at_once, count - start)
        places = random.integers(0, number, (rows, number)) + number * np.arange(rows)[:, None]
        yield np.bincount(places.ravel(), minlength=rows * number).reshape(rows, number)[:, groups].astype(np.float64)


def interval(values: Array, level: float) -> tuple[float, float]:
    """The percentile interval of a score over resamples.

    Resamples in which the score is undefined (NaN) are left out. NaN, NaN if these are more than half.
    """
    defined = values[np.isfinite(values)]
    if not len(values) or len(defined) < _LEAST_DEFINED * len(values):
        return np.nan, np.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


Score = Callable[[Array | None], Array]
"""A score under weights (resamples, n): (resamples). Without weights: (1)."""


def intervals(
    scores: Sequence[Score], groups: Array, *, count: int, seed: int, level: float
) -> list[tuple[float, float]]:
    """Bootstrap intervals of several scores over the same resamples (Efron and Tibshirani 1993, chapter 13).

    Args:
        groups: int (n), as in `resamples`.
        count: number of resamples.
        level: such as 0.95.
    """
    values: list[list[Array]] = [[] for _ in scores]
    for weights in resamples(groups, count, seed):
        for score, found in zip(scores, values, strict=True):
            found.append(score(weights))
    return [interval(np.concatenate(found) if found else np.zeros(0), level) for found in values]
