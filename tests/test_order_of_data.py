"""What draws the samples of an epoch: weights, labels and orders of one's own, before anything trains."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

import lockstep
from lockstep.configs import config_file
from lockstep.core.data.loader import MicroBatches
from lockstep.core.data.order import MicroBatchPlan, StepPlan
from lockstep.core.errors import DataError, UsageError
from lockstep.sampling.checked import CheckedOrder
from lockstep.sampling.of_data import labels_of, order_of
from lockstep_lab.verify.draws import set_of_part
from lockstep_lab.verify.reference.order import positions_of_step
from lockstep_lab.verify.reference.sampling import draws_of
from lockstep_recipes.recipes.digits import Digits
from tests import runs
from tests.sampling_cases import LABELS, LENGTH, WEIGHTS, EasyFirst, Rows, Sampled, by_weights


def config(**data):
    return config_file.parse(runs.config(data=data), needs_task=False)


def rows(length=LENGTH, **attributes):
    return Rows((torch.arange(length),), **attributes)


# ---- draws by weights


def statistic(counts, weights):
    """Pearson's chi-square, and its degrees of freedom."""
    expected = weights / weights.sum() * counts.sum()
    some = expected > 0
    return float(((counts - expected)[some] ** 2 / expected[some]).sum()), int(some.sum()) - 1


def test_draws_have_the_probabilities_of_the_weights_as_those_of_torch():
    draws = 200_000
    own = lockstep.WeightedSampler(WEIGHTS, draws)(np.arange(draws), seed=3, epoch=2)
    generator = torch.Generator().manual_seed(0)
    of_torch = torch.multinomial(torch.from_numpy(WEIGHTS), draws, replacement=True, generator=generator).numpy()
    for drawn in (own, of_torch):
        counts = np.bincount(drawn, minlength=LENGTH)
        found, freedom = statistic(counts, WEIGHTS)
        assert abs(found - freedom) < 5 * (2 * freedom) ** 0.5
        assert not counts[WEIGHTS == 0].any()
    even = np.where(WEIGHTS > 0, 1.0, 0.0)  # other weights would be seen
    found, freedom = statistic(np.bincount(own, minlength=LENGTH), even)
    assert found > freedom + 100 * (2 * freedom) ** 0.5


def test_draws_follow_each_other_by_chance():
    drawn = lockstep.WeightedSampler(np.ones(10), 100_000)(np.arange(100_000), seed=0, epoch=0)
    pairs = np.bincount(drawn[:-1] * 10 + drawn[1:], minlength=100)
    found, freedom = statistic(pairs, np.ones(100))
    assert abs(found - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_draw_depends_on_its_position_alone_and_is_that_of_plain_python():
    sampler, index_at = lockstep.WeightedSampler(WEIGHTS), by_weights(WEIGHTS)
    for epoch in (0, 5):
        whole = sampler(np.arange(LENGTH), seed=0, epoch=epoch)
        assert whole.tolist() == [index_at(epoch, position) for position in range(LENGTH)]
        assert sampler(np.array([17, 3]), seed=0, epoch=epoch).tolist() == [whole[17], whole[3]]
    first, second = (sampler(np.arange(LENGTH), seed=0, epoch=epoch).tolist() for epoch in (0, 1))
    assert first != second != sampler(np.arange(LENGTH), seed=1, epoch=1).tolist()


@pytest.mark.parametrize("weights", [[0, 1, 0], [0.0, 5e-324, 0.0], torch.tensor([0.0, 1e30, 0.0])])
def test_a_sample_of_weight_zero_is_never_drawn(weights):
    assert set(lockstep.WeightedSampler(weights)(np.arange(1000), seed=0, epoch=0)) == {1}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 2, -3, 4], "the weight of sample 2 is -3"),
        ([1.0, float("nan"), -1.0], r"the weight of sample 1 is nan \(2 of 3 weights are invalid\)"),
        ([float("inf"), 1.0], "the weight of sample 0 is inf"),
        ([0.0, 0.0], "the sum of the 2 weights is 0"),
        ([1e308, 1e308], "the sum of the 2 weights is inf"),
        ([[1.0, 2.0]], r"they have the shape \(1, 2\)"),
        (["a", "b"], "the type <U1"),
        ([], "the sum of the 0 weights is 0"),
    ],
)
def test_wrong_weights_are_refused(weights, said):
    with pytest.raises(DataError, match=said):
        lockstep.WeightedSampler(weights)


def test_weights_are_seen_behind_subsets_and_in_joined_data():
    one, other = TensorDataset(torch.arange(6)), TensorDataset(torch.arange(3))
    one.sample_weights, other.sample_weights = torch.tensor([0, 1, 2, 3, 4, 5]), [7, 8, 9]
    joined = ConcatDataset([Subset(one, [5, 0, 2]), other])
    order = order_of(config(), joined)
    assert order.order.weights.tolist() == [5, 0, 2, 7, 8, 9]
    reference = draws_of(joined, config().model_dump(by_alias=True))
    drawn = order(np.arange(6), seed=0, epoch=1).tolist()
    assert drawn == [reference.index_at(position, 1) for position in range(6)]
    part = SimpleNamespace()
    set_of_part(part, joined, [0, 3, 5])  # as verify trains on a part
    assert part.sample_weights.tolist() == [5, 7, 9]
    one.labels = ["a", "b", "c", "d", "e", "f"]
    set_of_part(part, Subset(one, [5, 0, 2]), [0, 2])
    assert part.labels.tolist() == ["f", "c"]
    del other.sample_weights
    with pytest.raises(UsageError, match="not all data sets have `sample_weights`"):
        order_of(config(), joined)
    other.order = lockstep.WeightedSampler([1, 2, 3])
    with pytest.raises(UsageError, match="the TensorDataset inside a Subset has an `order`"):
        order_of(config(), Subset(other, [0]))


@pytest.mark.parametrize("labels", [[0, "0", 1], [[0], [0, 1], [1]]])
def test_labels_that_are_no_labels_are_refused(labels):
    data = TensorDataset(torch.arange(3))
    data.labels = labels
    with pytest.raises(UsageError, match=r"data.balance: `labels` of TensorDataset"):
        labels_of(data)


def test_an_order_that_takes_other_arguments_is_refused():
    data = TensorDataset(torch.arange(6))
    data.order = type("Order", (), {"length": 6, "__call__": lambda self, positions: positions})()
    with pytest.raises(UsageError, match=r"it cannot be called: [\s\S]*order\(positions, seed=..., epoch=...\)"):
        order_of(config(), data)


def test_weights_in_16_bits_are_taken():
    weights = torch.tensor([1.0, 0.0, 3.0])
    assert lockstep.WeightedSampler(weights.bfloat16()).digest == lockstep.WeightedSampler(weights).digest


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_a_wrong_number_of_draws_is_refused(count):
    with pytest.raises(DataError, match="num_samples is"):
        lockstep.WeightedSampler([1.0, 2.0], count)


# ---- the order of a data set


def test_without_order_and_weights_an_epoch_has_each_sample_once():
    assert order_of(config(), rows()) is None


@pytest.mark.parametrize("kind", [list, np.asarray, torch.as_tensor, functools.partial(np.asarray, dtype=str)])
def test_labels_are_balanced_whatever_they_are(kind):
    data = rows(targets=kind(LABELS.tolist()))
    order = order_of(config(balance="label", samples_per_epoch=50_000), data)
    assert order.length == 50_000
    drawn = LABELS[order(np.arange(order.length), seed=0, epoch=0)]
    assert abs(drawn.mean() - 0.5) < 5 * 0.5 / 50_000**0.5  # one sample in ten has the label 1
    assert order.words(0, 0) == "weighted sampling by label: 50,000 draws of 90 samples, 90 distinct"


def test_labels_of_a_part_are_those_of_its_samples():
    part = Subset(rows(labels=LABELS), [0, 1, 10, 11])
    assert labels_of(part).tolist() == [1, 0, 1, 0]


def test_digits_can_be_balanced():
    assert labels_of(Digits(training=True)).tolist() == [label for _, label in Digits(training=True)]


@pytest.mark.parametrize(
    ("attributes", "keys", "said"),
    [
        ({}, {"balance": "label"}, "data.balance: the labels of the samples are unknown: Rows has no"),
        ({"labels": LABELS[:5]}, {"balance": "label"}, r"`labels` of Rows has the shape \(5,\)"),
        ({"labels": np.zeros((LENGTH, 2))}, {"balance": "label"}, r"`labels` of Rows has the shape \(90, 2\)"),
        ({"sample_labels": None, "labels": LABELS}, {"balance": "label"}, "has no attribute with one label per sample"),
        (
            {"labels": [None if number in (3, 8) else "a" for number in range(LENGTH)]},
            {"balance": "label"},
            "`labels` of Rows has no label for 2 of 90 samples: sample 3 has None",
        ),
        (
            {"targets": np.array([np.nan, *"ab" * 44, "c"], dtype=object)},
            {"balance": "label"},
            "`targets` of Rows has no label for 1 of 90 samples: sample 0 has nan",
        ),
        (
            {"labels": [1 + 2j, "a", 3] * (LENGTH // 3)},
            {"balance": "label"},
            "texts and other values",
        ),
        (
            {"labels": [(1, "a"), 3, 4.5] * (LENGTH // 3)},
            {"balance": "label"},
            "is not an array",
        ),
        (
            {"labels": np.array(["a", 1, 2] * (LENGTH // 3), dtype=object)},
            {"balance": "label"},
            "labels that cannot be sorted, of the types int, str",
        ),
        ({"labels": LABELS / 3}, {"balance": "label"}, "the type float64"),
        ({"labels": LABELS, "sample_weights": WEIGHTS}, {"balance": "label"}, "`sample_weights` and data.balance"),
        ({"order": EasyFirst(), "sample_weights": WEIGHTS}, {}, "`order` and `sample_weights` are both given"),
        ({}, {"samples_per_epoch": 7}, "data.samples_per_epoch: samples are not drawn by weights"),
        ({"order": EasyFirst()}, {"samples_per_epoch": 7}, "has its own length"),
        ({"sample_weights": WEIGHTS[:-1]}, {}, "there are 89 weights, but 90 samples"),
        ({"order": lockstep.WeightedSampler(np.ones(91))}, {}, "there are 91 weights, but 90 samples"),
        ({"order": np.arange(LENGTH)}, {}, "it is of the type ndarray, which cannot be called"),
        ({"order": lambda positions, seed, epoch: positions}, {}, "its `length` is None"),
        (
            {"order": WeightedRandomSampler(WEIGHTS.tolist(), 10)},
            {},
            "a torch sampler",
        ),
    ],
)
def test_what_says_no_order_is_refused(attributes, keys, said):
    with pytest.raises((UsageError, DataError), match=said):
        order_of(config(**keys), rows(**attributes))


def test_the_refusal_of_a_sampler_says_what_to_write():
    with pytest.raises(UsageError) as caught:
        order_of(config(), rows(order=WeightedRandomSampler([1.0] * LENGTH, 10)))
    assert "write lockstep.WeightedSampler(weights, num_samples)" in caught.value.remedy


def drawing(function, length=60):
    """An order by a function of the positions and the epoch."""

    class Given:
        def __call__(self, positions, *, seed, epoch):
            return function(positions, epoch)

    Given.length = length
    return Given()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda positions, epoch: positions + 40, "at position 50 of epoch 0 it returns sample 90"),
        (lambda positions, epoch: positions - epoch, "at position 0 of epoch 1 it returns sample -1"),
        (lambda positions, epoch: positions / 2, "the type float64"),
        (lambda positions, epoch: positions[:1], r"for 60 positions it returns the shape \(1,\)"),
        (lambda positions, epoch: np.random.randint(90, size=len(positions)), "when it is called again"),
        (lambda positions, epoch: np.sort(positions), "in reversed order"),
        (lambda positions, epoch: positions % len(positions), "when fewer positions are requested at once"),
    ],
)
def test_an_order_that_is_no_function_of_the_position_is_refused(function, said):
    with pytest.raises(DataError, match=said) as caught:
        order_of(config(), rows(order=drawing(function)))
    assert caught.value.remedy


def test_an_order_may_change_the_positions_that_it_gets():
    def change(positions, epoch):
        positions %= 7
        return positions

    positions = np.arange(20)
    assert order_of(config(), rows(order=drawing(change)))(positions, seed=0, epoch=0).tolist() == [*range(7)] * 2 + [
        *range(6)
    ]
    assert positions.tolist() == [*range(20)]


def test_the_digest_differs_with_one_weight_and_with_the_order():
    weights = np.ones(100_000)
    changed = weights.copy()
    changed[70_123] = 1.001
    given = [
        rows(100_000, sample_weights=weights),
        rows(100_000, sample_weights=changed),
        rows(100_000, order=drawing(lambda positions, epoch: positions)),
        rows(100_000, order=drawing(lambda positions, epoch: positions + epoch)),
        rows(100_000, order=drawing(lambda positions, epoch: positions, 61)),
    ]
    digests = [order_of(config(), data).digest for data in given]
    assert len(set(digests)) == 5
    assert order_of(config(), rows(100_000, sample_weights=torch.ones(100_000))).digest == digests[0]


# ---- the plan


@pytest.mark.parametrize("lengths", [None, np.arange(LENGTH) * 5 % 7])
@pytest.mark.parametrize("window", [None, 2])
def test_steps_have_the_drawn_samples_on_every_number_of_ranks(lengths, window):
    if window and lengths is None:
        return
    order = CheckedOrder(lockstep.WeightedSampler(WEIGHTS, 100), LENGTH, "weights")
    draws = draws_of(rows(sample_weights=WEIGHTS), config(samples_per_epoch=100).model_dump(by_alias=True))
    rule = {"length": 100, "global_batch": 24, "seed": 0, "drop_last": False, "group_by_length": window}
    for step in range(10):
        positions, epoch = positions_of_step(step, **rule, lengths=lengths, index=draws.index_at)
        expected = sorted((position, draws.index_at(position, epoch)) for position in positions)
        for world in (1, 2, 3, 5):
            plan = StepPlan(100, 24, 4, world, lengths=lengths, group_by_length=window, order=order)
            micros = [micro for rank in plan.by_rank(step) for micro in rank if not micro.filler]
            assert {micro.epoch for micro in micros} == {epoch}
            found = [pair for micro in micros for pair in zip(micro.positions, micro.indices, strict=True)]
            assert sorted(found) == expected
            assert sorted(plan.indices(step)[0].tolist()) == sorted(index for _, index in expected)


def test_micro_batches_by_length_have_samples_of_similar_length():
    lengths = np.arange(LENGTH) * 5 % 7
    plan = StepPlan(LENGTH, 24, 4, 2, lengths=lengths, order=lockstep.WeightedSampler(WEIGHTS))
    micros = [micro for rank in plan.by_rank(0) for micro in rank]
    ranges = [lengths[list(micro.indices)] for micro in micros]
    ranges.sort(key=lambda values: (values.min(), values.max()))
    assert all(first.max() <= second.min() for first, second in itertools.pairwise(ranges))


# ---- reading


def test_a_sample_that_is_drawn_twice_is_augmented_twice():
    task = Sampled()
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True)

    def read(*positions):
        return micro_batches[MicroBatchPlan((3,) * len(positions), 1, False, positions)].batch[0]

    first, second = read(5, 60)
    assert (first - second).abs().min() > 1e-6
    assert torch.equal(read(60)[0], second)
    plain = micro_batches[MicroBatchPlan((5,), 1, False)].batch[0][0]  # sample 5 itself, under the seed of index 5
    noise = plain - task.train_data()[5][0]
    assert torch.allclose(first - task.train_data()[3][0], noise)


def test_a_collate_that_draws_draws_by_position():
    task = Sampled()
    task.collate = lambda samples: (torch.rand(1), torch.zeros(len(samples)))
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True)
    drawn = [float(micro_batches[MicroBatchPlan((3,), 0, False, (place,))].batch[0]) for place in (8, 9, 8)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_samples_that_cannot_be_read_are_left_out_with_their_positions():
    class Broken(Rows):
        def __getitem__(self, index):
            if index == 3:
                raise DataError("broken")
            return super().__getitem__(index)

    task = Sampled()
    data = Broken(task.train_data().tensors)
    micro_batches = MicroBatches(data, task, 0, training=True, on_error="skip")
    plan = MicroBatchPlan((3, 7, 3, 7), 0, False, (10, 11, 12, 13))
    found, whole = micro_batches[plan], MicroBatches(task.train_data(), task, 0, training=True)[plan]
    assert (found.indices, found.words, [index for index, _ in found.bad]) == ((7, 7), (11, 13), [3, 3])
    assert torch.equal(found.batch[0], whole.batch[0][[1, 3]])


def test_a_loader_is_refused_with_a_word_on_its_sampler():
    task = SimpleNamespace(train_data=lambda: torch.utils.data.DataLoader(rows()))
    from lockstep.core import task_checks

    with pytest.raises(UsageError) as caught:
        task_checks.data(task.train_data(), "Task.train_data")
    assert "lockstep --explain sampling" in caught.value.remedy
