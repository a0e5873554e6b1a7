"""Trainings with data.group_by_length: the samples are those of the rule, on every number of ranks and when resumed."""

import pytest
import torch

from lockstep import LockstepError, Trainer
from lockstep.core.errors import DataError, UsageError
from lockstep_lab.verify.reference import order
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly

STEPS = 17  # an epoch has six whole batches of 24 samples, in windows of four and two, and a batch of six


def settings(steps=STEPS, group=4, **sections):
    return runs.config(train={"steps": steps}, data={"group_by_length": group}, **sections)


@pytest.fixture(scope="module")
def by_hand():
    """Weights of plain torch with the samples of the rule in `docs/step.md`."""
    task = own_tasks.WithLengths()
    rule = {"length": 150, "global_batch": 24, "seed": 0, "group_by_length": 4, "lengths": task.train_data().lengths}

    def samples(step):
        return torch.tensor(order.samples_of_step(step, **rule)[0])

    return runs.by_hand(task, STEPS, samples=samples)[0]


@pytest.mark.cases("3")
@pytest.mark.parametrize("world", [2, 3])
def test_grouped_training_is_that_of_plain_torch_on_every_number_of_ranks(by_hand, world, tmp_path):
    grouped = settings(batch={"micro": 3})
    for weights, _ in run_ranks(world, rank_cases.fit_quietly, "WithLengths", {}, grouped, tmp_path):
        assert runs.difference(weights, by_hand) < 1e-10


def test_one_rank_has_the_same_and_another_training_than_without(by_hand):
    grouped, _ = runs.fit(own_tasks.WithLengths(), settings())
    plain, _ = runs.fit(own_tasks.WithLengths(), settings(group=None))
    assert runs.difference(grouped, by_hand) < 1e-10
    assert runs.difference(plain, by_hand) > 1e-3


STOPS = [2, 5, 7, 9]  # inside of windows, and at the ends of a window and of an epoch


@pytest.mark.parametrize("stop", mainly([7], STOPS))
def test_a_resumed_run_is_bitwise_the_same(tmp_path, stop):
    whole, _ = runs.fit(own_tasks.WithLengths(), settings(10), tmp_path / "whole")
    runs.fit(own_tasks.WithLengths(), settings(stop), tmp_path / "parts")
    parts, _ = runs.fit(own_tasks.WithLengths(), settings(10), tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_resumed_run_keeps_its_groups(tmp_path):
    runs.fit(own_tasks.WithLengths(), settings(3), tmp_path)
    for other in (None, 5):
        with pytest.raises(LockstepError, match=r"data\.group_by_length"):
            runs.fit(own_tasks.WithLengths(), settings(6, group=other), tmp_path)


def test_the_run_directory_says_that_samples_were_grouped(tmp_path):
    runs.fit(own_tasks.WithLengths(), settings(2), tmp_path / "grouped")
    runs.fit(own_tasks.WithLengths(), settings(2, group=None), tmp_path / "plain")
    line = "data.group_by_length=4: windows of 4 batches are sorted by the length of their samples"
    assert line in (tmp_path / "grouped" / "train.log").read_text()
    assert "group_by_length: 4" in (tmp_path / "grouped" / "config.yaml").read_text()
    assert "group_by_length" not in (tmp_path / "plain" / "train.log").read_text()


@pytest.mark.parametrize(("group", "told"), [(5, False), (6, True), (50, True)])
def test_a_window_of_a_whole_epoch_is_told(tmp_path, group, told):
    runs.fit(own_tasks.WithLengths(), settings(1, group=group), tmp_path)
    line = "a window holds the whole epoch (6 batches), so every epoch has almost the same batches"
    assert (line in (tmp_path / "train.log").read_text()) == told


def test_unknown_lengths_are_an_error_before_anything_is_computed(tmp_path):
    with pytest.raises(UsageError, match=r"data\.group_by_length: the lengths of the samples are not known") as caught:
        runs.fit(own_tasks.Masked(), settings(), tmp_path)
    assert "attribute `lengths`" in caught.value.remedy


@pytest.mark.parametrize("wrong", [[1, 2, 3], [[1]] * 150, ["long"] * 150, 7])
def test_lengths_that_are_not_a_number_for_each_sample_are_an_error(tmp_path, wrong):
    with pytest.raises(DataError, match=r"Task\.train_data: `lengths` .* expected: one number for each of 150 samples"):
        runs.fit(own_tasks.WithLengths(wrong=wrong), settings(), tmp_path)


@pytest.mark.parametrize("wrong", [0, -3, "all"])
def test_a_window_has_at_least_one_batch(wrong):
    with pytest.raises(UsageError, match=r"data\.group_by_length"):
        Trainer(settings(group=wrong), quiet=True)
