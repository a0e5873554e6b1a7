"""The order of shards: every sample once, neighbours in few shards, and a pure function."""

import numpy as np
import pytest

from lockstep_recipes.shards.order import ShardOrder

COUNTS = (7, 1, 0, 12, 5, 30)


@pytest.mark.parametrize("window", [1, 2, 6, 7, 55, 1000])
def test_an_epoch_has_every_sample_once_and_another_epoch_another_order(window):
    order = ShardOrder(COUNTS, window)
    epochs = [order(np.arange(order.length), seed=3, epoch=epoch) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(sum(COUNTS)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], order(np.arange(order.length), seed=5, epoch=0))
    # Any positions, in any order and shape, as another object computes them.
    positions = np.random.default_rng(0).integers(0, order.length, (4, 5))
    assert np.array_equal(ShardOrder(COUNTS, window)(positions, seed=3, epoch=2), epochs[2][positions])


def test_the_order_is_that_of_its_description():
    """By hand: shards in an order, behind each other, and each window with the same samples as before, shuffled."""
    window, ends = 6, np.cumsum(COUNTS)
    unshuffled = ShardOrder(COUNTS, 1)(np.arange(55), seed=0, epoch=1).tolist()
    runs = np.split(unshuffled, np.flatnonzero(np.diff(np.searchsorted(ends, unshuffled, side="right"))) + 1)
    assert len(runs) == 5  # of each shard with samples one run, in its own order
    assert all(np.array_equal(run, np.arange(run[0], run[0] + len(run))) for run in runs)
    shuffled = ShardOrder(COUNTS, window)(np.arange(55), seed=0, epoch=1).tolist()
    for begin in range(0, 55, window):
        assert sorted(shuffled[begin : begin + window]) == sorted(unshuffled[begin : begin + window])
    assert shuffled != unshuffled


def test_neighbours_lie_in_few_shards():
    order = ShardOrder([100] * 50, 250)
    ends = np.cumsum([100] * 50)
    found = np.searchsorted(ends, order(np.arange(5000), seed=0, epoch=0), side="right")
    assert all(len(set(found[at : at + 250].tolist())) <= 4 for at in range(0, 5000, 250))
    moved = np.argsort(order(np.arange(5000), seed=0, epoch=0).reshape(20, 250), axis=1)
    assert len({tuple(row) for row in moved.tolist()}) == 20  # each window is shuffled in its own way


def test_a_position_outside_is_refused():
    with pytest.raises(IndexError, match=r"range\(55\)"):
        ShardOrder(COUNTS, 6)(np.array([55]), seed=0, epoch=0)
