"""Evaluations of some samples, spread evenly over the data set."""

import numpy as np
import pytest

from lockstep.core.data.order import EvaluationPlan


@pytest.mark.parametrize("lengths", [None, np.arange(100) % 7])
@pytest.mark.parametrize("limit", [1, 7, 99, 100, 1000])
def test_limit_spreads_the_samples_evenly_for_every_number_of_ranks(limit, lengths):
    plan = EvaluationPlan(100, 4, lengths, limit)
    count = min(limit, 100)
    expected = [number * 100 // count for number in range(count)]
    for world in (1, 2, 3):
        found = [index for rank in plan.by_rank(world) for micro in rank if not micro.filler for index in micro.indices]
        assert sorted(found) == expected
    assert plan.count == len(set(expected)) == count
    assert set(plan.first(3)) <= set(expected)
    assert EvaluationPlan(0, 4, None, limit).by_rank(2) == [[], []]
