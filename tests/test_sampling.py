"""Trainings whose data set draws its samples by weights, by labels, or by an order of its own."""

import os

import numpy as np
import pytest

import lockstep
from lockstep import LockstepError, Trainer
from lockstep.watch import shares
from packages.lab.tests.verify import mutants
from tests import ranks, runs
from tests.ranks import run_ranks
from tests.sampling_cases import (
    LABELS,
    LENGTH,
    WEIGHTS,
    Compared,
    EasyFirst,
    Sampled,
    by_hand,
    by_weights,
    settings,
    trained,
)

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


def test_both_draws_of_a_sample_count_where_samples_are_grouped_by_length(tmp_path):
    data = {"group_by_length": 2}
    lengths = np.arange(LENGTH) * 5 % 7
    attributes = {"sample_weights": WEIGHTS, "lengths": lengths}
    one, two = (
        run_ranks(world, trained, attributes, settings(5, data=data, batch={"micro": 4}), tmp_path / str(world))[0]
        for world in (1, 2)
    )
    assert runs.difference(one, two) < 1e-10


def test_a_run_goes_on_within_an_epoch_on_another_number_of_ranks_and_evaluates_each_sample_once(weighted, tmp_path):
    attributes = {"sample_weights": WEIGHTS}
    run_ranks(3, trained, attributes, settings(6), tmp_path)
    config = settings(STEPS) | {"train": {"steps": STEPS, "eval_every_steps": STEPS}}
    for weights, results in run_ranks(2, both, attributes, config, tmp_path):
        assert runs.difference(weights, weighted) < 1e-10
        assert results["eval/samples"] == 20


def both(attributes, config, folder):
    return runs.fit(Sampled(**attributes), config, folder)


def test_a_run_goes_on_with_the_same_weights_only(tmp_path):
    trained({"sample_weights": WEIGHTS}, settings(3), tmp_path)
    others = WEIGHTS.copy()
    others[40] += 0.01
    for attributes in ({"sample_weights": others}, {}, {"order": EasyFirst()}):
        with pytest.raises(LockstepError, match="drawn in a different order, such as by different weights"):
            trained(attributes, settings(4), tmp_path)
    trained({"sample_weights": others}, settings(4), tmp_path, ["data"])


def with_weights_of_the_rank(config, folder):
    weights = WEIGHTS + int(os.environ["RANK"])
    with pytest.raises(LockstepError, match=r"the digest of the order of the samples is .* on rank 0, .* on rank 1"):
        trained({"sample_weights": weights}, config, folder)


def test_ranks_with_different_weights_are_refused(tmp_path):
    run_ranks(2, with_weights_of_the_rank, settings(3), tmp_path)


def test_the_log_names_the_draws_of_each_epoch(tmp_path):
    config = settings(STEPS, data={"balance": "label", "samples_per_epoch": 48}, log={"every_steps": 1})
    config["train"] = {"epochs": 2}
    (weights,) = run_ranks(1, trained, {"labels": LABELS}, config, tmp_path)
    order = lockstep.WeightedSampler(np.where(LABELS, 1 / LABELS.sum(), 1 / (1 - LABELS).sum()), 48)
    log = (tmp_path / "train.log").read_text()
    for epoch in range(2):
        distinct = len(set(order(np.arange(48), seed=0, epoch=epoch).tolist()))
        assert f"weighted sampling by label: 48 draws of 90 samples, {distinct} distinct" in log
    assert "weighted sampling by label: an epoch has 48 draws of 90 samples" in log
    index_at = by_weights(order.weights)
    assert runs.difference(weights, by_hand(4, index_at, 48)) < 1e-10


def watched(attributes, config, folder):
    """Weights; and of each sample of step 4, computed alone in a replay, its index, its loss and its norm."""
    weights, _ = runs.fit(Sampled(**attributes), config, folder)
    trainer = Trainer(config, run_dir=folder, quiet=True)
    with trainer.replaying(4, Sampled(**attributes)) as (run, _):
        assert run.state.step == 3, "there is a checkpoint"
        return weights, [(part.indices, part.loss["loss"]) for part in shares.samples(run, next(run.batches)[0])]


def test_the_watch_and_a_replay_see_the_samples_of_the_training(weighted, tmp_path):
    config = settings(STEPS, watch={"every": 2}, checkpoint={"every_steps": 3, "keep_last": 9})
    ((weights, samples), (_, of_other)) = run_ranks(2, watched, {"sample_weights": WEIGHTS}, config, tmp_path)
    assert runs.difference(weights, weighted) < 1e-10
    assert samples == of_other
    index_at = by_weights(WEIGHTS)
    assert [index for index, _ in samples] == [(index_at(0, position),) for position in range(72, 90)]
    assert len({index for index, _ in samples}) < len({loss for _, loss in samples}) == 18


def test_a_loss_over_the_global_batch_orders_draws_by_their_positions(tmp_path):
    attributes = {"sample_weights": WEIGHTS}
    one, two = (
        run_ranks(world, compared, attributes, settings(6, batch={"micro": 6}), tmp_path / str(world))[0]
        for world in (1, 2)
    )
    assert runs.difference(one, two) < 1e-10


def compared(attributes, config, folder):
    return runs.fit(Compared(**attributes), config, folder)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["weighted", "balanced", "own-order"])
def test_verify_passes_all_checks_on_drawn_samples(base, tmp_path):
    outcome = mutants.verify_base(base, ranks._ranks, tmp_path / "run")
    assert not outcome.error
    assert {name: one.reason for name, one in outcome.checks.items() if one.status != "passed"} == {}
    assert "that the data set draws" in outcome.checks["samples"].reason
