"""Fillers leave no trace, and micro-batches of one sample are known before the first step."""

import itertools
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep import LockstepError, Trainer
from lockstep.core import batch_norm
from lockstep.core.data.order import StepPlan
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly


def statistics_by_hand(length, plan, steps, lengths):
    """Rank 0's BatchNorm statistics after some steps at a learning rate of nothing: its samples alone count."""
    task = own_tasks.Normed(length, lengths, places=True)
    torch.manual_seed(0)
    model, data = task.model(), task.train_data()
    for step in range(steps):
        for chunk in plan.rank_micro_batches(step, 0):
            if not chunk.filler:
                model(data.tensors[0][torch.tensor(chunk.indices)])
    return dict(model.named_buffers())


@pytest.mark.cases("2-25-3-fsdp")
@pytest.mark.parametrize("lengths", mainly([True], [False, True]))
@pytest.mark.parametrize(
    ("world", "length", "micro", "strategy"),
    mainly([(2, 25, 3, "fsdp"), (3, 28, 1, "ddp")], [(2, 25, 3, "ddp"), (3, 28, 1, "ddp"), (2, 25, 3, "fsdp")]),
)
def test_fillers_move_no_statistics(tmp_path, world, length, micro, strategy, lengths):
    """An epoch's last batch leaves places without a sample; with lengths such a place is rank 0's."""
    settings = runs.config(batch={"global": 12, "micro": micro}, train={"steps": 5}, parallel={"strategy": strategy})
    settings["optim"] = {"name": "SGD", "lr": 1e-30}
    plan = StepPlan(length, 12, micro, world, lengths=np.array([1 + n % 7 for n in range(length)]) if lengths else None)
    fillers = [
        rank for step in range(5) for rank, chunks in enumerate(plan.by_rank(step)) for chunk in chunks if chunk.filler
    ]
    assert fillers
    assert (0 in fillers) == (lengths and micro == 1)
    expected = statistics_by_hand(length, plan, 5, lengths)
    options = {"length": length, "lengths": lengths, "places": True}
    for weights, _ in run_ranks(world, runs.fit_kind, "Normed", options, settings, tmp_path):
        assert weights["1.num_batches_tracked"] == expected["1.num_batches_tracked"]
        for name in ("1.running_mean", "1.running_var"):
            assert torch.allclose(weights[name], expected[name], rtol=1e-12, atol=0), name


def test_a_filler_does_not_raise_for_its_single_sample(tmp_path):
    """Where all samples of a micro-batch are unreadable, any other stands in for them."""

    class Unreadable(own_tasks.Normed):
        def train_data(self):
            return own_tasks.Files(24, broken=StepPlan(24, 24, 4).rank_micro_batches(0, 0)[2].indices)

    settings = runs.config(batch={"micro": 4}, train={"steps": 1}, data={"on_error": "skip"})
    weights, results = runs.fit(Unreadable(24), settings, tmp_path)
    assert results["data/bad"] == 4
    assert weights["1.running_mean"].isfinite().all()


@pytest.mark.parametrize("world", [1, 2])
def test_a_last_micro_batch_of_one_sample_is_known_before_the_first_step(world, tmp_path):
    settings = runs.config(batch={"global": 24, "micro": 12})
    length = 24 + world
    for message in run_ranks(world, rank_cases.error_of, "Normed", {"length": length}, settings, tmp_path / "first"):
        assert "in step 2 of each epoch some rank has a micro-batch of one sample" in message
        assert "data.drop_last=true" in message
    for weights, _ in run_ranks(
        world,
        runs.fit_kind,
        "Normed",
        {"length": length},
        settings | {"data": {"drop_last": True}},
        tmp_path / "second",
    ):
        assert weights["1.num_batches_tracked"] == 20 * 2 // world


def test_micro_batches_of_one_sample_throughout_are_an_error_too(tmp_path):
    with pytest.raises(LockstepError, match="in each step some rank has a micro-batch of one sample") as caught:
        runs.fit(own_tasks.Normed(), runs.config(batch={"micro": 1}), tmp_path)
    assert "batch.micro" in str(caught.value)


def test_models_that_take_single_samples_are_left_alone(tmp_path):
    class Frozen(own_tasks.Normed):
        def model(self):
            model = super().model()
            model[1].eval()
            model[1].train = lambda mode=True: model[1]
            return model

    settings = runs.config(batch={"micro": 1}, train={"steps": 2})
    for task in (Frozen(), own_tasks.Plain(25), own_tasks.Masked()):
        results = Trainer(settings, run_dir=tmp_path / type(task).__name__, quiet=True).fit(task)
        assert results["train/loss"] > 0


@pytest.mark.parametrize(
    ("length", "world", "micro", "expected"),
    [
        (240, 1, 24, (24, 0)),
        (241, 1, 24, (1, 10)),
        (241, 2, 12, (1, 10)),
        (250, 2, 6, (5, 10)),
        (240, 3, 5, (4, 0)),
        (10, 4, 1, (1, 0)),
    ],
)
def test_the_plan_knows_its_smallest_micro_batch(length, world, micro, expected):
    plan = StepPlan(length, 24, micro, world)
    assert plan.smallest_micro_batch() == expected
    sizes = [
        (len(chunk.indices), step)
        for step in range(plan.steps_per_epoch)
        for rank in plan.by_rank(step)
        for chunk in rank
        if not chunk.filler
    ]
    assert min(sizes)[0] == expected[0]


# ---- models that depend on how the batch is cut


def notes(kind, micro=24, world=1, micro_by_epoch=None):
    model = nn.Sequential(nn.Linear(4, 4), kind, nn.Linear(4, 4)).train()
    return batch_norm.notes(model, StepPlan(48, 24, micro, world, micro_by_epoch=micro_by_epoch))


class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


def test_note_says_what_depends_on_the_cut():
    (alone,) = notes(nn.BatchNorm1d(4))
    assert "1 BatchNorm module normalises" in alone
    assert "SyncBatchNorm normalises over ranks" in alone
    assert notes(nn.SyncBatchNorm(4)) == notes(nn.SyncBatchNorm(4), micro=12, world=2) == []
    (in_parts,) = notes(nn.SyncBatchNorm(4), micro=6, world=2)
    assert "each of the 2 parts of a step" in in_parts
    assert notes(nn.SyncBatchNorm(4), micro_by_epoch={0: 24, 1: 8})
    assert notes(nn.GroupNorm(2, 4)) == notes(Frozen(4)) == []
    assert notes(Frozen(4, track_running_stats=False))


@pytest.mark.parametrize("frozen", [False, True])
def test_log_says_it_once_and_verify_agrees(frozen, tmp_path):
    class Kept(own_tasks.Normed):
        def model(self):
            model = super().model()
            if frozen:
                model[1].train = lambda mode=True: model[1]
                model[1].training = False
            return model

    weights, _ = runs.fit(Kept(48), runs.config(batch={"micro": 12}, train={"steps": 4}), tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert log.count("1 BatchNorm module normalises each micro-batch with its own statistics") == (0 if frozen else 1)
    assert len(batch_norm.by_batch(Kept(48).model().train())) == (0 if frozen else 1)
    assert bool(weights["1.num_batches_tracked"]) != frozen


# ---- statistics that a step reads


class ReadsStatistics(own_tasks.Normed):
    """The loss takes its targets from a pass in evaluation mode, within the step."""

    def loss(self, model, batch):
        model.eval()
        with torch.no_grad():
            target = model(batch[0]).softmax(1)
        model.train()
        return super().loss(model, batch) + functional.cross_entropy(model(batch[0]), target, reduction="sum")


class ModeOfRank(own_tasks.Normed):
    def model(self):
        model, calls = super().model(), itertools.count()

        def choose(norm, _):
            norm.training = model.training and not (os.environ.get("RANK") == "1" and next(calls) % 2)

        model[1].register_forward_pre_hook(choose)
        return model


def trained(kind, settings, folder):
    return runs.fit(globals()[kind](), settings, folder)[0]


def test_a_step_that_reads_statistics_does_not_depend_on_when_is_saved(tmp_path):
    """A save gives all ranks the statistics of rank 0. So they have them in every step."""
    found = []
    for every in (3, 100):
        settings = runs.config(train={"steps": 8}, checkpoint={"every_steps": every})
        found += run_ranks(2, trained, "ReadsStatistics", settings, tmp_path / str(every))
    for weights in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0].items())


def test_ranks_may_have_batch_norm_in_different_modes(tmp_path):
    """They exchange the same buffers nevertheless."""
    settings = runs.config(train={"steps": 6})
    first, second = run_ranks(2, trained, "ModeOfRank", settings, tmp_path, timeout_s=60)
    assert all(torch.equal(second[name], value) for name, value in first.items())
