import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from pydantic import ValidationError
from torch.optim import lr_scheduler

from lockstep.core.schedule import Schedule, scaled_lr
from tests.selection import mainly

LR = 0.3
SHAPES = ["constant", "linear", "cosine", "step", "polynomial"]
NAMES = [*SHAPES, "one_cycle"]


def torch_factors(make, updates):
    """The factors on the learning rate that a torch scheduler gives to `updates` updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    factors = []
    for update in range(updates):
        factors.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        if update < updates - 1:
            scheduler.step()
    return factors


def ours(schedule, updates):
    return [schedule(update) for update in range(updates)]


def close(factors):
    return pytest.approx(factors, rel=1e-12, abs=1e-14)  # absolute: of the base rate, for factors that end at nothing


# ---- against torch


@pytest.mark.parametrize("gamma", [0.1, 0.8, 1.5])
@pytest.mark.parametrize(
    ("steps_per_epoch", "step_epochs", "epochs"), [(7, 1, 6), (10, 3, 10), (1, 2, 30), (8, 0.5, 4)]
)
def test_step_is_torchs_step_lr(steps_per_epoch, step_epochs, epochs, gamma):
    total = steps_per_epoch * epochs
    schedule = Schedule(name="step", total=total, steps_per_epoch=steps_per_epoch, step_epochs=step_epochs, gamma=gamma)
    expected = torch_factors(
        lambda optimizer: lr_scheduler.StepLR(optimizer, int(step_epochs * steps_per_epoch), gamma), total
    )
    assert ours(schedule, total) == close(expected)


@pytest.mark.parametrize("total", [1, 2, 17, 250])
@pytest.mark.parametrize("end_factor", [0.0, 0.25, 1.0])
def test_linear_is_torchs_linear_lr(total, end_factor):
    expected = torch_factors(lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, end_factor, total), total + 5)
    assert ours(Schedule(name="linear", total=total, end_factor=end_factor), total + 5) == close(expected)


@pytest.mark.parametrize("total", [1, 2, 17, 250])
@pytest.mark.parametrize("end_factor", [0.0, 0.25, 1.0])
def test_cosine_is_torchs_cosine_annealing_lr(total, end_factor):
    expected = torch_factors(
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, total, end_factor * LR), total + 1
    )
    assert ours(Schedule(name="cosine", total=total, end_factor=end_factor), total + 1) == close(expected)


@pytest.mark.parametrize("total", [1, 2, 17, 250])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.7])
def test_polynomial_is_torchs_polynomial_lr(total, power):
    expected = torch_factors(lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total, power), total + 5)
    assert ours(Schedule(name="polynomial", total=total, power=power), total + 5) == close(expected)


@pytest.mark.parametrize("total", [4, 5, 10, 33, 250])
def test_one_cycle_is_torchs_one_cycle_lr(total):
    expected = torch_factors(
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, LR, total_steps=total, cycle_momentum=False), total
    )
    assert ours(Schedule(name="one_cycle", total=total), total) == close(expected)


@pytest.mark.parametrize(("total", "warmup"), [(10, 2), (33, 11), (250, 200), (100, 99)])
def test_one_cycle_rises_for_its_warmup_steps(total, warmup):
    expected = torch_factors(
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, LR, total_steps=total, pct_start=warmup / total, cycle_momentum=False
        ),
        total,
    )
    assert ours(Schedule(name="one_cycle", total=total, warmup_steps=warmup), total) == close(expected)


def test_constant_is_one():
    assert ours(Schedule(name="constant", total=50), 60) == [1.0] * 60


@pytest.mark.parametrize("warmup", [2, 5, 30])
def test_warm_up_is_torchs_linear_lr(warmup):
    expected = torch_factors(lambda optimizer: lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1), 50)
    assert ours(Schedule(name="constant", total=50, warmup_steps=warmup), 50) == close(expected)


# ---- warm-up


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup", [1, 4, 9])
def test_warm_up_rises_by_equal_parts_to_the_whole_rate(name, warmup):
    schedule = Schedule(name=name, total=100, steps_per_epoch=20, warmup_steps=warmup)
    assert ours(schedule, warmup) == close([(update + 1) / warmup for update in range(warmup)])
    assert schedule(warmup) == close(1.0)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("linear", lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 80)),
        ("cosine", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 80)),
        ("polynomial", lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 80)),
    ],
)
def test_after_warm_up_the_shape_takes_the_updates_that_are_left(name, make):
    schedule = Schedule(name=name, total=100, warmup_steps=20)
    assert [schedule(20 + update) for update in range(81)] == close(torch_factors(make, 81))


def test_step_decays_at_epoch_ends_wherever_the_warm_up_ended():
    schedule = Schedule(name="step", total=100, steps_per_epoch=10, warmup_steps=7, gamma=0.5)
    assert [schedule(update) for update in range(7, 100)] == [0.5 ** (update // 10) for update in range(7, 100)]


def test_step_warms_up_to_the_rate_of_the_epoch_in_which_the_warm_up_ends():
    schedule = Schedule(name="step", total=100, steps_per_epoch=10, warmup_steps=25, gamma=0.5)
    assert [schedule(update) for update in (24, 25, 29, 30, 39, 40)] == [0.25, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert all(0 < schedule(update) <= (update + 1) / 25 for update in range(25))


@pytest.mark.parametrize(
    ("step_epochs", "steps_per_epoch"), [("0.1", 7), ("0.07", 25), ("1.1", 25), ("2.2", 50), ("2.5", 7)]
)
def test_step_keeps_fractions_of_epochs_free_of_rounding(step_epochs, steps_per_epoch):
    schedule = Schedule(
        name="step", total=300, steps_per_epoch=steps_per_epoch, step_epochs=float(step_epochs), gamma=0.5
    )
    exact = [0.5 ** math.floor(update / (Fraction(step_epochs) * steps_per_epoch)) for update in range(300)]
    assert ours(schedule, 300) == close(exact)


# ---- ends and edges


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("end_factor", [0.0, 0.1, 1.0])
def test_the_end_factor_is_reached_after_all_updates_and_kept(name, warmup, end_factor):
    schedule = Schedule(name=name, total=40, warmup_steps=warmup, end_factor=end_factor, power=2.0)
    assert [schedule(update) for update in (40, 41, 1000)] == close([end_factor] * 3)
    after = [schedule(update) for update in range(warmup, 41)]
    assert all(now >= then for now, then in itertools.pairwise(after))
    assert end_factor == 1.0 or schedule(39) > end_factor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("total", "warmup"),
    mainly([(1, 5), (5, 5), (5, 500)], [(1, 0), (1, 1), (1, 5), (2, 0), (3, 0), (5, 5), (5, 6), (5, 500)]),
)
def test_factors_of_short_trainings_are_between_zero_and_one(name, total, warmup):
    schedule = Schedule(name=name, total=total, warmup_steps=warmup)
    factors = ours(schedule, total + 3)
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors), factors
    assert factors[0] > 0  # an update at rate zero would be lost


@pytest.mark.parametrize("name", SHAPES)
def test_a_single_update_runs_at_the_whole_rate(name):
    assert Schedule(name=name, total=1)(0) == 1.0


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "polynomial"])
def test_a_warm_up_longer_than_the_training_only_rises(name):
    schedule = Schedule(name=name, total=10, warmup_steps=40)
    assert ours(schedule, 10) == close([(update + 1) / 40 for update in range(10)])


def test_one_cycle_stays_at_its_end_after_all_updates():
    schedule = Schedule(name="one_cycle", total=20)
    assert [schedule(update) for update in (19, 20, 300)] == close([1 / 25e4] * 3)


# ---- a curve of another length than the training


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "one_cycle"])
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("end_factor", [0.0, 0.1])
def test_a_curve_of_its_own_length_is_that_of_a_training_of_this_length_and_keeps_its_last_rate(
    name, warmup, end_factor
):
    options = {"warmup_steps": warmup, "end_factor": end_factor}
    of_its_own, whole = (
        Schedule(name=name, total=50, total_steps=20, **options),
        Schedule(name=name, total=20, **options),
    )
    assert ours(of_its_own, 20) == ours(whole, 20)
    assert ours(of_its_own, 50)[20:] == [whole(19)] * 30
    assert whole(19) > 0
    assert ours(Schedule(name=name, total=10, total_steps=20, **options), 10) == ours(whole, 10)


@pytest.mark.parametrize("name", ["constant", "step"])
def test_what_has_no_length_is_the_same_with_any(name):
    assert ours(Schedule(name=name, total=50, steps_per_epoch=5, total_steps=20), 60) == ours(
        Schedule(name=name, total=50, steps_per_epoch=5), 60
    )
    assert Schedule(name=name, total=50).same_until(Schedule(name=name, total=20), 20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 7}, {"warmup_share": 0.25}], ids=["none", "steps", "share"])
@pytest.mark.parametrize("end_factor", mainly([0.3], [0.0, 0.3, 1.0]))
@pytest.mark.parametrize("new", [30, 12], ids=["longer", "shorter"])
def test_two_lengths_are_the_same_until_their_rates_differ(name, warmup, end_factor, new):
    begun, changed = (
        Schedule(name=name, total=total, steps_per_epoch=5, end_factor=end_factor, **warmup) for total in (20, new)
    )
    changed = changed.with_warmup_of(begun)
    assert changed.warmup == begun.warmup
    assert changed.length == new
    for updates in range(min(20, new) + 1):
        assert changed.same_until(begun, updates) == (ours(changed, updates) == ours(begun, updates))
    assert changed.same_until(begun.model_copy(update={"total_steps": new, "kept_warmup": begun.warmup}), 20)


def test_a_warm_up_is_kept_only_where_its_share_is_kept():
    begun = Schedule(name="linear", total=20, warmup_share=0.25)
    assert Schedule(name="linear", total=40, warmup_share=0.1).with_warmup_of(begun).warmup == 4
    assert Schedule(name="linear", total=40, warmup_steps=3).with_warmup_of(begun).warmup == 3


# ---- purity


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_depends_on_the_update_alone(name):
    schedule = Schedule(name=name, total=60, steps_per_epoch=10, warmup_steps=7)
    in_order = ours(schedule, 70)
    updates = list(range(70)) * 2
    random.Random(0).shuffle(updates)
    assert [schedule(update) for update in updates] == [in_order[update] for update in updates]
    assert ours(schedule.model_copy(), 70) == in_order


def test_a_schedule_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Schedule(name="linear", total=10).total = 20


# ---- scaled_lr


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)])
def test_the_rate_is_scaled_from_the_reference_batch(scaling, factor):
    assert scaled_lr(0.1, scaling, global_batch=512, reference_batch=32) == pytest.approx(0.1 * factor, rel=1e-15)
    assert scaled_lr(0.1, scaling, global_batch=2, reference_batch=32) == pytest.approx(0.1 / factor, rel=1e-15)


@pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
def test_the_rate_at_the_reference_batch_is_kept(scaling):
    assert scaled_lr(0.37, scaling, global_batch=48, reference_batch=48) == 0.37


# ---- warm-up as a share


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("share", "total", "steps"),
    [(0.1, 200, 20), (0.1, 30, 3), (0.1, 31, 4), (0.3, 10, 3), (0.1, 3, 1), (1.0, 7, 7), (0.0, 9, 0)],
)
def test_a_share_of_warm_up_is_that_many_steps(name, share, total, steps):
    wanted = Schedule(name=name, total=total, steps_per_epoch=4, warmup_steps=steps)
    assert ours(Schedule(name=name, total=total, steps_per_epoch=4, warmup_share=share), total + 2) == ours(
        wanted, total + 2
    )
