import itertools
import math
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.data.order import EvaluationPlan, StepPlan, derive_seed, derive_seeds, group, permute, split_for_rank

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=30)
GRID = list(itertools.product(range(1, 41), range(1, 6), range(1, 8)))  # count, world, micro-batch


def order(length, seed=0, epoch=0):
    return permute(np.arange(length), length, seed, epoch)


def peak_memory(work):
    """Result of `work()` and the most bytes it held at once (NumPy reports its arrays to tracemalloc)."""
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def chi_square(counts):
    """How far `counts` are from all equal, in standard deviations above the mean of the chi-square distribution."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free)


def flatten(micro_batches):
    return [micro_batch for rank in micro_batches for micro_batch in rank]


def real(micro_batches):
    """Samples that count, over all ranks and micro-batches."""
    return [index for micro_batch in flatten(micro_batches) if not micro_batch.filler for index in micro_batch.indices]


# ---- permute


@pytest.mark.cases("9223372036854775813-1", "-3-1000")
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**63 + 5, 1), (-3, 1000)])
def test_every_length_to_300_is_permuted_one_to_one(seed, epoch):
    for length in range(1, 301):
        assert sorted(order(length, seed, epoch).tolist()) == list(range(length)), length


@pytest.mark.parametrize("length", [8191, 8192, 8193, 2**16, 2**16 + 1, 99_991, 250_000])
def test_large_lengths_are_permuted_one_to_one(length):
    hits = np.bincount(order(length, 3, 4), minlength=length)
    assert hits.size == length
    assert (hits == 1).all()


def test_every_seed_and_epoch_gives_another_order():
    keys = list(itertools.product(range(20), range(20)))
    assert len({order(50, seed, epoch).tobytes() for seed, epoch in keys}) == len(keys)


def test_the_same_key_gives_the_same_order():
    assert (order(1000, 5, 6) == order(1000, 5, 6)).all()


def test_orders_of_successive_epochs_and_seeds_are_unrelated():
    # two independent permutations agree in one place on average, whatever their length
    by_epoch = [order(64, 0, epoch) for epoch in range(200)]
    by_seed = [order(64, seed, 0) for seed in range(200)]
    for orders in (by_epoch, by_seed):
        matches = np.mean([(a == b).sum() for a, b in itertools.pairwise(orders)])
        assert 0.75 < matches < 1.25


def test_neighbours_do_not_stay_neighbours():
    # n independent steps between neighbours take about n * (1 - 1/e) different values; a rotation or a stride takes one
    steps = np.diff(order(10_000, 1, 2)) % 10_000
    assert 6000 < len(np.unique(steps)) < 6700


@pytest.mark.parametrize("length", [1, 2, 3, 7, 30, 100, 1000])
def test_single_positions_are_places_of_the_whole(length):
    whole = order(length, 9, 3)
    for position in range(0, length, max(1, length // 40)):
        assert permute([position], length, 9, 3).tolist() == [whole[position]]
        assert int(permute(position, length, 9, 3)) == whole[position]


def test_any_selection_of_positions_equals_that_of_the_whole():
    generator = np.random.default_rng(0)
    for length in (1, 5, 50, 1234):
        whole = order(length, 2, 8)
        for _ in range(20):
            start, stop = sorted(generator.integers(0, length + 1, 2))
            assert (permute(np.arange(start, stop), length, 2, 8) == whole[start:stop]).all()
            chosen = generator.integers(0, length, 30)
            assert (permute(chosen, length, 2, 8) == whole[chosen]).all()


@settings(FIXED, max_examples=12)
@given(st.integers(1, 2**62), st.integers(-(2**63), 2**64), st.integers(0, 2**40), st.data())
def test_places_are_distinct_in_range_and_independent_of_company(length, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    places = permute(positions, length, seed, epoch).tolist()
    assert len(set(places)) == len(positions)
    assert all(0 <= place < length for place in places)
    assert permute(positions[-1], length, seed, epoch) == places[-1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_the_result_has_the_shape_of_the_positions_and_leaves_them_alone(dtype):
    positions = np.arange(12, dtype=dtype).reshape(3, 4)
    result = permute(positions, 100, 1)
    assert result.shape == (3, 4)
    assert result.dtype == np.int64
    assert (positions == np.arange(12).reshape(3, 4)).all()
    assert permute(5, 100, 1).shape == ()
    assert permute(np.arange(0), 100, 1).shape == (0,)
    assert result[1, 1] == permute(5, 100, 1)


@pytest.mark.parametrize("length", [10**12, 2**62 - 1, 2**62])
def test_huge_lengths_cost_no_memory(length):
    positions = np.concatenate(
        [np.arange(500), np.arange(length - 500, length), np.arange(length // 2, length // 2 + 500)]
    )
    places, peak = peak_memory(lambda: permute(positions, length, 1, 2))
    assert peak < 500_000
    assert places.min() >= 0
    assert places.max() < length
    assert len(np.unique(places)) == len(positions)


def test_huge_lengths_are_spread_evenly():
    length = 10**12
    places = permute(np.arange(16_000), length, 3)
    assert chi_square(np.bincount(places * 16 // length, minlength=16)) < 5
    first = np.array([int(permute(0, length, seed)) for seed in range(800)])
    assert chi_square(np.bincount(first * 8 // length, minlength=8)) < 5


@pytest.mark.cases("2", "12")
@pytest.mark.parametrize("length", [2, 5, 12])
def test_every_index_lands_on_every_place_equally_often(length):
    keys = 500
    landed = np.zeros((length, length))
    first_two = np.zeros((length, length))
    for seed in range(keys):
        places = order(length, seed, seed % 7)
        landed[np.arange(length), places] += 1
        first_two[places[0], places[1]] += 1
    # rows and columns of `landed` have fixed sums, which only lowers its chi-square
    assert chi_square(landed) < 5
    assert landed.min() > 0.5 * keys / length
    assert chi_square(first_two[~np.eye(length, dtype=bool)]) < 5


def test_small_lengths_reach_every_permutation():
    for length in (1, 2, 3, 4):
        assert len({tuple(order(length, seed)) for seed in range(250)}) == math.factorial(length)


def test_orders_never_change():
    # a run that is resumed by a later version must go on in the order it began
    assert order(10, 0, 0).tolist() == [3, 8, 5, 0, 9, 7, 4, 6, 2, 1]
    assert order(10, 0, 1).tolist() == [1, 2, 9, 7, 8, 0, 4, 3, 5, 6]
    assert permute([0, 1, 10**12 - 1], 10**12, 42, 3).tolist() == [564421384746, 796583636731, 748497919952]


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1, 2**64])
def test_lengths_without_permutation_are_refused_with_their_value(length):
    with pytest.raises(ValueError, match=rf"length is {length}"):
        permute([0], length, 0)


# ---- cut


def cut(indices, epoch, world, micro, lengths=None):
    """plans[rank][micro-batch]"""
    return [split_for_rank(indices, epoch, world, micro, rank, lengths) for rank in range(world)]


def test_every_rank_gets_equally_many_micro_batches_and_as_few_as_possible():
    for count, world, micro in GRID:
        micro_batches = cut(np.arange(count), 0, world, micro)
        fewest = math.ceil(count / (world * micro))
        assert [len(rank) for rank in micro_batches] == [fewest] * world, (count, world, micro)


def test_no_micro_batch_is_empty_or_above_the_micro_batch():
    for count, world, micro in GRID:
        for micro_batch in flatten(cut(np.arange(count), 0, world, micro)):
            assert 1 <= len(micro_batch.indices) <= micro, (count, world, micro)


def test_sizes_differ_by_at_most_one():
    for count, world, micro in GRID:
        sizes = [
            0 if micro_batch.filler else len(micro_batch.indices)
            for micro_batch in flatten(cut(np.arange(count), 0, world, micro))
        ]
        assert max(sizes) - min(sizes) <= 1, (count, world, micro)


def test_every_sample_is_cut_out_exactly_once():
    for count, world, micro in GRID:
        indices = np.arange(count)[::-1] * 3 + 11
        assert sorted(real(cut(indices, 0, world, micro))) == sorted(indices.tolist()), (count, world, micro)


def test_a_filler_repeats_one_sample_and_stands_only_where_none_is_left():
    for count, world, micro in GRID:
        indices = np.arange(100, 100 + count)
        micro_batches = flatten(cut(indices, 0, world, micro))
        fillers = [micro_batch for micro_batch in micro_batches if micro_batch.filler]
        assert len(fillers) == max(0, len(micro_batches) - count), (count, world, micro)
        assert all(len(filler.indices) == 1 and filler.indices[0] in indices for filler in fillers)


def test_chunks_carry_their_epoch_and_plain_integers():
    micro_batches = flatten(cut(np.arange(3), 17, 2, 1))
    assert {micro_batch.epoch for micro_batch in micro_batches} == {17}
    assert {type(index) for micro_batch in micro_batches for index in micro_batch.indices} == {int}


def random_lengths(count, world, micro):
    return np.random.default_rng([count, world, micro]).integers(1, 500, count)


def test_lengths_change_neither_the_samples_nor_the_shape_of_the_cut():
    for count, world, micro in GRID:
        indices = np.arange(count) + 7
        micro_batches = cut(indices, 0, world, micro, random_lengths(count, world, micro))
        assert sorted(real(micro_batches)) == indices.tolist(), (count, world, micro)
        assert [len(rank) for rank in micro_batches] == [math.ceil(count / (world * micro))] * world
        sizes = [0 if micro_batch.filler else len(micro_batch.indices) for micro_batch in flatten(micro_batches)]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= micro
        assert sizes.count(0) == max(0, len(sizes) - count)


def test_similar_lengths_share_a_micro_batch():
    for count, world, micro in GRID:
        lengths = random_lengths(count, world, micro)
        micro_batches = [
            micro_batch
            for micro_batch in flatten(cut(np.arange(count), 0, world, micro, lengths))
            if not micro_batch.filler
        ]
        spans = sorted(
            (min(found), max(found)) for found in (lengths[list(micro_batch.indices)] for micro_batch in micro_batches)
        )
        assert all(longest <= shortest for (_, longest), (shortest, _) in itertools.pairwise(spans)), (
            count,
            world,
            micro,
        )


def test_lengths_are_those_of_the_samples_and_not_of_their_places():
    indices = np.array([40, 10, 30, 20])
    lengths = np.array([1, 100, 2, 99])
    pairs = {frozenset(micro_batch.indices) for micro_batch in flatten(cut(indices, 0, 1, 2, lengths))}
    assert pairs == {frozenset({10, 20}), frozenset({30, 40})}


def test_ranks_get_the_same_work_where_lengths_allow_it():
    # 8 samples of 1..8 on two ranks: turns in reversing order give 8+5+4+1 and 7+6+3+2
    for world, turns in ((2, 2), (2, 4), (3, 2), (4, 6), (5, 4)):
        lengths = np.arange(1, world * turns + 1)
        work = [
            sum(int(lengths[list(micro_batch.indices)].sum()) for micro_batch in rank)
            for rank in cut(np.arange(len(lengths)), 0, world, 1, lengths)
        ]
        assert len(set(work)) == 1, (world, turns, work)


def test_work_of_ranks_differs_by_less_than_the_heaviest_and_the_lightest_micro_batch():
    # In reversing order the surplus of a turn is made good by the next: the alternating sum telescopes to this bound.
    for count, world, micro in GRID:
        lengths = random_lengths(count, world, micro)
        work = [
            [0 if micro_batch.filler else int(lengths[list(micro_batch.indices)].sum()) for micro_batch in rank]
            for rank in cut(np.arange(count), 0, world, micro, lengths)
        ]
        each = [amount for rank in work for amount in rank]
        totals = [sum(rank) for rank in work]
        assert max(totals) - min(totals) <= max(each) - min(each), (count, world, micro)


# ---- StepPlan


def combinations(number=200):
    chance = random.Random(20)
    for _ in range(number):
        yield (
            chance.randint(1, 400),
            chance.randint(1, 64),
            chance.randint(1, 8),
            chance.randint(1, 16),
            chance.randrange(2**32),
        )


def test_every_epoch_uses_every_sample_exactly_once():
    for length, global_batch, world, micro, seed in combinations():
        plan = StepPlan(length, global_batch, micro, world, seed)
        for epoch in (0, 3):
            steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
            seen = [index for step in steps for index in real(plan.by_rank(step))]
            assert sorted(seen) == list(range(length)), (length, global_batch, world, micro, epoch)


def test_the_samples_of_a_step_do_not_depend_on_world_or_micro_batch():
    for length, global_batch, world, micro, seed in combinations():
        alone = StepPlan(length, global_batch, global_batch, 1, seed)
        spread = StepPlan(length, global_batch, micro, world, seed)
        assert spread.steps_per_epoch == alone.steps_per_epoch
        for step in {0, 1, alone.steps_per_epoch - 1, 12_345}:
            ((whole,),) = alone.by_rank(step)
            assert sorted(real(spread.by_rank(step))) == sorted(whole.indices), (
                length,
                global_batch,
                world,
                micro,
                step,
            )


def test_every_chunk_of_a_step_is_of_that_steps_epoch():
    plan = StepPlan(25, 10, 2, 3)
    for step in range(12):
        assert {micro_batch.epoch for micro_batch in flatten(plan.by_rank(step))} == {step // 3}


def test_epochs_differ_in_order_and_in_the_samples_of_their_steps():
    plan = StepPlan(100, 10, 10)
    first = [frozenset(real(plan.by_rank(step))) for step in range(10)]
    second = [frozenset(real(plan.by_rank(step))) for step in range(10, 20)]
    assert not set(first) & set(second)


def test_the_seed_decides_the_samples_of_a_step():
    assert len({frozenset(StepPlan(100, 10, 10, seed=seed).indices(0)[0].tolist()) for seed in range(20)}) == 20


def test_the_last_batch_of_an_epoch_is_what_is_left():
    plan = StepPlan(25, 10, 10)
    assert plan.steps_per_epoch == 3
    assert [len(real(plan.by_rank(step))) for step in range(6)] == [10, 10, 5, 10, 10, 5]


def test_a_data_set_that_fills_its_batches_has_no_partial_one():
    plan = StepPlan(30, 10, 10)
    assert plan.steps_per_epoch == 3
    assert [len(real(plan.by_rank(step))) for step in range(4)] == [10, 10, 10, 10]


def test_drop_last_leaves_out_the_partial_batch_of_each_epoch():
    for length, global_batch, world, micro, seed in combinations(60):
        plan = StepPlan(length, global_batch, micro, world, seed, drop_last=True)
        if length < global_batch:
            continue
        assert plan.steps_per_epoch == length // global_batch
        seen = [real(plan.by_rank(step)) for step in range(plan.steps_per_epoch)]
        assert {len(batch) for batch in seen} == {global_batch}
        together = [index for batch in seen for index in batch]
        assert len(set(together)) == len(together)
        assert set(together) <= set(range(length))


def test_drop_last_drops_other_samples_in_other_epochs():
    plan = StepPlan(15, 10, 10, drop_last=True)
    assert len({frozenset(real(plan.by_rank(epoch))) for epoch in range(20)}) > 10
    assert set().union(*(real(plan.by_rank(epoch)) for epoch in range(50))) == set(range(15))


def test_drop_last_keeps_one_step_where_all_would_be_dropped():
    plan = StepPlan(7, 10, 4, 2, drop_last=True)
    assert plan.steps_per_epoch == 1
    assert [sorted(real(plan.by_rank(step))) for step in range(3)] == [list(range(7))] * 3


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_announced_number_of_samples_is_the_real_one(drop_last):
    for length, global_batch, world, micro, seed in combinations(100):
        plan = StepPlan(length, global_batch, micro, world, seed, drop_last)
        for step in {0, 1, plan.steps_per_epoch - 1, plan.steps_per_epoch, 7 * plan.steps_per_epoch - 1}:
            assert plan.samples(step) == len(real(plan.by_rank(step))) == len(plan.indices(step)[0]), (
                length,
                global_batch,
                world,
                micro,
                step,
            )


@pytest.mark.parametrize(
    ("length", "global_batch"), [(30_000, 3000), (50_000, 20_000), (8192, 8192), (8193, 4096), (20_000, 7)]
)
def test_steps_follow_the_permutation_across_any_internal_border(length, global_batch):
    plan = StepPlan(length, global_batch, global_batch, seed=4)
    for epoch in (0, 1):
        expected = order(length, 4, epoch)
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        found = [plan.indices(step) for step in steps]
        assert (np.concatenate([indices for indices, _ in found]) == expected).all()
        assert {number for _, number in found} == {epoch}


def test_steps_asked_for_in_any_order_are_the_same():
    plan = StepPlan(30_000, 900, 100, 2, seed=8)
    steps = list(range(0, 140, 3))
    in_order = {step: plan.by_rank(step) for step in steps}
    random.Random(1).shuffle(steps)
    assert {step: plan.by_rank(step) for step in steps} == in_order
    assert all(StepPlan(30_000, 900, 100, 2, seed=8).by_rank(step) == in_order[step] for step in steps[:5])


@pytest.mark.parametrize(
    ("length", "step"), [(10**12, 0), (10**12, 10**9), (10**12, 10**18), (10, 10**15), (2**62, 10**9)]
)
def test_any_step_of_any_data_set_costs_little_memory(length, step):
    plan = StepPlan(length, 64, 8, 4, seed=1)
    micro_batches, peak = peak_memory(lambda: plan.by_rank(step))
    samples = real(micro_batches)
    assert peak < 2_000_000
    assert len(samples) == plan.samples(step) == len(set(samples))
    assert all(0 <= index < length for index in samples)
    epoch, within = divmod(step, -(-length // 64))
    positions = np.arange(within * 64, min((within + 1) * 64, length))
    assert sorted(samples) == sorted(permute(positions, length, 1, epoch).tolist())
    assert {micro_batch.epoch for micro_batch in flatten(micro_batches)} == {epoch}


def test_lengths_group_the_samples_of_a_step_but_do_not_choose_them():
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    plain, grouped = StepPlan(200, 32, 4, 2, seed=3), StepPlan(200, 32, 4, 2, seed=3, lengths=lengths)

    def padding(micro_batches):
        return sum(
            int((lengths[list(c.indices)].max() - lengths[list(c.indices)]).sum()) for c in flatten(micro_batches)
        )

    for step in range(14):
        assert sorted(real(grouped.by_rank(step))) == sorted(real(plain.by_rank(step)))
    assert sum(padding(grouped.by_rank(step)) for step in range(14)) < 0.3 * sum(
        padding(plain.by_rank(step)) for step in range(14)
    )


# ---- StepPlan with group_by_length


def lengths_of(length, kinds, seed=0):
    """Random lengths of `kinds` values, so that many samples are of equal length."""
    return np.random.default_rng([length, kinds, seed]).integers(1, kinds + 1, length)


GROUPED = {
    "length": st.integers(1, 120),
    "global_batch": st.integers(1, 20),
    "window": st.integers(1, 9),
    "kinds": st.sampled_from([1, 3, 500]),
    "seed": st.integers(0, 2**63),
}


def grouped(length, global_batch, window, kinds, seed, *, micro=4, world=1, drop_last=False):
    lengths = lengths_of(length, kinds)
    return StepPlan(length, global_batch, micro, world, seed, drop_last, lengths, group_by_length=window)


@settings(FIXED, max_examples=15)
@given(drop_last=st.booleans(), micro=st.integers(1, 6), world=st.integers(1, 5), **GROUPED)
def test_grouping_takes_every_sample_once_per_epoch(drop_last, micro, world, **case):
    plan = grouped(**case, micro=micro, world=world, drop_last=drop_last)
    plain = StepPlan(plan.length, plan.global_batch, micro, world, plan.seed, drop_last)
    assert plan.steps_per_epoch == plain.steps_per_epoch
    for epoch in (0, 2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        seen = [real(plan.by_rank(step)) for step in steps]
        assert [len(batch) for batch in seen] == [plain.samples(step) for step in steps]
        samples = [index for batch in seen for index in batch]
        expected = [index for step in steps for index in real(plain.by_rank(step))]
        assert sorted(samples) == sorted(expected)  # with `drop_last`, the same samples are left out
        assert drop_last or sorted(samples) == list(range(plan.length))


@FIXED
@given(micro=st.integers(1, 6), world=st.integers(2, 5), step=st.integers(0, 10**6), **GROUPED)
def test_grouped_samples_of_a_step_do_not_depend_on_world_or_micro_batch(micro, world, step, **case):
    alone, spread = grouped(**case), grouped(**case, micro=micro, world=world)
    assert sorted(real(alone.by_rank(step))) == sorted(real(spread.by_rank(step)))


@FIXED
@given(**GROUPED)
def test_each_window_is_its_samples_by_length_cut_and_shuffled(**case):
    plan = grouped(**case)
    epoch, batch = 3, plan.global_batch
    whole = order(plan.length, plan.seed, epoch)
    steps = [plan.indices(epoch * plan.steps_per_epoch + place)[0].tolist() for place in range(plan.steps_per_epoch)]
    batches = plan.length // batch
    for first in range(0, batches, case["window"]):
        mine = steps[first : min(first + case["window"], batches)]
        by_length = sorted(whole[first * batch : (first + len(mine)) * batch].tolist(), key=lambda i: plan.lengths[i])
        assert sorted(mine) == sorted(by_length[start : start + batch] for start in range(0, len(by_length), batch))
    if len(steps) > batches:  # the partial batch stays the last, with its samples
        assert steps[-1] == whole[batches * batch :].tolist()


@settings(FIXED, max_examples=10)
@given(**GROUPED)
def test_grouped_steps_asked_for_in_any_order_are_the_same(**case):
    plan = grouped(**case)
    steps = list(range(3 * plan.steps_per_epoch))
    in_order = {step: plan.by_rank(step) for step in steps}
    random.Random(1).shuffle(steps)
    assert {step: plan.by_rank(step) for step in steps} == in_order
    assert all(grouped(**case).by_rank(step) == in_order[step] for step in steps[:3])


def test_batches_of_windows_are_shuffled_by_seed_epoch_and_window():
    """By their length, batches of a sorted window would rise."""
    length, batch, window = 6000, 10, 50
    lengths = np.random.default_rng(0).permutation(length)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        plan = StepPlan(length, batch, batch, seed=seed, lengths=lengths, group_by_length=window)
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        means = np.array([lengths[plan.indices(step)[0]].mean() for step in steps]).reshape(-1, window)
        orders += [tuple(np.argsort(row)) for row in means]
    assert len(set(orders)) == len(orders) == 36
    first = np.array(orders)[:, :25]
    assert 23 < first.mean() < 26  # neither short nor long batches come first


def test_grouping_leaves_hardly_any_padding():
    lengths = np.random.default_rng(0).integers(1, 300, 6400)
    plain = StepPlan(6400, 64, 8, 2, seed=3, lengths=lengths)
    by_window = StepPlan(6400, 64, 8, 2, seed=3, lengths=lengths, group_by_length=50)

    def padding(plan):
        found = [lengths[list(c.indices)] for step in range(100) for c in flatten(plan.by_rank(step))]
        return sum(int((values.max() - values).sum()) for values in found)

    assert padding(by_window) < 0.05 * padding(plain)


def test_a_step_of_huge_data_costs_the_work_of_its_window():
    class Lengths:
        """The lengths of 10^12 samples, which count how many were asked for."""

        asked = 0

        def __getitem__(self, indices):
            self.asked += len(indices)
            return indices % 100

    lengths = Lengths()
    plan = StepPlan(10**12, 64, 8, 4, 1, False, lengths, group_by_length=50)
    for step in (10**18, 10**18 + 1):
        _, peak = peak_memory(lambda step=step: plan.by_rank(step))
        assert peak < 2_000_000
    assert lengths.asked == 50 * 64 + 2 * 4 * 64  # the window once; each rank cuts the step by its lengths


def test_samples_of_unknown_length_cannot_be_grouped():
    with pytest.raises(ValueError, match="lengths are not known"):
        StepPlan(20, 4, 4, group_by_length=2).indices(0)


def test_decimals_of_lengths_are_cut():
    lengths = np.array([2.9, 2.1, 1.5, 1.6])
    found = [StepPlan(4, 1, 1, lengths=values, group_by_length=4) for values in (lengths, lengths.astype(int))]
    assert [found[0].indices(step) for step in range(4)] == [found[1].indices(step) for step in range(4)]


def test_a_window_without_a_whole_batch_is_left_alone():
    indices = np.array([5, 3, 4])
    assert group(indices, np.array([3, 1, 2]), 4, seed=0, window=0).tolist() == [5, 3, 4]


# ---- EvaluationPlan

EVALUATIONS = list(itertools.product(range(51), range(1, 8), range(1, 6)))  # length, micro-batch, world


def test_evaluation_takes_every_sample_once_and_in_order_over_ranks():
    for length, micro, world in EVALUATIONS:
        assert real(EvaluationPlan(length, micro).by_rank(world)) == list(range(length)), (length, micro, world)


def test_evaluation_gives_every_rank_equally_many_chunks_and_as_few_as_possible():
    for length, micro, world in EVALUATIONS:
        micro_batches = EvaluationPlan(length, micro).by_rank(world)
        fewest = math.ceil(math.ceil(length / micro) / world)
        assert [len(rank) for rank in micro_batches] == [fewest] * world, (length, micro, world)


def test_evaluation_forward_passes_are_those_of_one_process():
    for length, micro, world in EVALUATIONS:
        ours = [
            micro_batch.indices
            for micro_batch in flatten(EvaluationPlan(length, micro).by_rank(world))
            if not micro_batch.filler
        ]
        alone = [tuple(range(length))[start : start + micro] for start in range(0, length, micro)]
        assert ours == alone, (length, micro, world)


def test_evaluation_fillers_are_single_existing_samples():
    for length, micro, world in EVALUATIONS:
        micro_batches = flatten(EvaluationPlan(length, micro).by_rank(world))
        fillers = [micro_batch for micro_batch in micro_batches if micro_batch.filler]
        assert len(fillers) == len(micro_batches) - math.ceil(length / micro), (length, micro, world)
        assert all(len(micro_batch.indices) == 1 and 0 <= micro_batch.indices[0] < length for micro_batch in fillers)


@given(lengths=st.lists(st.integers(1, 50), max_size=60), micro=st.integers(1, 7), world=st.integers(1, 5))
def test_evaluation_by_length_takes_every_sample_once_in_the_forward_passes_of_one_process(lengths, micro, world):
    plan = EvaluationPlan(len(lengths), micro, np.array(lengths, dtype=np.int64))
    one, many = (
        [micro_batch.indices for micro_batch in flatten(plan.by_rank(count)) if not micro_batch.filler]
        for count in (1, world)
    )
    assert one == many
    assert sorted(index for indices in one for index in indices) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan.by_rank(world)}) == 1


@pytest.mark.parametrize("shift", [0, *(pytest.param(shift, marks=pytest.mark.exhaustive) for shift in (3, 6))])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_ranks_that_take_turns_complete_the_first_samples_first(monkeypatch, has_lengths, shift):
    monkeypatch.setattr("lockstep.core.data.order._WINDOW", 3)
    for length, micro, world in itertools.product(range(shift, 51, 9), range(1, 8), range(1, 6)):
        lengths = np.arange(length) * 7 % 5 if has_lengths else None
        plan = EvaluationPlan(length, micro, lengths)
        alone = [micro_batch.indices for micro_batch in plan.in_turns(0, 1)]
        ranks = [list(plan.in_turns(rank, world)) for rank in range(world)]
        assert len({len(rank) for rank in ranks}) == 1
        turns = [micro_batch for turn in zip(*ranks, strict=True) for micro_batch in turn]
        assert [micro_batch.indices for micro_batch in turns if not micro_batch.filler] == alone
        assert sum(micro_batch.filler for micro_batch in turns) < world
        assert sorted(index for indices in alone for index in indices) == list(range(length))
        window = 3 * micro if has_lengths else micro
        for number, indices in enumerate(alone):
            assert all(index // window == number * micro // window for index in indices)


def test_the_turns_of_a_billion_samples_take_no_memory():
    plan = EvaluationPlan(10**9, 64)
    first, peak = peak_memory(lambda: list(itertools.islice(plan.in_turns(3, 8), 2)))
    assert [micro_batch.indices[0] for micro_batch in first] == [3 * 64, 11 * 64]
    assert peak < 10**6


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), micro=st.integers(1, 7))
def test_evaluation_by_length_pads_least(lengths, micro):
    """Whoever cuts n samples into batches of at most m pads no less than who cuts the sorted ones."""
    micro_batches = flatten(EvaluationPlan(len(lengths), micro, np.array(lengths, dtype=np.int64)).by_rank(1))
    longest = sorted(
        (max(lengths[index] for index in micro_batch.indices) for micro_batch in micro_batches), reverse=True
    )
    assert longest == sorted(lengths, reverse=True)[::micro]


# ---- mix


@pytest.mark.parametrize(
    ("words", "value"),
    [
        # first outputs of the published SplitMix64 generator for the seeds 0 and 1234567, and the second for 1234567
        ((0,), 0xE220A8397B1DCDAF),
        ((1234567,), 6457827717110365317),
        ((1234567 + 0x9E3779B97F4A7C15,), 3203168211198807973),
    ],
)
def test_one_word_is_hashed_as_splitmix64_does(words, value):
    assert derive_seed(*words) == value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((0, 0), 0xA706DD2F4D197E6F),
        ((0, 1), 0x2A98F501AF37E97F),
        ((1, 0), 0x5E41AB087439611E),
        ((1, 2, 3), 0x6AE515C1C0AC7E37),
        ((-1, 7), 0x19F20A9BB46150B6),
        ((42, 3, 1000, 2), 0x7787BCE367EA82CC),
    ],
)
def test_hashes_never_change(words, value):
    # every seed and order of every recorded run hangs on these
    assert derive_seed(*words) == value


def test_hashes_of_many_words_are_those_of_each():
    words = [0, 1, 2, 1000, 2**31, 2**63]
    for state in (0, 1, 2**64 - 1, derive_seed(3, 7)):
        assert derive_seeds(words, state=state).tolist() == [derive_seed(word, state=state) for word in words]


def test_hashes_of_a_grid_do_not_collide():
    words = (
        [(a,) for a in range(500)]
        + list(itertools.product(range(150), repeat=2))
        + list(itertools.product(range(-5, 15), range(20), range(60)))
    )
    assert len({derive_seed(*group) for group in words}) == len(words)


def test_hashes_are_unsigned_64_bit_integers_for_any_integers():
    for words in ((-1,), (-(2**63), 5), (2**64 - 1, 2**63), (0, 0, 0, 0, 0)):
        assert 0 <= derive_seed(*words) < 2**64
    assert (
        len({derive_seed(-1), derive_seed(1), derive_seed(0), derive_seed(-1, 0), derive_seed(0, -1), derive_seed(-2)})
        == 6
    )


def test_every_bit_of_every_word_changes_half_of_the_hash():
    flips = [(derive_seed(3, 1 << bit, 5) ^ derive_seed(3, 0, 5)).bit_count() for bit in range(64)] + [
        (derive_seed(1 << bit) ^ derive_seed(0)).bit_count() for bit in range(64)
    ]
    assert 29 < np.mean(flips) < 35
    assert min(flips) > 10
