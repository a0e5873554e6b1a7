"""The rules of the reference: the order of samples, learning rates, how it reads what tasks and checkpoints hold."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torchmetrics import MeanMetric, MetricCollection

from lockstep.core.checkpoint import files
from lockstep.core.data import order as engine_order
from lockstep.core.schedule import Schedule
from lockstep.core.schedule import scaled_lr as engine_scaled_lr
from lockstep_lab.verify.reference import data, evaluation, order, schedule
from lockstep_lab.verify.reference.checkpoint import load_trained_weights, newest
from tests import runs
from tests.own_tasks import Masked

# ---- the order of samples

GOLDEN = {  # by (length, seed, epoch): the first indices. Another order would change every run
    (10, 0, 0): [3, 8, 5, 0, 9, 7],
    (10, 0, 1): [1, 2, 9, 7, 8, 0],
    (10, 1, 0): [1, 8, 2, 4, 7, 6],
    (1000, 0, 0): [510, 771, 240, 544, 853, 514],
    (1000, 7, 3): [947, 262, 457, 927, 263, 656],
    (12345, 1099511627776, 2): [10034, 350, 6113, 8268, 4479, 8775],
    (1000000000000, 5, 1): [764134956575, 89721022435, 37922589836, 189239280796, 329083104200, 731038004003],
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_the_order_never_changes(key):
    length, seed, epoch = key
    first = GOLDEN[key]
    assert [order.index_at(place, length=length, seed=seed, epoch=epoch) for place in range(len(first))] == first
    assert engine_order.permute(range(len(first)), length, seed, epoch).tolist() == first


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 17, 143, 1000])
def test_an_epoch_is_a_permutation_of_its_own(length):
    epochs = [[order.index_at(place, length=length, seed=3, epoch=e) for place in range(length)] for e in range(2)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 7:
        assert epochs[0] != epochs[1] != list(range(length)) != epochs[0]


@pytest.mark.parametrize(("length", "batch", "drop_last"), [(10, 3, False), (10, 3, True), (9, 3, False), (2, 5, True)])
def test_steps_are_those_of_the_engine(length, batch, drop_last):
    plan = engine_order.StepPlan(length, batch, batch, 1, 5, drop_last)
    assert order.steps_per_epoch(length, batch, drop_last=drop_last) == plan.steps_per_epoch
    for step in range(9):
        indices, epoch = plan.indices(step)
        found = order.samples_of_step(step, length=length, global_batch=batch, seed=5, drop_last=drop_last)
        assert found == (indices.tolist(), epoch)


GOLDEN_GROUPED = {  # by (length, global batch, batches of a window, seed, epoch): the first three steps, and the last
    (23, 4, 2, 0, 0): ([21, 9, 2, 17], [20, 15, 5, 11], [1, 6, 12, 22], [0, 10, 19]),
    (23, 4, 2, 0, 1): ([6, 7, 22, 12], [5, 20, 8, 3], [11, 4, 19, 17], [21, 9, 18]),
    (23, 4, 3, 7, 0): ([5, 20, 10, 18], [3, 8, 21, 16], [11, 14, 9, 12], [4, 1, 0]),
    (1000, 3, 50, 1, 2): ([70, 175, 80], [287, 162, 417], [931, 191, 601], [725]),
}


@pytest.mark.parametrize("key", GOLDEN_GROUPED, ids=str)
def test_the_order_of_samples_that_are_grouped_by_length_never_changes(key):
    length, batch, window, seed, epoch = key
    lengths = [index * 7 % 5 for index in range(length)]
    plan = engine_order.StepPlan(length, batch, batch, 1, seed, lengths=np.array(lengths), group_by_length=window)
    rule = {"length": length, "global_batch": batch, "seed": seed, "group_by_length": window, "lengths": lengths}
    steps = [epoch * plan.steps_per_epoch + place for place in (0, 1, 2, plan.steps_per_epoch - 1)]
    expected = [(list(indices), epoch) for indices in GOLDEN_GROUPED[key]]
    assert [order.samples_of_step(step, **rule) for step in steps] == expected
    assert [(indices.tolist(), at) for indices, at in map(plan.indices, steps)] == expected


@pytest.mark.parametrize(
    ("length", "batch", "window", "drop_last"),
    [
        (103, 10, 3, False),
        (103, 10, 3, True),
        (100, 10, 50, False),
        (7, 10, 2, True),
        (7, 10, 2, False),
        (60, 5, 1, False),
    ],
)
def test_grouped_steps_are_those_of_the_engine(length, batch, window, drop_last):
    lengths = np.random.default_rng(length).integers(1, 9, length)
    plan = engine_order.StepPlan(length, batch, batch, 1, 5, drop_last, lengths, group_by_length=window)
    rule = {"length": length, "global_batch": batch, "seed": 5, "drop_last": drop_last}
    for step in range(2 * plan.steps_per_epoch):
        indices, epoch = plan.indices(step)
        found = order.samples_of_step(step, **rule, group_by_length=window, lengths=lengths)
        assert found == (indices.tolist(), epoch)


# ---- learning rates

PLAIN = {
    "warmup_steps": 0,
    "end_factor": 0.0,
    "step_epochs": 1,
    "gamma": 0.1,
    "power": 1.0,
    "total_steps": None,
    "warmup_share": None,
}
TOTAL, PER_EPOCH = 30, 7
TORCH = {
    "constant": ({}, lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    "linear": ({"end_factor": 0.2}, lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.2, TOTAL)),
    "cosine": ({"end_factor": 0.2}, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, TOTAL, eta_min=0.2)),
    "polynomial": ({"power": 2.0}, lambda optimizer: lr_scheduler.PolynomialLR(optimizer, TOTAL, power=2.0)),
    "step": (
        {"step_epochs": 2, "gamma": 0.3},
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2 * PER_EPOCH, gamma=0.3),
    ),
    "one_cycle": (
        {"warmup_steps": 9},
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=TOTAL, pct_start=9 / TOTAL),
    ),
}


def factors(**section):
    return [schedule.factor(PLAIN | section, u, total=TOTAL, steps_per_epoch=PER_EPOCH) for u in range(TOTAL)]


@pytest.mark.parametrize("name", TORCH)
def test_curves_are_those_of_torchs_schedulers(name):
    section, make = TORCH[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert factors(name=name, **section) == pytest.approx(rates, rel=1e-9, abs=1e-12)


def test_a_warm_up_rises_in_equal_steps_to_the_curve():
    found = factors(name="cosine", warmup_steps=5)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors(name="cosine", warmup_share=0.1)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert factors(name="constant", warmup_steps=60)[-1] == 0.5


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(
    "more", [{"warmup_steps": 1}, {"warmup_share": 0.1}, {"total_steps": 20}, {"total_steps": 50}, {"step_epochs": 0.3}]
)
def test_the_engine_has_the_same_curves(name, more):
    section = {"name": name} | more
    engine = Schedule(total=TOTAL, steps_per_epoch=PER_EPOCH, **(PLAIN | section))
    assert factors(**section) == pytest.approx([engine(update) for update in range(TOTAL)], rel=1e-12, abs=1e-15)


def test_rates_grow_with_the_global_batch():
    for scaling, factor in {"none": 1.0, "linear": 4.0, "sqrt": 2.0}.items():
        assert schedule.scaled_lr({"lr_scaling": scaling, "reference_batch": 8}, 32) == factor
        assert engine_scaled_lr(1.0, scaling, global_batch=32, reference_batch=8) == factor


# ---- what tasks return


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    logits: Any
    name: str = "x"


def test_tensors_are_found_wherever_they_are():
    one = torch.ones(2)
    value = {"a": [one, (one, 3)], "b": Pair(one, "text"), "c": Output(one)}
    found = data.mapped(value, lambda tensor: tensor + 1)
    assert found["a"][0].tolist() == [2, 2]
    assert found["a"][1][0].tolist() == [2, 2]
    assert found["a"][1][1] == 3
    assert isinstance(found["b"], Pair)
    assert found["b"].first.tolist() == found["c"].logits.tolist() == [2, 2]
    assert (found["b"].second, found["c"].name) == ("text", "x")
    assert value["a"][0] is one


def test_samples_are_read_under_their_own_seeds_and_unreadable_samples_are_left_out():
    class Draws(Masked):
        def prepare(self, sample, epoch, training):
            return float(torch.rand(()) + np.random.rand()), epoch, training

    class Broken(list):
        def __getitem__(self, index):
            if index == 1:
                raise OSError("no such file")
            return super().__getitem__(index)

    task, source = Draws(6), Broken(range(6))
    both = data.read(task, source, [4, 1, 2], epoch=2, training=True, seed=0, skip=True)
    assert [sample[1:] for sample in both] == [(2, True)] * 2
    alone = data.read(task, source, [2], epoch=2, training=True, seed=0, skip=False)
    assert both[1] == alone[0] != both[0]
    with pytest.raises(OSError, match="no such file"):
        data.read(task, source, [1], epoch=0, training=True, seed=0, skip=False)


def test_metrics_have_the_names_that_the_log_has():
    values = {"mean": torch.tensor(0.5), "by_class": torch.tensor([1.0, 2.0]), "curve": (torch.ones(2), torch.ones(2))}
    assert evaluation._numbers("", values | {"nested": {"a": torch.tensor(3)}}) == {
        "mean": 0.5,
        "by_class/0": 1.0,
        "by_class/1": 2.0,
        "nested/a": 3.0,
    }


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (None, None),
        (MeanMetric(), ["MeanMetric"]),
        ({"a": MeanMetric(), "b": MeanMetric()}, ["a", "b"]),
        (MetricCollection({"a": MeanMetric()}, prefix="x/"), ["x/a"]),
    ],
)
def test_metrics_of_every_kind_become_a_collection(monkeypatch, returned, names):
    monkeypatch.setattr(Masked, "metrics", lambda self: returned)
    found, _ = evaluation._metrics(Masked(6))
    assert (found and [str(name) for name in dict(found)]) == names


# ---- checkpoints


def test_a_checkpoint_is_read_as_the_engine_wrote_it(tmp_path):
    results = runs.fit(Masked(60), runs.config(train={"steps": 4, "ema_decay": 0.5}), tmp_path)
    assert results
    state = newest(tmp_path)
    assert state.step == 4
    from lockstep.core.checkpoint import store

    (checkpoint,) = store.listed(tmp_path / "checkpoints")
    by_engine = dict(files.read(checkpoint.path, checkpoint.index))
    assert state.names == by_engine.keys()
    found = dict(state.read(state.names))
    assert all(torch.equal(found[name], by_engine[name]) for name in by_engine)
    model = Masked(60).model()
    load_trained_weights(state, model)
    assert all(torch.equal(value, by_engine[f"ema.{name}"]) for name, value in model.named_parameters())
    assert newest(tmp_path / "nothing") is None
