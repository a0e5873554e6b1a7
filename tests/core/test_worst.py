"""The most wrong samples of an evaluation: those of plain sorting, on any number of ranks."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import EvaluationPlan
from lockstep.core.evaluate import evaluate, split
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import join_world
from lockstep.core.worst import WorstSamples
from tests.ranks import run_ranks

LENGTHS = [0, 1, 2, 5, 17, 40]


def numbers(length):
    """Many equal numbers, with NaN, infinity and samples that nobody wants to see."""
    values = torch.arange(length).mul(7).remainder(5).double()
    values[3::11], values[4::13], values[6::7] = math.nan, math.inf, -math.inf
    return values


class Copies(Task):
    """The output of a sample is its index."""

    def __init__(self, length):
        self.length = length

    def model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return self.eval_data()

    def eval_data(self):
        return TensorDataset(torch.arange(self.length), numbers(self.length))

    def loss(self, model, batch):
        return batch[1].nan_to_num(0, 0, 0).sum(), {"index": batch[0], "half": (batch[0] / 2,)}


def worst_of(lengths, micro, mistakes=lambda output, batch: batch[1], count=6):
    """For each length: what was found, what went wrong, and how often `show` was called, on this rank."""
    answers = []
    with join_world("cpu") as world:
        for length in lengths:
            task, calls = Copies(length), []
            worst = WorstSamples(mistakes, count=count)
            evaluate(
                task,
                Forward(task.model(), task.loss),
                Loader(MicroBatches(task.eval_data(), task, 0, training=False), 0, world.device),
                plan=EvaluationPlan(length, micro),
                world=world,
                precision=Precision("fp32", world.device),
                show=lambda *_, calls=calls: calls.append(1),
                worst=worst,
            )
            found = [
                (one.mistake, one.index, int(one.output["index"]), float(one.output["half"][0])) for one in worst.found
            ]
            answers.append((found, worst.problem, len(calls)))
    return answers


def by_sorting(length, count=6):
    values = [math.inf if math.isnan(value) else value for value in numbers(length).tolist()]
    order = sorted(range(length), key=lambda index: (-values[index], index))
    return [(values[index], index, index, index / 2) for index in order if values[index] > -math.inf][:count]


@pytest.mark.parametrize("world", [3, 2, 1])
def test_the_most_wrong_samples_are_those_of_sorting(world):
    answers = run_ranks(world, worst_of, LENGTHS, 4)
    for number, length in enumerate(LENGTHS):
        expected = by_sorting(length)
        assert answers[0][number] == (expected, "", int(bool(expected)))
        for other in answers[1:]:
            assert other[number] == ([], "", 0)


def fails_late(output, batch):
    if 9 in batch[0]:
        raise KeyError("no box")
    return batch[1]


def wrong_shape(output, batch):
    return batch[1][:1]


def test_what_fails_on_one_rank_is_known_on_all_and_ends_nothing():
    for answer in run_ranks(2, worst_of, [17], 4, fails_late):
        assert answer[0][1] == "Presenter.mistakes failed: KeyError: 'no box'"
    ((_, problem, calls),) = worst_of([17], 4, wrong_shape)
    assert "a tensor of shape (1,) for 4 samples; it must be a tensor of shape (4,)" in problem
    assert calls == 1
    assert worst_of([17], 4, lambda *_: None) == [([], "", 0)]


def test_outputs_that_are_kept_do_not_keep_their_batch():
    worst = WorstSamples(lambda output, batch: batch, count=2)
    worst.add((5, 6, 7), torch.zeros(3, 100), torch.tensor([1.0, 3.0, 2.0]), split)
    assert [one.index for one in worst.found] == [6, 7]
    assert all(one.output.untyped_storage().nbytes() == 400 for one in worst.found)
    worst.add((1, 8), torch.ones(2, 100), torch.tensor([2.0, 2.0]), split)
    assert [(one.index, float(one.output[0])) for one in worst.found] == [(6, 0), (1, 1)]
