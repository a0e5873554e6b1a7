"""Random tasks and runs against plain torch.

The suite has time for a few cases, which are always the same. LOCKSTEP_FUZZ=5000 tries 5000 cases on one rank, and
1000 cases on ranks; each time these are other cases. A failure prints a small case that fails in the same way.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import fuzz_runs
from tests.fuzz_draw import Maker

LONG = int(os.environ.get("LOCKSTEP_FUZZ", "0"))
ON_RANKS = 8  # cases that share the start of a world

# hypothesis only draws a seed. It makes examples out of earlier examples, which would be the same case with another
# field, and it would shrink a case by thousands of trainings; see `fuzz_shrink`.
seeds = given(seed=st.integers(0, 2**63 - 1))


def examples(count, at_length):
    """`count` fixed examples; `at_length` new ones, where LOCKSTEP_FUZZ is set."""
    how_many = max(1, at_length) if LONG else count
    return settings(
        derandomize=not LONG,
        database=None,
        deadline=None,
        max_examples=how_many,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def parts(count):
    """`make test-all` tries `count` times as many cases as `make test`."""
    marks = [(), *(count - 1) * [pytest.mark.exhaustive]]
    return pytest.mark.parametrize("part", [pytest.param(number, marks=mark) for number, mark in enumerate(marks)])


def maker_of(seed, part):
    return Maker(seed + (part << 64))


@parts(6)
@seeds
@examples(1, LONG)
def test_a_case_on_one_rank_is_plain_torch(part, seed):
    fuzz_runs.check("plain", [maker_of(seed, part).case()])


@parts(2)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
@seeds
@examples(1, LONG // 5 // ON_RANKS)
def test_cases_on_ranks_are_plain_torch(world, part, seed):
    maker = maker_of(seed, part)
    fuzz_runs.check("plain", [maker.case(world) for _ in range(ON_RANKS if LONG else ON_RANKS // 2)])


@pytest.mark.exhaustive  # as the next test on ranks
@parts(6)
@seeds
@examples(1, LONG // 5)
def test_random_numbers_in_batches_survive_a_stop(part, seed):
    fuzz_runs.check("resumed", [maker_of(seed, part).noisy()])


@parts(2)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive)])
@seeds
@examples(1, LONG // 5 // ON_RANKS)
def test_random_numbers_in_batches_survive_a_stop_of_ranks(world, part, seed):
    maker = maker_of(seed, part)
    fuzz_runs.check("resumed", [maker.noisy(world) for _ in range(ON_RANKS if LONG else ON_RANKS // 2)])


@pytest.mark.exhaustive  # as test_randomness.py, which draws in each way that there is
@parts(6)
@seeds
@examples(1, LONG // 5)
def test_random_numbers_in_batches_are_the_same_in_workers(part, seed):
    fuzz_runs.check("workers", [maker_of(seed, part).noisy()])
