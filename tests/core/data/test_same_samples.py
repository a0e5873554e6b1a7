"""Before the first step, ranks that do not have the same samples say which samples, and how they differ."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.core.data import difference
from lockstep.core.errors import LockstepError
from tests.own_tasks import Plain
from tests.ranks import run_ranks
from tests.runs import config, fit, shared_folder


class Samples(Dataset):
    """48 samples; `of` gives the inputs of a sample from its index and its usual inputs."""

    def __init__(self, of=lambda index, inputs: inputs, length=48):
        self.of, self.length = of, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        inputs = torch.arange(4.0) + index
        return self.of(index, inputs), torch.tensor(float(index % 3))


def rank():
    return int(os.environ["RANK"])


def by_rank(index, inputs):
    return inputs + torch.tensor([0.0, 0.0, float(rank()), 0.0])


def drawn(index, inputs):
    """As a user's data set that keeps what it drew when it was made."""
    return inputs + torch.tensor(np.random.default_rng([index, rank()]).normal(size=4), dtype=torch.float32)


def drawn_each_time(index, inputs):
    return inputs + float(np.random.default_rng().normal())


def seeded(index, inputs):
    return inputs + torch.rand(4) + float(np.random.normal())


class Task(Plain):
    def __init__(self, training, evaluation=Samples, prepared=None):
        super().__init__()
        self.training, self.evaluation, self.prepared = training, evaluation, prepared

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        return self.training()

    def eval_data(self):
        return self.evaluation()

    def prepare(self, sample, epoch, training):
        return sample if self.prepared is None else (self.prepared(0, sample[0]), sample[1])

    def weight(self, batch):
        return len(batch[0])

    def loss(self, model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square().sum()

    def predict(self, model, batch):
        return model(batch[0])[:, 0]


TASKS = {
    "rank": lambda: Task(lambda: Samples(by_rank)),
    "drawn": lambda: Task(lambda: Samples(drawn)),
    "length": lambda: Task(lambda: Samples(length=40 + rank())),
    "eval": lambda: Task(Samples, lambda: Samples(by_rank)),
    "prepare": lambda: Task(Samples, prepared=by_rank),
    "each time": lambda: Task(lambda: Samples(drawn_each_time)),
    "seeded": lambda: Task(lambda: Samples(seeded), lambda: Samples(seeded), seeded),
    "same": lambda: Task(Samples),
}


def trained(name, workers=0):
    """The error of a training of two steps on this rank, or on rank 0 its log: rank 0 deletes the folder."""
    with shared_folder() as folder:
        settings = config(train={"steps": 2, "eval_every_steps": 2}, data={"workers": workers})
        try:
            fit(TASKS[name](), settings, folder)
        except LockstepError as error:
            return str(error)
        return (folder / "train.log").read_text() if rank() == 0 else ""


@pytest.mark.cases("length", "eval", "prepare", "rank")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "rank",
            "Task.train_data: the ranks have different training data: sample 0 of rank 1 is not that of rank 0 "
            "(sample[0], at number 2 of float32 [4]: 2.0 on rank 0, and 3.0 on rank 1). Samples that were compared: "
            "0, 23, 47; different: 0, 23, 47",
        ),
        ("drawn", "the ranks have different training data: sample 0 of rank 1 is not that of rank 0 (sample[0], at "),
        ("length", "the ranks have different training data: the number of samples is 40 on rank 0, 41 on rank 1"),
        ("eval", "Task.eval_data or Task.prepare: the ranks have different evaluation data: sample 0 of rank 1 "),
        ("prepare", "Task.train_data or Task.prepare: the ranks have different training data: sample "),
    ],
)
def test_ranks_with_samples_of_their_own_do_not_train(name, expected):
    found = run_ranks(2, trained, name)
    for text in found:
        assert expected in text
        assert "remedy: make the same data on every rank" in text


def test_three_ranks_and_loader_workers():
    found = run_ranks(3, trained, "rank", 1)
    assert "sample 0 of ranks 1, 2 is not that of rank 0" in found[0]


@pytest.mark.cases("seeded")
@pytest.mark.parametrize("name", ["seeded", "same"])
def test_samples_that_draw_under_the_seed_of_the_sample_are_the_same(name):
    log = run_ranks(2, trained, name)[0]
    assert "step 2/2" in log
    assert "WARNING" not in log


def test_samples_that_change_each_time_are_told():
    log = run_ranks(2, trained, "each time")[0]
    assert "step 2/2" in log
    assert "WARNING: sample 0 of the training data is different each time it is read" in log


class Point:
    pass


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 1, "b": [2, 3]}, {"a": 1, "b": [2, 4]}, "sample['b'][1] is 3 on A, and 4 on B"),
        ("one", "two", "sample is 'one' on A, and 'two' on B"),
        ((torch.zeros(2),), (torch.zeros(3),), "sample[0] is float32 [2] on A, and float32 [3] on B"),
        (
            torch.tensor([1.0, float("nan"), 2.0]).bfloat16(),
            torch.tensor([1.0, float("nan"), 3.0]).bfloat16(),
            "sample, at number 2 of bfloat16 [3]: 2.0 on A, and 3.0 on B",
        ),
        ({"a": 1}, {"b": 1}, "sample['a'] on A is at the place of sample['b'] on B"),
        ([1], [1, 2], "it has 1 part on A, and 2 on B"),
        (np.arange(9000), np.append(np.arange(8999), 1), "sample (int64 [9000]) differs after its first 4,096 numbers"),
        ([Point(), 1], [Point(), 2], "sample[1] is 1 on A, and 2 on B"),
    ],
)
def test_the_first_difference_is_named(one, other, expected):
    assert difference.first(difference.record(one), difference.record(other), ("A", "B")) == expected
