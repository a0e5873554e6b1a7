"""Checks of whether anything is learned, on curves that a test makes up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_lab.verify.checks import learning
from lockstep_lab.verify.checks.learning import t_of_slope
from lockstep_lab.verify.constant_baseline import ConstantBaseline
from lockstep_lab.verify.task_probe import TaskProbe
from packages.lab.tests.verify.made_up import experiments, recording

FALLING = [4.0 / (step + 1) for step in range(60)]
FLAT = [2.0 + 0.1 * random.Random(seed).gauss(0, 1) for seed in range(60)]


def baseline(**more):
    return ConstantBaseline(
        **{
            "values": {"loss": 1.0, "accuracy": 0.5},
            "untrained": {"loss": 2.0, "accuracy": 0.2},
            "higher_is_better": {"accuracy": True},
        }
        | more
    )


# ---- the slope


def test_a_falling_curve_has_a_negative_slope_beyond_chance_and_a_rising_one_a_positive():
    assert t_of_slope(FALLING) < -2.6
    assert t_of_slope(FALLING[::-1]) == pytest.approx(-t_of_slope(FALLING))


def test_the_slope_is_that_of_a_linear_regression():
    curve = [3.0, 2.5, 2.9, 2.0, 1.9, 1.0]
    # By hand: mean 13.3 / 6, sum of (x - 2.5) * y = -6.35, spread 17.5.
    slope = -6.35 / 17.5
    rest = sum((y - 13.3 / 6 - slope * (x - 2.5)) ** 2 for x, y in enumerate(curve)) / 4
    assert t_of_slope(curve) == pytest.approx(slope / math.sqrt(rest / 17.5))


def test_noise_without_a_slope_is_not_significant():
    wrong = 0
    for seed in range(300):
        draw = random.Random(seed)
        wrong += learning._slope([5.0 + draw.gauss(0, 1) for _ in range(60)]) < learning._SIGNIFICANT_T
    assert wrong <= 6  # once in 200 by chance


def test_a_slope_below_much_noise_is_found():
    draw = random.Random(1)
    assert t_of_slope([5.0 - 0.05 * step + draw.gauss(0, 0.5) for step in range(60)]) < learning._SIGNIFICANT_T


def test_a_slope_below_a_few_huge_losses_is_found():
    draw = random.Random(3)
    curve = [5.0 - 0.02 * step + draw.gauss(0, 0.5) + 90 * (step % 17 == 5) for step in range(120)]
    assert t_of_slope(curve) > learning._SIGNIFICANT_T > learning._slope(curve)
    assert learning._slope([*curve, math.inf]) == 0


@given(st.floats(-1e6, 1e6), st.integers(0, 100))
def test_a_constant_curve_does_not_fall(value, count):
    assert t_of_slope([value] * count) >= 0.0


def test_an_exact_line_is_infinitely_sure():
    assert t_of_slope([4.0, 3.0, 2.0, 1.0, 0.0]) < -1e6
    assert t_of_slope([0.0, 1.0, 2.0, 3.0, 4.0]) > 1e6


@pytest.mark.parametrize(
    "curve", [[], [1.0], [2.0, 1.0], [3.0, 2.0, 1.0], [4.0, math.nan, 2.0, 1.0, 0.0], [math.inf, 3.0, 2.0, 1.0, 0.0]]
)
def test_too_few_points_and_those_that_are_not_finite_say_nothing(curve):
    assert t_of_slope(curve) == 0.0


# ---- loss


def test_a_loss_that_falls_passes_at_once():
    result = learning.loss(experiments({"learned-1": recording(FALLING)}))
    assert result.status == "passed"
    assert result.curves == {"loss": FALLING}
    assert result.value < result.bound


def test_a_loss_that_falls_slowly_has_patience():
    result = learning.loss(experiments({"learned-1": recording(FLAT), "learned-4": recording(FALLING)}))
    assert result.status == "passed"
    assert result.curves == {"loss": FALLING}


def test_a_loss_that_does_not_fall_is_a_fault():
    result = learning.loss(
        experiments({"learned-1": recording(FLAT), "learned-4": recording(FLAT), "baseline": baseline()})
    )
    assert result.status == "fault"
    assert "does not fall" in result.reason
    assert (
        learning.loss(
            experiments(
                {
                    "learned-1": recording(FLAT),
                    "learned-4": recording(FALLING[::-1]),
                    "baseline": baseline(obstacle="x"),
                }
            )
        ).status
        == "fault"
    )


def test_a_loss_that_falls_from_epoch_to_epoch_passes_where_steps_differ_more():
    of_steps = [15.0, 5.0, 13.0, 7.0, 10.0]  # what the samples of a step make of its loss, in each epoch
    order = [random.Random(epoch).sample(of_steps, 5) for epoch in range(12)]
    curve = [loss + 2.0 / (1 + epoch) ** 2 for epoch in range(12) for loss in order[epoch]]
    flat = [loss for epoch in range(12) for loss in order[epoch]]
    for losses, status in ((curve, "passed"), (flat, "fault")):
        answers = {name: recording(losses, steps_per_epoch=5) for name in ("learned-1", "learned-4")}
        result = learning.loss(experiments(answers | {"baseline": baseline()}))
        assert result.status == status
    result = learning.loss(experiments({"learned-1": recording(curve, steps_per_epoch=5)}))
    assert result.reason == "falls from 12 to 10.01, the means of 12 epochs; steps differ more"
    assert result.value < -10


@pytest.mark.parametrize(
    "means", [[1.0] * 8, [2.0, 1.0, 1.0], [1.0, *[0.999] * 7], [2.0, *[1.0, 1.9] * 4], [math.nan] * 9]
)
def test_epochs_that_are_alike_too_few_or_too_different_do_not_fall(means):
    assert learning.t_of_epochs(means) > learning._T_OF_EPOCHS


def test_a_loss_with_nothing_left_to_fall_shows_nothing():
    low = [loss / 100 for loss in FLAT]
    result = learning.loss(
        experiments({"learned-1": recording(low), "learned-4": recording(low), "baseline": baseline()})
    )
    assert result.status == "not shown"
    assert "does not fall, but is already low" in result.reason


def test_a_loss_that_explodes_on_the_way_is_a_fault():
    curve = [8.0 - 0.1 * step for step in range(60)]
    assert learning.loss(experiments({"learned-1": recording(curve)})).status == "passed"
    result = learning.loss(experiments({"learned-1": recording([*curve[:20], 17.0, *curve[21:]])}))
    assert result.status == "fault"
    assert "oscillates wildly" in result.reason
    assert learning.loss(experiments({"learned-1": recording([17.0, *curve[1:]])})).status == "passed"


def test_steps_that_differ_from_the_beginning_are_no_explosion():
    """As where few steps have units of a head, or batches are tiny."""
    curve = [step_loss + 9.0 * (step % 6 == 5) / (1 + step / 30) for step, step_loss in enumerate(FALLING)]
    assert learning.loss(experiments({"learned-1": recording(curve, steps_per_epoch=6)})).status == "passed"
    exploded = [1.6, *(1000.0 / step for step in range(1, 60))]
    assert not learning._are_calm(learning._means_of_epochs(exploded, 6), exploded[0])


def test_a_loss_that_is_not_finite_is_a_fault():
    curve = [*FALLING[:30], math.nan]
    result = learning.loss(experiments({"learned-1": recording(curve), "learned-4": recording(curve)}))
    assert result.status == "fault"
    assert "not finite" in result.reason


# ---- metric


def measured(loss, accuracy, probe=None, **more):
    after = {"loss": loss, "accuracy": accuracy}
    return learning.metric(
        experiments(
            {
                "baseline": baseline(**more),
                "task-probe": probe or TaskProbe(epsilon=1e-16),
                "learned-1": recording(FALLING),
                "evaluated-1": after,
                "learned-4": recording(FALLING),
                "evaluated-4": after,
            }
        )
    )


def test_a_model_better_than_a_constant_output_passes():
    result = measured(0.5, 0.9)
    assert (result.status, result.value, result.bound, result.what) == ("passed", 0.9, 0.5, "accuracy")
    assert result.rows[1] == {"metric": "accuracy", "before": 0.2, "after": 0.9, "best constant output": 0.5}


def test_a_model_no_better_than_a_constant_output_is_a_fault():
    assert "no better than a constant output" in measured(1.0, 0.9).reason
    assert measured(math.nan, 0.9).status == "fault"


def test_a_loss_without_labels_that_a_constant_output_solves_shows_nothing():
    values = {"values": {"loss": 0.0, "accuracy": 0.5}}
    assert measured(0.1, 0.9, **values).status == "fault"
    result = measured(0.1, 0.9, probe=TaskProbe(without_labels=True), **values)
    assert result.status == "not shown"
    assert "a constant output has almost no loss" in result.reason
    assert measured(1.5, 0.9, probe=TaskProbe(without_labels=True)).status == "fault"


def test_few_evaluation_samples_show_nothing_where_the_model_is_worse():
    def after(samples, loss, losses=FALLING, accuracy=0.9, later=None):
        results = {"loss": loss, "accuracy": accuracy, "samples": samples}
        made = {"evaluated-1": results, "evaluated-4": results}
        made |= {"learned-1": recording(losses), "learned-4": recording(later or losses)}
        return learning.metric(experiments({"baseline": baseline(), **made}))

    result = after(6, 1.5)
    assert result.status == "not shown"
    assert "6 evaluation samples are too few to decide whether it beats a constant output: loss 1.5" in result.reason
    assert after(6, 0.5).status == "passed"
    assert after(6, 0.5, accuracy=0.1).status == "fault"
    assert after(6, 1.5, FLAT).status == "fault"
    assert after(6, 1.5, FLAT, later=FALLING).status == "not shown"
    assert after(6, math.nan).status == "fault"
    assert after(20, 1.5).status == "fault"


def test_a_metric_that_contradicts_the_loss_is_a_fault_and_one_that_says_nothing_is_not():
    assert measured(0.5, 0.1).status == "fault"
    assert measured(0.5, 0.5).status == "not shown"
    assert measured(0.5, 0.9, higher_is_better={"accuracy": False}).status == "fault"


def test_a_metric_within_chance_of_a_constant_output_shows_nothing():
    """The standard error of a share of 0.5 over 360 samples is 0.026."""
    for accuracy in (0.45, 0.5, 0.56):
        result = measured(0.5, accuracy, units=360.0)
        assert result.status == "not shown"
        assert "is within chance of the best constant output, 0.5: on 360 evaluation labels" in result.reason
        assert "chance may reach 0.5685" in result.reason
    assert measured(0.5, 0.6, units=360.0).status == "passed"
    assert "(by chance up to 0.5685)" in measured(0.5, 0.6, units=360.0).reason
    assert measured(0.5, 0.4, units=360.0).status == "fault"


def test_without_a_metric_the_loss_decides():
    assert measured(0.5, 0.1, higher_is_better={}).status == "passed"
    assert measured(1.5, 0.1, higher_is_better={}).status == "fault"


def test_without_a_loss_in_evaluations_the_metrics_decide():
    """With Task.embed, an evaluation has no loss."""

    def after(accuracy, higher_is_better):
        values = {"values": {"accuracy": 0.5}, "higher_is_better": higher_is_better}
        made = {name: {"accuracy": accuracy} for name in ("evaluated-1", "evaluated-4")}
        made |= {name: recording(FALLING) for name in ("learned-1", "learned-4")}
        return learning.metric(experiments({"baseline": baseline(**values), **made}))

    assert after(0.9, {"accuracy": True}).status == "passed"
    result = after(0.1, {"accuracy": True})
    assert result.status == "fault"
    assert ", but accuracy is 0.1 against 0.5" in result.reason
    assert "no metric has a known direction" in after(0.9, {}).reason
    flat = {"learned-1": recording(FLAT), "learned-4": recording(FLAT), "baseline": baseline(values={"samples": 9.0})}
    assert learning.loss(experiments(flat)).status == "fault"


def test_what_cannot_be_compared_is_said():
    result = measured(0.5, 0.9, obstacle="there is no evaluation data")
    assert result.status == "not shown"
    assert result.reason.endswith("there is no evaluation data")
