"""From losses to a rate: curves of known shape."""

import math

import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.search import curve

RATES = [curve.rate_at(step, 100, 1e-7, 10.0) for step in range(100)]
KEEP = curve.keep_of(100)


def falling(steepest, least):
    """Losses that fall most steeply at one rate, and are least at a higher rate, over the logarithm of the rate."""
    place = np.log10(RATES)
    fall = 2.3 - 1.8 / (1 + np.exp(-6 * (place - math.log10(steepest))))
    return (fall + np.maximum(0, place - math.log10(least)) ** 2 * 20).tolist()


def test_rates_rise_by_the_same_factor():
    assert (RATES[0], RATES[-1]) == (1e-7, pytest.approx(10.0))
    assert np.allclose(np.diff(np.log(RATES)), math.log(1e8) / 99)


def test_the_average_has_no_bias_and_looks_back_over_few_steps():
    assert curve.smoothed([3.0] * 20, KEEP) == pytest.approx([3.0] * 20)
    assert curve.smoothed([1.0, 2.0], 0.8) == pytest.approx([1.0, (0.8 * 0.2 * 1 + 0.2 * 2) / (1 - 0.8**2)])


@pytest.mark.parametrize("steepest", [1e-4, 1e-2])
def test_the_steepest_descent_is_found_with_noise(steepest):
    noise = np.random.default_rng(0).normal(0, 0.02, 100)
    found = curve.suggest(RATES, (np.array(falling(steepest, 0.3)) + noise).tolist(), KEEP)
    assert abs(math.log10(found.steepest / steepest)) < 0.6  # the average comes some steps late
    assert abs(math.log10(10 * found.tenth_of_minimum / 0.3)) < 0.7
    assert not found.why


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([2.3 + 0.01 * step for step in range(100)], "never falls"),
        *((np.random.default_rng(seed).normal(2.3, 0.05, 100).tolist(), "") for seed in range(20)),
        ([2.3] * 100, ""),
        ([2.3 + 0.1 * (-1) ** step - 0.001 * step for step in range(100)], "flat"),
        ([2.3, 2.2], "only 2 steps"),
        ([], "there are no losses"),
    ],
)
def test_without_a_fall_there_is_no_suggestion(losses, why):
    found = curve.suggest(RATES, losses, KEEP)
    assert (found.steepest, found.tenth_of_minimum) == (None, None)
    assert why in found.why


def test_a_loss_that_still_falls_has_no_minimum():
    found = curve.suggest(RATES, [2.3 - 0.02 * step for step in range(100)], KEEP)
    assert found.steepest is not None
    assert found.tenth_of_minimum is None
    assert "still falls" in found.why


def test_the_end_is_four_times_the_least():
    assert not curve.diverges([2.0, 1.0, 3.9])
    assert curve.diverges([2.0, 1.0, 4.1])
    assert curve.diverges([2.0, math.nan])
    assert not curve.diverges([-1.0, -2.0, 3.0])  # losses below zero: as far above the least


@pytest.mark.parametrize(
    ("low", "high", "steps", "what"),
    [(1.0, 0.1, 100, "--from 1e-7"), (0.0, 1.0, 100, "is not a range"), (1e-5, 1.0, 5, "--steps")],
)
def test_what_is_no_range_is_refused(low, high, steps, what):
    with pytest.raises(UsageError, match=what):
        curve.check(low, high, steps)
