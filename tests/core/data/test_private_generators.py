"""Generators that the user's code holds give the same samples on any worker, rank and restart, and are found."""

import collections
import copy
import functools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep import Stream, Trainer
from lockstep.core.data import private_generators
from lockstep.core.data.loader import MicroBatches
from lockstep.core.data.order import MicroBatchPlan, derive_seed
from lockstep.core.errors import UsageError
from tests import own_tasks, runs
from tests.ranks import run_ranks

GLOBAL = np.random.default_rng()


class Transform:
    """As albumentations: each transform has two generators, which `set_random_seed` replaces."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.generator, self.python = np.random.default_rng(seed), random.Random(seed)

    def __call__(self, value):
        return value + self.scale * self.generator.random() if self.python.random() < 0.8 else value


class Compose(Transform):
    def __init__(self, transforms):
        self.transforms = transforms
        super().__init__()

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return super().__call__(value)


class Randomizable:
    """As MONAI: all objects share the generator of the class, until one is seeded."""

    R = np.random.RandomState()

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed) if state is None else state
        return self

    def __call__(self, value):
        return value + self.R.rand()


class Sealed:
    """Its generator cannot be reached, as in a library that is written in C."""

    __slots__ = ("__state", "count")

    def __init__(self):
        numbers = random.Random()
        self.count, self.__state = 0, iter(numbers.random, None)

    def set_random_seed(self, seed):
        self.__state, self.count = iter(random.Random(seed).random, None), self.count + 1

    def __call__(self, value):
        return value + next(self.__state)


def draws_a_global(value):
    return value + GLOBAL.random()


def closure():
    generator = torch.Generator()
    generator.seed()
    return lambda value: value + float(torch.rand(1, generator=generator))


def bound_method():
    method = np.random.default_rng().random
    return lambda value: value + method()


def copied():
    generator = np.random.default_rng()
    return lambda value: value + copy.deepcopy(generator).random()  # as MONAI's CacheDataset


TRANSFORMS = {
    "copied": copied,
    "albumentations": lambda: Compose([Transform(), Transform(2.0)]),
    "monai": Randomizable,
    "monai, seeded": lambda: Randomizable().set_random_state(3),
    "sealed": Sealed,
    "global": lambda: draws_a_global,
    "closure": closure,
    "bound method": bound_method,
    "partial": lambda: functools.partial(lambda generator, value: value + generator.random(), random.Random()),
    "philox": lambda: functools.partial(
        lambda generator, value: value + generator.random(), np.random.Generator(np.random.Philox())
    ),
    "old philox": lambda: functools.partial(
        lambda generator, value: value + generator.rand(), np.random.RandomState(np.random.Philox())
    ),
}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, kind, length=40):
        self.transform, self.length = TRANSFORMS[kind](), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index), self.transform(0.0)], dtype=torch.float64), torch.tensor(1.0).double()


class Task(own_tasks.Plain):
    """Draws in its data set, in `collate` and in the loss, each time from its own generators."""

    def __init__(self, kind, draws=True):
        super().__init__()
        self.kind, self.of_batch, self.of_loss = kind, random.Random(), torch.Generator()
        self.draws = draws

    def model(self):
        return torch.nn.Linear(2, 1).double()

    def train_data(self):
        return Numbers(self.kind)

    def eval_data(self):
        return Numbers(self.kind, 16)

    def collate(self, samples):
        inputs, targets = super().collate(samples)
        return [inputs + self.of_batch.random() if self.draws else inputs, targets]

    def weight(self, batch):
        return len(batch[0])

    def loss(self, model, batch):
        noise = torch.rand(1, generator=self.of_loss).double() if self.draws else 0.0
        return (model(batch[0] / 40 + noise)[:, 0] - batch[1]).square().sum()

    def predict(self, model, batch):
        return model(batch[0] / 40)[:, 0]


def read(data, task, order, size):
    micro_batches = MicroBatches(data, task, 3, training=True)
    plans = [MicroBatchPlan(tuple(order[at : at + size]), 1, False) for at in range(0, len(order), size)]
    found = {}
    for plan in plans:
        batch = micro_batches[plan].batch[0]
        found |= {index: row.tolist() for index, row in zip(plan.indices, batch, strict=True)}
    return found


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_sample_depends_on_its_index_and_nothing_else(kind):
    first = read(Numbers(kind), Task(kind, draws=False), range(40), 40)
    again = read(Numbers(kind), Task(kind, draws=False), range(39, -1, -1), 7)
    assert first == again
    assert len({tuple(row[1:]) for row in first.values()}) > 20  # they do draw


def test_two_generators_do_not_draw_the_same():
    data = SimpleNamespace(one=np.random.default_rng(0), other=np.random.default_rng(0), third=random.Random(0))
    for generator in private_generators.find(data=data):
        generator.seed(derive_seed(5))
    assert len({data.one.random(), data.other.random(), data.third.random()}) == 3


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_seeded_numbers_of_numpy_are_uniform_and_unlike_those_of_the_next_seed(bits):
    generator = np.random.Generator(getattr(np.random, bits)())
    (found,) = private_generators.find(data=[generator])
    drawn = []
    for seed in range(400):
        found.seed(derive_seed(seed))
        drawn.append(generator.random(8))
    drawn = np.array(drawn)
    assert abs(drawn.mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(drawn.T) - np.eye(8)).max() < 0.25
    assert np.abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.25


def trained(kind, workers=0, folder=None, steps=6, micro=None):
    settings = runs.config(
        train={"steps": steps},
        batch={"global": 12} | ({"micro": micro} if micro else {}),
        data={"workers": workers},
        checkpoint={"every_steps": 3, "keep_last": 9},
    )
    return runs.fit(Task(kind), settings, folder)[0] if folder else runs.fit(Task(kind), settings)[0]


def without_batch_draws(kind):
    settings = runs.config(train={"steps": 4}, batch={"global": 12})
    return runs.fit(Task(kind, draws=False), settings)[0]


def test_two_trainings_workers_and_a_restart_give_the_same_bits(tmp_path):
    whole = trained("albumentations")
    assert runs.difference(whole, trained("albumentations", workers=2)) == 0
    trained("albumentations", folder=tmp_path, steps=3)
    assert runs.difference(whole, trained("albumentations", folder=tmp_path)) == 0


@pytest.mark.parametrize("kind", ["albumentations", "monai"])
def test_ranks_train_on_the_same_samples(kind):
    alone = without_batch_draws(kind)
    for weights in run_ranks(2, without_batch_draws, kind):
        assert runs.difference(weights, alone) < 1e-12


def test_nothing_is_reported_about_generators_that_are_seeded(tmp_path):
    settings = runs.config(train={"steps": 3, "eval_every_steps": 3}, batch={"global": 12})
    Trainer(settings, run_dir=tmp_path).fit(Task("global"))
    log = (tmp_path / "train.log").read_text()
    assert "warning" not in log.lower(), log
    assert (
        "random generators that are seeded for each sample: data.transform:GLOBAL, Task.of_batch, Task.of_loss" in log
    )


# ---- what is found


def places(**owners):
    return [generator.place for generator in private_generators.find(**owners)]


def test_each_generator_is_found_once_wherever_it_is():
    shared = random.Random()
    owner = SimpleNamespace(
        shared=shared,
        listed=[shared, {"deep": (random.Random(),)}],
        queue=collections.deque([random.Random()]),
        subset=torch.utils.data.Subset(SimpleNamespace(rng=np.random.default_rng()), [0]),
        module=torch.nn.Sequential(torch.nn.Linear(2, 2)),
    )
    owner.module[0].noise = torch.Generator()
    expected = ["data.shared", "data.listed[1]['deep'][0]", "data.queue[0]", "data.subset.dataset.rng"]
    assert sorted(places(data=owner)) == sorted([*expected, "data.module._modules['0'].noise"])
    assert places(data=owner, Task=owner) == places(data=owner)


def test_circles_end_and_many_objects_are_examined_in_part():
    owner = SimpleNamespace(rng=random.Random())
    owner.itself = owner
    assert places(data=owner) == ["data.rng"]
    assert places(data=[{"a": number} for number in range(300_000)]) == []


class Shuffled(torch.utils.data.IterableDataset):
    """Its generator shuffles a pass, as in a stream of the library datasets."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        yield from self.rng.permutation(8)


def test_generators_of_streams_are_left_out():
    source = Shuffled()
    assert places(data=Stream(source), Task=SimpleNamespace(source=source)) == []
    assert places(data=Stream(Shuffled()), Task=SimpleNamespace(source=Shuffled())) == []
    assert places(data=SimpleNamespace(inner=Shuffled())) == ["data.inner.rng"]  # read by index


class Noise:
    def __init__(self):
        self.rng = random.Random(0)

    def __call__(self, number):
        return number + self.rng.random()


class Texts:
    """A task whose stream may use a generator that the task keeps."""

    def __init__(self):
        self.rng, self.flip, self.count = random.Random(0), SimpleNamespace(draws=[torch.Generator()]), 3
        self.of_all = [random.random, np.random.rand, torch.default_generator, random.SystemRandom()]

    def plain(self):
        yield from range(self.count)

    def shuffled(self):
        yield from self.drawn()

    def drawn(self):
        return [self.rng.random() for _ in range(self.count)]

    def flipped(self):
        return [torch.rand(1, generator=self.flip.draws[0])]

    def seeded(self):
        return [draw() for draw in self.of_all[:2]]


def test_a_generator_that_a_function_of_a_stream_shares_with_its_object_is_found():
    texts = Texts()
    assert private_generators.kept_for(texts.plain) is None
    assert private_generators.kept_for(texts.seeded) is None  # Lockstep seeds the global generators
    assert private_generators.kept_for(list) is None
    assert private_generators.kept_for(functools.partial(texts.shuffled)) == "Texts.rng"
    assert private_generators.kept_for(texts.shuffled) == "Texts.rng"
    assert private_generators.kept_for(texts.flipped) == "Texts.flip.draws[0]"
    assert private_generators.kept_for(lambda: texts.drawn()) == "Texts.rng"
    assert private_generators.kept_for(lambda: range(texts.count)) is None
    with pytest.raises(UsageError, match=r"Stream\(samples\): it uses the generator Texts.rng"):
        Stream(texts.shuffled)
    noise = Noise()

    class Noisy(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from map(noise, range(3))

    with pytest.raises(UsageError, match=r"Stream\(samples\): it uses the generator Noise.rng"):
        Stream(Noisy())


def test_global_generators_samplers_orders_and_those_of_the_system_are_left_out():
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator())
    owner = SimpleNamespace(
        sampler=sampler,
        loader=torch.utils.data.DataLoader(data, sampler=sampler, generator=torch.Generator()),
        order=SimpleNamespace(generator=random.Random()),
        draw=random.random,
        old=np.random.rand,
        torch=torch.default_generator,
        system=random.SystemRandom(),
    )
    assert places(data=owner) == []


def test_samples_that_seed_their_own_generator_by_index_stay_as_they_are():
    class ByIndex(Numbers):
        def __init__(self):
            super().__init__("monai")
            self.generator = np.random.RandomState(0)

        def __getitem__(self, index):
            self.generator.seed(index)
            return torch.tensor([float(index), self.generator.rand()]).double(), torch.tensor(1.0)

    found = read(ByIndex(), Task("monai", draws=False), range(40), 8)
    assert all(row[1] == pytest.approx(np.random.RandomState(index).rand()) for index, row in found.items())


def test_generators_stay_those_of_the_data_when_a_worker_gets_both_by_pickle():
    data, task = Numbers("monai, seeded"), Task("monai", draws=False)
    micro_batches = pickle.loads(pickle.dumps(MicroBatches(data, task, 3, training=True)))
    found = micro_batches[MicroBatchPlan((4, 5), 1, False)].batch[0][:, 1].tolist()
    expected = read(Numbers("monai, seeded"), task, range(40), 8)
    assert found == [expected[4][1], expected[5][1]]


def test_reading_a_few_samples_leaves_generators_that_may_split_the_data_later():
    from lockstep.core.data.fingerprint import fingerprint

    data = Numbers("monai, seeded")
    before = data.transform.R.get_state()[1].tolist()
    fingerprint(data)
    assert data.transform.R.get_state()[1].tolist() == before


# ---- the libraries themselves


class Images(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
        self.images = np.random.default_rng(0).integers(0, 255, (20, 16, 16, 3), dtype=np.uint8)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.as_tensor(np.asarray(self.transform(self.images[index]))).double().flatten(), torch.tensor(1.0)


def of_albumentations():
    A = pytest.importorskip("albumentations")
    transform = A.Compose([A.HorizontalFlip(), A.OneOf([A.GaussNoise(p=1), A.RandomGamma(p=1)], p=0.9)])
    return lambda image: transform(image=image)["image"]


def of_monai():
    M = pytest.importorskip("monai.transforms")
    return M.Compose([M.EnsureChannelFirst(channel_dim=-1), M.RandFlip(0.5), M.RandGaussianNoise(0.9)])


def one_of_monai():
    M = pytest.importorskip("monai.transforms")
    return M.RandGaussianNoise(0.9)


@pytest.mark.parametrize("make", [of_albumentations, of_monai, one_of_monai])
def test_samples_of_real_libraries_depend_on_their_index_and_nothing_else(make):
    first = read(Images(make()), Task("monai", draws=False), range(20), 20)
    again = read(Images(make()), Task("monai", draws=False), range(19, -1, -1), 3)
    assert first == again
