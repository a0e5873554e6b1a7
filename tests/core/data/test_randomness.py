"""Samples that draw random numbers always, never or rarely are those of a loader that seeds every sample."""

import copy
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import lockstep
from lockstep import Trainer
from lockstep.core.data import private_generators, randomness
from lockstep.core.data.loader import MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.data.randomness import GENERATORS, SampleSeeding, seed_all
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly

LENGTH = 60


class Numbers(torch.utils.data.Dataset):
    """Sample n is [n, what `draw(n)` drew]."""

    def __init__(self, draw):
        self.draw, self.read = draw, []

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([float(index), float(self.draw(index))], dtype=torch.float64)


class Many(Numbers):
    """Read a batch at a time, as data sets of Hugging Face are."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def torch_then_numpy(index):
    """NumPy is drawn from only where a number of torch's is small: found by the second look."""
    return torch.rand(()) if torch.rand(()) < 0.8 else np.random.rand()


def forked(index):
    """Leaves the generator as it was."""
    with torch.random.fork_rng():
        return torch.rand(())


def derived(index):
    return np.random.default_rng(torch.initial_seed() % 2**32).random()


def one_of_a_pair(index):
    """Both libraries draw normal numbers in pairs and keep the second: a draw of it moves nothing but the store."""
    return np.random.standard_normal() + random.gauss(0, 1)


DRAWS = {
    "never": lambda index: 0,
    "torch": lambda index: torch.rand(()),
    "numpy": lambda index: np.random.rand(),
    "python": lambda index: random.random(),
    "all": lambda index: torch.rand(()) + np.random.rand() + random.random(),
    "rarely": lambda index: random.random() if index % 17 == 3 else 0,
    "late": lambda index: np.random.rand() if index > 50 else 0,
    "conditional": torch_then_numpy,
    "pairs": one_of_a_pair,
    "a shuffle": lambda index: torch.randperm(9)[0] + random.choice(range(9)),
    "forked": forked,
    "derived": derived,
    "rarely forked": lambda index: forked(index) if index % 17 == 3 else 0,
    "rarely derived": lambda index: derived(index) if index % 17 == 3 else 0,
    "seeds itself": lambda index: (torch.manual_seed(index), torch.rand(()))[1],
}


class FromNumbers(own_tasks.Plain):
    def __init__(self, data):
        super().__init__(LENGTH)
        self.numbers = data

    def train_data(self):
        return self.numbers


def plans_of(size):
    order = [(7 * place) % LENGTH for place in range(LENGTH)]
    return [
        MicroBatchPlan(tuple(order[start : start + size]), epoch, False)
        for epoch in (0, 1)
        for start in range(0, LENGTH, size)
    ]


WITHOUT_TRACE = ("forked", "derived", "rarely forked", "rarely derived")  # not seen where a data set reads many at once
NOT_BOTH = (*WITHOUT_TRACE, "seeds itself", "pairs", "rarely", "late")


@pytest.mark.parametrize(
    ("kind", "draw"),
    mainly(
        [(kind, draw) for draw in DRAWS for kind in (Numbers, Many) if kind is Numbers or draw not in NOT_BOTH],
        [(kind, draw) for draw in DRAWS for kind in (Numbers, Many) if kind is Numbers or draw not in WITHOUT_TRACE],
    ),
)
def test_samples_are_those_that_are_seeded_one_by_one(kind, draw):
    for size in (1, 7, 60):
        task = FromNumbers(kind(DRAWS[draw]))
        micro_batches = MicroBatches(task.numbers, task, 3, training=True)
        seed_all(size)
        np.random.standard_normal(), random.gauss(0, 1)  # half of a pair is kept
        for micro_batch in plans_of(size):
            expected = torch.stack([micro_batches.sample(index, micro_batch.epoch) for index in micro_batch.indices])
            seed_all(99)
            assert torch.equal(micro_batches[micro_batch].batch, expected), (draw, size, micro_batch)


@pytest.mark.parametrize(("draw", "again"), [("never", 0), ("torch", 0), ("numpy", 20), ("all", 20), ("late", 20)])
@pytest.mark.parametrize("kind", [Numbers, Many])
def test_a_micro_batch_is_read_again_at_most_once_for_each_generator(kind, draw, again):
    task = FromNumbers(kind(DRAWS[draw]))
    micro_batches = MicroBatches(task.numbers, task, 3, training=True)
    for micro_batch in plans_of(20):
        micro_batches[micro_batch]
    assert (
        len(micro_batches.seeding.drawn)
        == {"never": kind is Numbers, "torch": 1, "numpy": 2, "late": 2, "all": 3}[draw]
    )
    if kind is Many and draw == "torch":
        again = 20  # where many samples are read at once, torch is looked at too
    assert len(task.numbers.read) == 2 * LENGTH + again


def test_a_generator_that_nobody_draws_from_is_not_seeded_for_each_sample(monkeypatch):
    seeded = []
    counted = tuple(one._replace(seed=lambda seed, one=one: seeded.append(one) or one.seed(seed)) for one in GENERATORS)
    monkeypatch.setattr(randomness, "GENERATORS", counted)
    seeding = SampleSeeding()
    seeding.begin(5)
    assert not seeding.found_more()
    seeded.clear()
    for number in range(100):
        seeding.seed(number)
    assert seeded == [GENERATORS[0]] * 100  # torch's


@pytest.mark.parametrize("lazily", [False, True])
def test_kept_generators_are_seeded_for_each_sample_because_a_copy_may_draw(lazily):
    kept = private_generators.find(data=SimpleNamespace(rng=np.random.default_rng(0)))
    seeding = SampleSeeding(lazily, kept)
    seeding.begin(5)
    draws = []
    for number in range(3):
        seeding.seed(number)
        draws.append(copy.deepcopy(kept[0].generator).random())
    assert len(set(draws)) == 3


# ---- random numbers of the loss and of `collate`


def test_random_numbers_of_a_loss_do_not_depend_on_workers_or_restarts(tmp_path):
    settings = runs.config(
        train={"steps": 12}, batch={"global": 24, "micro": 12}, checkpoint={"every_steps": 5, "keep_last": 9}
    )
    whole, _ = runs.fit(own_tasks.Drawing(length=60), settings)
    workers, _ = runs.fit(own_tasks.Drawing(length=60), settings | {"data": {"workers": 2}})
    assert runs.difference(whole, workers) == 0
    Trainer(settings | {"train": {"steps": 5}}, run_dir=tmp_path, quiet=True).fit(own_tasks.Drawing(length=60))
    np.random.seed(1), random.seed(1), torch.manual_seed(1)
    resumed, _ = runs.fit(own_tasks.Drawing(length=60), settings, tmp_path)
    assert runs.difference(whole, resumed) == 0


def test_random_numbers_of_a_loss_are_others_in_every_step_and_on_every_rank():
    task = own_tasks.Drawing(length=24)
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True)
    drawn = [micro_batches[MicroBatchPlan((3, 4), epoch, False)].batch[0] for epoch in range(3)]
    drawn += [micro_batches[MicroBatchPlan((4, 3), 0, False)].batch[0].flip(0)]
    assert all(not torch.equal(drawn[0], other) for other in drawn[1:])
    assert torch.equal(micro_batches[MicroBatchPlan((3, 4), 0, False)].batch[0], drawn[0])
    settings = runs.config(train={"steps": 6})
    first, second = (runs.fit_kind("Drawing", {}, settings)[0] for _ in range(2))
    assert runs.difference(first, second) == 0
    for weights, _ in run_ranks(2, runs.fit_kind, "Drawing", {}, settings):
        assert runs.difference(weights, first) > 1e-6


# ---- which methods a task overrides


def test_methods_on_the_object_and_decorated_ones_are_not_taken_for_the_default():
    """A TensorDataset is read at once only if the task neither prepares nor collates. Decorators copy attributes."""

    def half(self, sample, epoch, training):
        return [sample[0] / 2, *sample[1:]]

    class Decorated(own_tasks.Plain):
        prepare = functools.wraps(lockstep.Task.prepare)(half)

    on_object, wrapped = own_tasks.Plain(), own_tasks.Plain()
    on_object.prepare = lambda sample, epoch, training: half(None, sample, epoch, training)
    wrapped.prepare = functools.wraps(wrapped.prepare)(on_object.prepare)
    collating = own_tasks.Plain()
    collating.collate = functools.wraps(collating.collate)(
        lambda samples: default_collate([half(None, one, 0, True) for one in samples])
    )
    expected = own_tasks.Plain().train_data()[3][0] / 2
    for task in (Decorated(), on_object, wrapped, collating):
        batch = MicroBatches(task.train_data(), task, 0, training=True)[MicroBatchPlan((3,), 0, False)].batch
        assert torch.equal(batch[0][0], expected)
