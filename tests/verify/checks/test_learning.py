"""Checks of whether anything is learned: on curves, norms and rates that a test makes up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verify.checks import learning
from lockstep.verify.checks.learning import _wrong_norms, _wrong_rates, t_of_slope
from lockstep.verify.constant_baseline import ConstantBaseline
from lockstep.verify.experiments import ExperimentFailed
from lockstep.verify.reference.gradient import GradientComparison
from lockstep.verify.task_probe import TaskProbe
from lockstep.verify.worker_functions import Answer
from lockstep.verify.workers import WorkerEnded
from tests.verify.made_up import bench, seen

FALLING = [4.0 / (step + 1) for step in range(60)]
FLAT = [2.0 + 0.1 * random.Random(seed).gauss(0, 1) for seed in range(60)]


def trivial(**more):
    return ConstantBaseline(
        **{
            "values": {"loss": 1.0, "accuracy": 0.5},
            "before": {"loss": 2.0, "accuracy": 0.2},
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
        wrong += t_of_slope([5.0 + draw.gauss(0, 1) for _ in range(60)]) < learning._SIGNIFICANT
    assert wrong <= 6  # once in 200 by chance


def test_a_slope_below_much_noise_is_found():
    draw = random.Random(1)
    assert t_of_slope([5.0 - 0.05 * step + draw.gauss(0, 0.5) for step in range(60)]) < learning._SIGNIFICANT


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
    verdict = learning.loss(bench({"learned-1": seen(FALLING)}))
    assert verdict.status == "passed"
    assert verdict.curves == {"loss": FALLING}
    assert verdict.value < verdict.bound


def test_a_loss_that_falls_slowly_has_patience():
    verdict = learning.loss(bench({"learned-1": seen(FLAT), "learned-4": seen(FALLING)}))
    assert verdict.status == "passed"
    assert verdict.curves == {"loss": FALLING}


def test_a_loss_that_does_not_fall_is_a_fault():
    verdict = learning.loss(bench({"learned-1": seen(FLAT), "learned-4": seen(FLAT), "trivial": trivial()}))
    assert verdict.status == "fault"
    assert "does not fall" in verdict.reason
    assert (
        learning.loss(
            bench({"learned-1": seen(FLAT), "learned-4": seen(FALLING[::-1]), "trivial": trivial(obstacle="x")})
        ).status
        == "fault"
    )


def test_a_loss_with_nothing_left_to_fall_shows_nothing():
    low = [loss / 100 for loss in FLAT]
    verdict = learning.loss(bench({"learned-1": seen(low), "learned-4": seen(low), "trivial": trivial()}))
    assert verdict.status == "not shown"
    assert "neither falls" in verdict.reason


def test_a_loss_that_explodes_on_the_way_is_a_fault():
    curve = [8.0 - 0.1 * step for step in range(60)]
    assert learning.loss(bench({"learned-1": seen(curve)})).status == "passed"
    verdict = learning.loss(bench({"learned-1": seen([*curve[:20], 17.0, *curve[21:]])}))
    assert verdict.status == "fault"
    assert "oscillates wildly" in verdict.reason
    assert learning.loss(bench({"learned-1": seen([17.0, *curve[1:]])})).status == "passed"


def test_a_loss_that_is_not_finite_is_a_fault():
    curve = [*FALLING[:30], math.nan]
    verdict = learning.loss(bench({"learned-1": seen(curve), "learned-4": seen(curve)}))
    assert verdict.status == "fault"
    assert "not finite" in verdict.reason


# ---- metric


def measured(loss, accuracy, **more):
    after = {"loss": loss, "accuracy": accuracy}
    return learning.metric(
        bench(
            {
                "trivial": trivial(**more),
                "learned-1": seen(FALLING),
                "evaluated-1": after,
                "learned-4": seen(FALLING),
                "evaluated-4": after,
            }
        )
    )


def test_a_model_better_than_a_constant_output_passes():
    verdict = measured(0.5, 0.9)
    assert (verdict.status, verdict.value, verdict.bound, verdict.what) == ("passed", 0.9, 0.5, "accuracy")
    assert verdict.rows[1] == {"metric": "accuracy", "before": 0.2, "after": 0.9, "best constant output": 0.5}


def test_a_model_no_better_than_a_constant_output_is_a_fault():
    assert "no better than a constant output" in measured(1.0, 0.9).reason
    assert measured(math.nan, 0.9).status == "fault"


def test_a_metric_that_contradicts_the_loss_is_a_fault_and_one_that_says_nothing_is_not():
    assert measured(0.5, 0.1).status == "fault"
    assert measured(0.5, 0.5).status == "not shown"
    assert measured(0.5, 0.9, higher_is_better={"accuracy": False}).status == "fault"


def test_without_a_metric_the_loss_decides():
    assert measured(0.5, 0.1, higher_is_better={}).status == "passed"
    assert measured(1.5, 0.1, higher_is_better={}).status == "fault"


def test_what_cannot_be_compared_is_said():
    verdict = measured(0.5, 0.9, obstacle="there is no evaluation data")
    assert verdict.status == "not shown"
    assert verdict.reason.endswith("there is no evaluation data")


# ---- overfit


def overfitted(least=0.0, **curves):
    return learning.overfit(
        bench(
            {"least-loss": least}
            | {f"overfit-{name}": seen(curve) if isinstance(curve, list) else curve for name, curve in curves.items()}
        )
    )


def test_samples_learned_by_heart_pass_with_the_first_learning_rate_that_does_it():
    assert overfitted(**{"1": [2.0, 1.0, 0.1]}).status == "passed"
    verdict = overfitted(**{"1": [2.0, 1.5], "10": [2.0, 9.0], "0.1": [2.0, 0.05]})
    assert verdict.status == "passed"
    assert "x 0.1" in verdict.reason


def test_samples_that_cannot_be_learned_by_heart_are_a_fault():
    verdict = overfitted(**{"1": [2.0, 1.0], "10": [2.0, 1.0], "0.1": [2.0, 1.9]})
    assert verdict.status == "fault"
    assert (verdict.value, verdict.bound) == (pytest.approx(0.95), 0.05)


def test_the_loss_is_counted_from_the_least_there_can_be():
    assert overfitted(1.0, **{"1": [2.0, 1.04]}).status == "passed"
    verdict = overfitted(1.0, **{"1": [2.0, 1.1], "10": [2.0, 1.1], "0.1": [2.0, 1.1]})
    assert verdict.status == "fault"
    assert verdict.notes


def test_a_learning_rate_that_lets_the_loss_explode_is_not_the_last_that_is_tried():
    exploded = Answer(error="the loss is nan", known=True)
    assert overfitted(**{"1": [2.0, 1.5], "10": exploded, "0.1": [2.0, 0.05]}).status == "passed"


# ---- gradients


def update(difference=1e-15, condition=1.0, epsilon=1e-16):
    return GradientComparison({}, difference, 1.0 + difference, "0.weight", condition, epsilon)


def steps(count=4, lr=0.01, **more):
    """What was seen of `count` right steps with a constant learning rate."""
    found = {
        "stop": count,
        "steps_per_epoch": 10,
        "base_lr": lr,
        "norms": [(step, 1.0) for step in range(count)],
        "trainable": {"0.weight": (2, 2)},
    }
    found["rates"] = [(step, lr, lr) for step in range(count)]
    return seen([1.0] * count, **found | more)


def judged(learned=None, updates=None, nature=None, alone=None, **sections):
    accumulated = seen([1.0], updates={0: update(), 6: update()} if updates is None else updates)
    answers = {
        "learned-1": learned or [steps(), steps()],
        "accumulated": accumulated,
        "nature": nature or TaskProbe(epsilon=1e-16),
    }
    answers["one-process"] = alone or seen([1.0], moved=2.0, followed={"weights": 1e-16})
    return learning.gradients(bench(answers, **sections))


def test_right_gradients_pass():
    verdict = judged()
    assert verdict.status == "passed"
    assert "in 2 steps" in verdict.reason
    assert verdict.value == 1e-15


def test_the_update_that_is_furthest_off_counts():
    verdict = judged(updates={0: update(), 6: update(0.01)})
    assert verdict.status == "fault"
    assert "not plain torch's: 0.01 off" in verdict.reason


def test_nan_is_furthest_off():
    assert judged(updates={0: update(), 6: update(math.nan)}).status == "fault"
    assert judged(updates={0: update(math.nan), 6: update()}).status == "fault"


def test_rounding_that_is_amplified_is_allowed():
    assert judged(updates={0: update(1e-11)}).status == "fault"
    assert judged(updates={0: update(1e-11, condition=1e3)}).status == "passed"
    assert judged(updates={0: update(1e-6, epsilon=1e-7)}).status == "passed"


def test_without_an_update_there_is_a_fault():
    assert "no update was made" in judged(updates={}).reason


def test_a_model_that_draws_random_numbers_shows_nothing_but_other_faults():
    random_numbers = TaskProbe(random=["rand"], still_random=["rand"])
    assert judged(updates={0: update(1.0)}, nature=random_numbers).status == "not shown"
    assert judged([steps(modes=[2]), steps()], nature=random_numbers).status == "fault"


def test_a_mean_is_named_as_the_likely_cause():
    assert (
        "returns a mean"
        in judged(updates={0: update(1.0)}, nature=TaskProbe(epsilon=1e-16, means=["loss"], coupling=0.5)).reason
    )


def test_a_step_in_evaluation_mode_is_a_fault_on_any_rank():
    assert "the model was in evaluation mode in step 2" in judged([steps(modes=[3]), steps(modes=[1, 2])]).reason


def test_modules_that_began_in_another_mode_are_named_for_any_rank():
    words = "when training began, modules were not in the mode that model.train() gives them: "
    assert f"{words}norm" in judged([steps(), steps(misled=["norm"])]).reason
    assert f"{words}a, b, c, d, e and others" in judged([steps(misled=list("abcdef")), steps()]).reason


def test_a_parameter_without_gradient_on_all_ranks_is_a_fault():
    assert (
        "1 trainable parameters got no gradient other than zero in 4 steps: b"
        in judged([steps(unused=["a", "b"]), steps(unused=["b"])]).reason
    )
    assert judged([steps(unused=["a"]), steps(unused=["b"])]).status == "passed"


def test_right_norms_are_not_wrong():
    assert _wrong_norms(steps(), bench()) == []
    assert _wrong_norms(steps(norms=[(0, 0.5), (1, 0.3)]), bench(optim={"clip_norm": 0.5})) == []
    assert _wrong_norms(steps(norms=[]), bench()) == []


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_a_norm_of_zero_and_one_that_is_not_finite_are_wrong(norm):
    (text,) = _wrong_norms(steps(norms=[(0, 1.0), (1, norm)]), bench())
    assert "at step 2" in text


def logged(*norms, **more):
    found = steps(len(norms), **more)
    for entry, norm in zip(found.entries, norms, strict=True):
        entry["train/grad_norm"] = norm
    return found


def test_a_norm_is_what_was_logged_or_what_it_was_clipped_to():
    assert _wrong_norms(logged(1.0, 3.0, norms=[(0, 1.0), (1, 2.0)]), bench(optim={"clip_norm": 2.0})) == []
    (text,) = _wrong_norms(logged(1.0, 3.0, norms=[(0, 1.0), (1, 3.0)]), bench(optim={"clip_norm": 2.0}))
    assert "at step 2 the optimizer got a gradient of norm 3, after 2 was logged (clipped to 2.0)" in text
    (text,) = _wrong_norms(logged(1.0, 3.0, norms=[(0, 1.0), (1, 2.5)]), bench())
    assert "of norm 2.5, after 3 was logged" in text
    assert _wrong_norms(logged(1.0, 3.0, norms=[(0, 1.0005), (1, 3.0)]), bench()) == []
    (text,) = _wrong_norms(steps(norms=[(0, 0.6)]), bench(optim={"clip_norm": 0.5}))
    assert "norm 0.6" in text


def test_a_skipped_step_has_no_norm_and_shifts_none():
    assert _wrong_norms(logged(1.0, 3.0, 2.0, norms=[(0, 1.0), (2, 2.0)]), bench()) == []


def test_rates_of_the_schedule_are_right():
    assert _wrong_rates(steps(), bench()) == []
    cosine = [(step, 0.01 * (1 + math.cos(math.pi * step / 4)) / 2, 0.01) for step in range(4)]
    assert _wrong_rates(steps(rates=cosine), bench(schedule={"name": "cosine"})) == []
    assert _wrong_rates(steps(lr=0.02), bench(optim={"lr_scaling": "linear", "reference_batch": 12})) == []


def test_a_rate_that_is_not_the_schedules_is_wrong():
    (text,) = _wrong_rates(steps(), bench(schedule={"name": "linear"}))
    assert "update 2 was made with a learning rate of 0.01; the schedule says 0.0075" in text


def test_an_update_that_was_counted_twice_or_not_at_all_is_wrong():
    assert _wrong_rates(steps(rates=[(0, 0.01, 0.01), (0, 0.01, 0.01), (1, 0.01, 0.01), (2, 0.01, 0.01)]), bench())
    (text,) = _wrong_rates(steps(rates=[(step, 0.01, 0.01) for step in range(3)]), bench())
    assert "4 steps, of which 0 were skipped, made 3 updates" in text
    (text,) = _wrong_rates(steps(rates=[(step, 0.01, 0.01) for step in range(5)]), bench())
    assert "made 5 updates" in text


def test_skipped_steps_make_no_updates():
    found = steps(rates=[(step, 0.01, 0.01) for step in range(3)])
    found.entries[-1]["train/skipped"] = 1
    assert _wrong_rates(found, bench()) == []


def test_a_base_rate_that_was_not_scaled_is_wrong():
    (text,) = _wrong_rates(steps(), bench(optim={"lr_scaling": "linear", "reference_batch": 12}))
    assert "the base learning rate is 0.01; lr 0.01 scaled to a global batch of 24 is 0.02" in text


def test_groups_with_rates_of_their_own_are_measured_by_those():
    groups = [{"name": "biases", "match": ["*bias"], "lr": 0.5}]
    assert _wrong_rates(steps(lr=0.5), bench(optim={"groups": groups})) == []
    assert _wrong_rates(steps(rates=[(step, 0.4, 0.5) for step in range(4)]), bench(optim={"groups": groups}))


# ---- predictions


def described(plain, engine=None, precision="fp32", **more):
    """plain, engine: rows by a plain loop, and those of all ranks, which lack the truth."""
    if engine is None:
        engine = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    answers = {
        "learned-1": seen(FALLING),
        "trivial": trivial(**more),
        "predicted-by-hand": [plain],
        "predicted": [engine],
    }
    return learning.predictions(bench(answers, precision=precision))


def rows(predictions, truths):
    return [
        {"truth": t, "prediction": p, "probability": place / 50}
        for place, (p, t) in enumerate(zip(predictions, truths, strict=True))
    ]


def test_different_predictions_pass():
    verdict = described(rows([0, 1, 1], [0, 1, 0]))
    assert (verdict.status, verdict.value) == ("passed", 2.0)
    assert verdict.rows[1] == {"sample": 1, "truth": 1, "prediction": 1, "probability": 0.02}


def test_predictions_that_are_drawn_show_nothing():
    answers = {"learned-1": seen(FALLING), "trivial": trivial(), "nature": TaskProbe(predicting=["multinomial"])}
    verdict = learning.predictions(bench(answers))
    assert verdict.status == "not shown"
    assert "Task.predict draws random numbers (multinomial)" in verdict.reason


def test_all_predicted_alike_where_truths_differ_is_a_fault():
    assert described(rows([1, 1, 1], [0, 1, 0])).status == "fault"
    assert described(rows([1, 1, 1], [1, 1, 1])).status == "passed"


def test_predictions_that_are_not_those_of_a_plain_loop_are_a_fault():
    plain = rows([0, 1, 0, 1], [0, 1, 0, 1])
    engine = [{"prediction": one, "probability": place / 50} for place, one in enumerate([0, 0, 1, 1])]
    verdict = described(plain, engine)
    assert verdict.status == "fault"
    assert verdict.reason.startswith("2 of 4 predictions, 4 made, are not those of a plain loop. sample 1 alone is")
    assert (
        described(plain, [row | {"prediction": one} for row, one in zip(engine, [0, 1, 0, 1], strict=True)]).status
        == "passed"
    )


def test_predictions_that_are_lacking_or_too_many_are_a_fault():
    plain = rows([0, 1, 0, 1], [0, 1, 0, 1])
    whole = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    for engine in (whole[:3], [*whole, whole[0]], []):
        assert described(plain, engine).status == "fault"


def test_a_few_predictions_may_be_on_the_edge_and_numbers_are_compared_to_rounding():
    plain = rows([place % 2 for place in range(40)], [place % 2 for place in range(40)])
    engine = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    engine[7]["prediction"], engine[9]["prediction"] = 5, 5
    assert described(plain, engine).status == "passed"
    engine[11]["prediction"] = 5
    assert described(plain, engine).status == "fault"
    near = [{"prediction": row["prediction"], "probability": row["probability"] + 0.01} for row in plain]
    assert described(plain, near).status == "fault"
    assert described(plain, near, precision="bf16").status == "passed"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": [0.5, 1], "truth": 3}, {"a": [0.5001, 1]}, True),
        ({"a": [0.5, 1]}, {"a": [0.6, 1]}, False),
        ({"a": [0.5]}, {"a": [0.5, 0.5]}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": math.nan}, {"a": math.nan}, True),
        ({"a": "cat"}, {"a": "dog"}, False),
        ({"a": {"b": 1.0}}, {"a": {"b": 1.0}}, True),
    ],
)
def test_descriptions_are_alike_to_rounding(one, other, same):
    assert learning._alike(one, other, 1e-3) is same


def test_nothing_to_predict_shows_nothing():
    assert "no evaluation data" in described([], no_data=True).reason
    assert "no predict" in described([], no_predict=True).reason


def test_only_some_rows_are_shown():
    assert len(described(rows(range(40), range(40))).rows) == 12


# ---- the bench


def test_a_rank_that_ended_or_failed_is_a_failed_trial():
    made = bench(
        {
            "dead": [1, 2],
            "failed": [Answer(1), Answer(error="oh no")],
            "refused": [Answer(error="no way", known=True, refused=True)],
        }
    )
    made._answers["dead"][1] = WorkerEnded(1, -9)
    with pytest.raises(ExperimentFailed, match="dead: the process of rank 1 ended with exit code -9"):
        made.ask("dead", 2, None)
    with pytest.raises(ExperimentFailed, match="failed: oh no") as caught:
        made.ask("failed", 2, None)
    assert not caught.value.refused
    with pytest.raises(ExperimentFailed) as caught:
        made.ask("refused", 1, None)
    assert (caught.value.refused, caught.value.error) == (True, "no way")
    assert made.done == {"dead", "failed", "refused", "nature"}


def test_a_short_training_is_the_users_but_for_its_length():
    made = bench(
        schedule={"name": "cosine", "warmup_steps": 100},
        checkpoint={"every_steps": 7},
        parallel={"strategy": "single"},
        precision="bf16",
    )
    config = made.natural(train__steps=20, batch__micro=5)
    assert config["train"]["steps"] == 20
    assert config["schedule"]["warmup_steps"] == 5
    assert config["batch"] == {"global": 24, "micro": 5, "per_rank": None, "accumulate": None}
    assert (config["checkpoint"]["every_steps"], config["log"]["every_steps"]) == (0, 1)
    assert (config["parallel"]["strategy"], config["precision"], config["optim"]["lr"]) == ("ddp", "bf16", 0.01)
    assert made.exact()["precision"] == "fp32"
    assert made.config["schedule"]["warmup_steps"] == 100
    assert made.config["precision"] == "bf16"


def test_epochs_end_within_few_steps_and_micro_batches_are_uneven():
    for batch in (4, 20, 24, 32, 100):
        for nproc in (1, 2, 3):
            made = bench(batch={"global": batch}, nproc=nproc)
            assert 4 * batch < made.part < 5 * batch
            assert 1 <= made.small_micro < batch
            assert made.part % batch


def test_weights_that_torch_would_have_moved_elsewhere_are_a_fault():
    found = judged(alone=seen([1.0], moved=2.0, followed={"weights": 1e-16, "averages": 0.02}))
    assert found.status == "fault"
    assert "averages are not those of a new torch.optim.AdamW: 0.01 of what training moved" in found.reason
    assert judged(alone=seen([1.0], moved=2.0, followed={"weights": math.nan})).status == "fault"


def test_what_trains_against_the_config_is_a_fault():
    found = judged(alone=seen([1.0], moved=2.0, wrongly=["body trains in step 1, against train.unfreeze"]))
    assert found.status == "fault"
    assert "body trains in step 1" in found.reason
