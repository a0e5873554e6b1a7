"""How far two trainings are apart, on checkpoints that the trainer wrote."""

import dataclasses
import math

import pytest
import torch

from lockstep_lab.verify.compare import (
    TrainingDifference,
    _norm_of_difference,
    curve_difference,
    difference,
    differing_names,
    first_difference,
    is_too_large,
    rounding_bound,
)
from lockstep_lab.verify.reference.checkpoint import newest
from tests import runs
from tests.core.checkpoint.cases import commit
from tests.own_tasks import Masked

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
NO_NOISE = TrainingDifference(0.0, "", 0.0)


def read(state):
    return dict(state.read(state.names))


def trained(folder, steps=3, **sections):
    runs.fit(Masked(60), runs.config(train={"steps": steps}, checkpoint={"every_steps": 2}, **sections), folder)
    return newest(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of the same training, and a third with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    return trained(folder / "one"), trained(folder / "two"), trained(folder / "other", seed=1)


def altered(checkpoint, folder, change, **more):
    """A checkpoint with the tensors of another after `change`, and its manifest and values changed by `more`."""
    tensors = read(checkpoint)
    change(tensors)
    manifest = {key: value for key, value in checkpoint.manifest.items() if key in ("skipped", "loss_scale", "metrics")}
    commit(
        folder / "checkpoints",
        more.pop("step", checkpoint.step),
        [tensors],
        checkpoint.values | more.pop("values", {}),
        **manifest | more,
    )
    return newest(folder)


def unchanged(tensors):
    pass


def test_the_newest_checkpoint_is_the_one_of_the_last_step(pair, tmp_path):
    assert pair[0].step == 3
    assert newest(pair[0].path.parents[1]).step == 3
    assert newest(str(tmp_path)) is None


def test_equal_runs_differ_in_nothing(pair):
    one, two, _ = pair
    assert one.path != two.path
    found = difference(one, two, NAMES, moved=1.0, losses=[1.0, 0.5], other_losses=[1.0, 0.5])
    assert (found.weights, found.losses, found.missing, found.largest) == (0.0, 0.0, (), 0.0)
    assert differing_names(one, two) == []


def test_another_seed_is_far_away_and_the_worst_tensor_is_named(pair):
    one, _, other = pair
    found = difference(one, other, NAMES, moved=2.0, losses=[1.0], other_losses=[1.0])
    apart = {name: float((read(one)[f"model.{name}"] - read(other)[f"model.{name}"]).norm()) for name in NAMES}
    assert found.worst == max(apart, key=apart.get)
    assert found.weights == pytest.approx(max(apart.values()) / 2.0, rel=1e-12)
    assert found.largest == found.weights
    assert {f"model.{name}" for name in NAMES} <= set(differing_names(one, other))


def test_a_flipped_bit_is_found_by_name(pair, tmp_path):
    def flip(tensors):
        tensors["optimizer.2.bias.exp_avg"].view(torch.int64)[0] ^= 1

    other = altered(pair[0], tmp_path, flip)
    assert differing_names(pair[0], altered(pair[0], tmp_path / "same", unchanged)) == []
    assert differing_names(pair[0], other) == ["optimizer.2.bias.exp_avg"]
    assert differing_names(other, pair[0]) == ["optimizer.2.bias.exp_avg"]
    assert difference(pair[0], other, NAMES, moved=1.0, losses=[], other_losses=[]).largest == 0.0  # parameters alone


def test_minus_zero_and_another_dtype_are_not_the_same(pair, tmp_path):
    def zero(tensors):
        tensors["model.2.bias"] = torch.zeros(5, dtype=torch.float64)

    def minus(tensors):
        tensors["model.2.bias"] = -torch.zeros(5, dtype=torch.float64)

    def single(tensors):
        tensors["model.2.bias"] = torch.zeros(5, dtype=torch.int64)  # the same bits

    def shaped(tensors):
        tensors["model.2.bias"] = torch.zeros(5, 1, dtype=torch.float64)

    first = altered(pair[0], tmp_path / "zero", zero)
    for number, change in enumerate((minus, single, shaped)):
        assert differing_names(first, altered(pair[0], tmp_path / str(number), change)) == ["model.2.bias"]


def test_the_same_nan_is_the_same_bits_but_no_distance(pair, tmp_path):
    def spoil(tensors):
        tensors["model.0.bias"][1] = math.nan

    one, two = altered(pair[0], tmp_path / "one", spoil), altered(pair[0], tmp_path / "two", spoil)
    assert differing_names(one, two) == []
    found = difference(one, two, NAMES, moved=1.0, losses=[1.0], other_losses=[1.0])
    assert (found.weights, found.worst) == (math.inf, "0.bias")
    assert difference(pair[0], two, NAMES, moved=1.0, losses=[1.0], other_losses=[1.0]).largest == math.inf


def test_a_missing_tensor_is_named_and_infinitely_far(pair, tmp_path):
    other = altered(pair[0], tmp_path, lambda tensors: tensors.pop("model.0.weight"))
    for one, two in ((pair[0], other), (other, pair[0])):
        found = difference(one, two, NAMES, moved=1.0, losses=[1.0], other_losses=[1.0])
        assert found.missing == ("model.0.weight",)
        assert found.largest == math.inf
        assert differing_names(one, two) == ["model.0.weight"]
    assert difference(pair[0], pair[1], [*NAMES, "no such"], moved=1.0, losses=[], other_losses=[]).missing == (
        "model.no such",
    )


def test_another_step_and_another_plain_value_are_named(pair, tmp_path):
    assert differing_names(pair[0], altered(pair[0], tmp_path / "step", unchanged, step=4)) == ["step"]
    assert differing_names(pair[0], altered(pair[0], tmp_path / "skipped", unchanged, skipped=1)) == ["skipped"]
    assert differing_names(pair[0], altered(pair[0], tmp_path / "scale", unchanged, loss_scale=2.0)) == ["loss_scale"]
    assert differing_names(
        pair[0], altered(pair[0], tmp_path / "value", unchanged, values={"optimizer.0.bias.seen": 3})
    ) == ["optimizer.0.bias.seen"]


def test_weights_are_measured_by_what_training_moved(pair):
    near, far = (
        difference(pair[0], pair[2], NAMES, moved=moved, losses=[], other_losses=[]).weights for moved in (1.0, 10.0)
    )
    assert near == pytest.approx(10 * far)
    assert difference(pair[0], pair[2], NAMES, moved=0.0, losses=[], other_losses=[]).weights == near


def test_losses_count_where_they_are_further_apart_than_weights(pair):
    found = difference(pair[0], pair[1], NAMES, moved=1.0, losses=[4.0, 2.0], other_losses=[4.0, 1.0])
    assert found.losses == found.largest == 0.25


def test_curves_are_measured_by_their_largest_value():
    assert curve_difference([2.0, -8.0], [2.0, -6.0]) == 0.25
    assert curve_difference([2.0, -6.0], [2.0, -8.0]) == 0.25
    assert curve_difference([], []) == 0.0
    assert curve_difference([0.0], [0.0]) == 0.0
    assert curve_difference([1.0], [1.0, 1.0]) == math.inf
    assert curve_difference([1.0, math.nan], [1.0, math.nan]) == math.inf
    assert curve_difference([1.0, math.inf], [1.0, 2.0]) == math.inf


def test_the_first_step_beyond_the_bound_is_found():
    assert first_difference([8.0, 4.0, 2.0], [8.0, 4.5, 1.0], 0.1) == 2
    assert first_difference([8.0, 4.0, 2.0], [8.0, 4.5, 1.0], 0.05) == 1
    assert first_difference([8.0, 4.0, 2.0], [8.0, 4.5, 1.0], 0.2) is None
    assert first_difference([], [], 0.0) is None


def test_a_loss_that_is_not_finite_is_the_first_step_apart():
    for bad in (math.nan, math.inf):
        assert first_difference([1.0, 2.0, bad], [1.0, 2.0, 3.0], 1e-6) == 2
        assert first_difference([1.0, 2.0, 3.0], [1.0, 2.0, bad], 1e-6) == 2
    assert first_difference([1.0, 2.0, 3.0], [1.0, math.nan, 3.0], math.nan) is not None


def test_the_bound_is_thirty_times_the_noise_and_never_below_random_rounding():
    assert rounding_bound(TrainingDifference(1e-6, "a", 0.0), epsilon=1e-16, steps=4) == pytest.approx(3e-5)
    assert rounding_bound(TrainingDifference(0.0, "a", 1e-6), epsilon=1e-16, steps=4) == pytest.approx(3e-5)
    assert rounding_bound(NO_NOISE, epsilon=1e-7, steps=4) == pytest.approx(6e-6)
    assert rounding_bound(NO_NOISE, epsilon=1e-7, steps=400) == pytest.approx(6e-5)
    assert rounding_bound(dataclasses.replace(NO_NOISE, missing=("a",)), epsilon=1e-7, steps=4) == math.inf


def test_a_bound_in_which_a_fault_could_hide_is_too_vague():
    assert not is_too_large(1e-2)
    assert is_too_large(1.1e-2)
    assert is_too_large(math.inf)
    assert is_too_large(math.nan)


def test_imaginary_parts_are_compared():
    first, second = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j, 3 + 3j])
    assert _norm_of_difference(first, second) == pytest.approx(4.0)
