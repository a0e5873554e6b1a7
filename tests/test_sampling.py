"""Trainings whose data set draws its samples by weights, by labels, or by an order of its own."""

import pytest

from tests import runs
from tests.ranks import run_ranks
from tests.sampling_cases import LENGTH, WEIGHTS, EasyFirst, by_hand, by_weights, settings, trained

STEPS = 9


@pytest.fixture(scope="module")
def weighted():
    """Weights of plain torch where samples are drawn by `WEIGHTS`."""
    return by_hand(STEPS, by_weights(WEIGHTS), LENGTH)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_draws_by_weights_are_those_of_plain_torch_on_every_number_of_ranks(weighted, world, tmp_path):
    config = settings(STEPS, batch={"micro": 5})  # two micro-batches on two ranks
    for found in run_ranks(world, trained, {"sample_weights": WEIGHTS}, config, tmp_path):
        assert runs.difference(found, weighted) < 1e-10


def test_an_order_of_the_users_own(tmp_path):
    order = EasyFirst()
    expected = by_hand(STEPS, lambda epoch, position: int(order(position, seed=0, epoch=epoch)), order.length)
    for found in run_ranks(2, trained, {"order": order}, settings(STEPS), tmp_path):
        assert runs.difference(found, expected) < 1e-10
