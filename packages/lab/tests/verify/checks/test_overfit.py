"""The check of whether a few samples can be overfitted, on curves that a test makes up."""

import random

import pytest

from lockstep_lab.verify.checks import learning, overfit
from lockstep_lab.verify.experiments import ExperimentFailed
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from packages.lab.tests.verify.made_up import experiments, recording

FLAT = [2.0 + 0.1 * random.Random(seed).gauss(0, 1) for seed in range(60)]


def overfitted(least=0.0, constant=2.0, trained=1.9, probe=None, **curves):
    """constant, trained: losses of the best constant output and of the trained model, or lists of them by draw."""
    losses = {"constant": constant, "trained": trained}
    listed = {name: one if isinstance(one, list) else [one] for name, one in losses.items() if one is not None}
    return overfit.overfit(
        experiments(
            {"least-loss": least, "losses-by-draw": listed, "task-probe": probe or TaskProbe(epsilon=1e-16)}
            | {
                f"overfit-{name if '-' in name else f'{name}-240'}": recording(curve)
                if isinstance(curve, list)
                else curve
                for name, curve in curves.items()
            }
        )
    )


def test_samples_learned_by_heart_pass_with_the_first_learning_rate_that_does_it():
    assert overfitted(**{"1": [2.0, 1.0, 0.1]}).status == "passed"
    result = overfitted(**{"1": [2.0, 1.5], "10": [2.0, 9.0], "0.1": [2.0, 0.05]})
    assert result.status == "passed"
    assert "x 0.1" in result.reason


def test_samples_that_cannot_be_learned_by_heart_are_a_fault():
    result = overfitted(**{"1": [2.0, 1.0], "10": [2.0, 1.0], "0.1": [2.0, 1.9]})
    assert result.status == "fault"
    assert (result.value, result.bound) == (pytest.approx(0.05), 0.5)  # of the best constant output's loss
    assert "Likely cause: a part of the model that has no effect" in result.reason
    assert "or a loss with a floor above zero" in result.reason


def test_a_loss_that_still_falls_gets_more_steps_before_the_model_is_accused():
    falls = [2.0 * 0.99**step for step in range(240)]  # 9 % is left
    stuck = {"10": [2.0, 1.9], "0.1": [2.0, 1.9]}
    result = overfitted(**{"1": falls, "1-960": [*falls, 0.09], **stuck})
    assert result.status == "passed"
    assert "in 241 steps, with optim.lr x 1" in result.reason
    result = overfitted(**{"1": falls, "1-960": [2.0, 0.12], **stuck})
    assert result.status == "fault"
    for still in ([2.0] * 120 + [0.2] * 120, [2.0 - 0.004 * step for step in range(240)]):  # flat; far away
        assert overfitted(**{"1": still, **stuck}).status == "fault"


def test_the_loss_is_counted_from_the_least_there_can_be():
    assert overfitted(1.0, **{"1": [2.0, 1.04]}).status == "passed"
    result = overfitted(1.0, **{"1": [2.0, 1.1], "10": [2.0, 1.1], "0.1": [2.0, 1.1]})
    assert result.status == "fault"
    assert result.notes


def test_a_learning_rate_that_lets_the_loss_explode_is_not_the_last_that_is_tried():
    exploded = Answer(error="the loss is nan", known=True)
    assert overfitted(**{"1": [2.0, 1.5], "10": exploded, "0.1": [2.0, 0.05]}).status == "passed"
    assert overfitted(**{"1": exploded, "10": exploded, "0.1": [2.0, 0.05]}).status == "passed"
    result = overfitted(**{"1": exploded, "10": exploded, "0.1": [2.0, 1.0]})
    assert result.status == "fault"
    assert list(result.curves) == ["loss, optim.lr x 0.1"]


def test_a_loss_that_explodes_with_each_learning_rate_and_a_crash_are_failures():
    exploded, crashed = Answer(error="the loss is nan", known=True), Answer(error="KeyError: 3")
    with pytest.raises(ExperimentFailed, match="the loss is nan"):
        overfitted(**{"1": exploded, "10": exploded, "0.1": exploded})
    with pytest.raises(ExperimentFailed, match="KeyError"):
        overfitted(**{"1": crashed, "10": [2.0, 0.05]})


def test_the_learning_rate_of_the_few_samples_is_that_of_the_training(monkeypatch):
    """A recipe for thousands of samples per step may give the learning rate of such a step."""
    rates = []

    def train(self, name, world, config, **more):
        optim = config["optim"]
        rates.append((optim["lr"], optim["lr_scaling"]))
        assert [group["lr"] for group in optim["groups"]] == [pytest.approx(0.1 * made.global_batch / 1024), None]
        return [recording([2.0, 1.0])]

    made = experiments({"least-loss": 0.0, "losses-by-draw": {"trained": [1.0], "constant": [2.0]}})
    monkeypatch.setattr(type(made), "train", train)
    groups = [{"name": "slow", "match": ["a.*"], "lr": 0.1}, {"name": "norms", "match": ["b.*"], "lr": None}]
    made.config["optim"] |= {"groups": groups, "lr": 1.6, "lr_scaling": "linear", "reference_batch": 1024}
    overfit.overfit(made)
    rate = 1.6 * made.global_batch / 1024
    assert [scaling for _, scaling in rates] == ["none"] * 3
    assert [rate for rate, _ in rates] == pytest.approx([rate, 10 * rate, 0.1 * rate])


# ---- a loss with a floor, or with random numbers


def test_a_loss_far_below_that_of_a_constant_output_may_have_a_floor():
    stuck = {"1": [2.0, 0.7], "10": [2.0, 0.7], "0.1": [2.0, 0.7]}
    assert overfitted(trained=0.7, **stuck).status == "not shown"  # labels may contradict each other
    result = overfitted(trained=0.7, probe=TaskProbe(compares_samples="with matmul"), **stuck)
    assert (result.status, result.value, result.bound) == ("passed", pytest.approx(0.65), 0.5)
    assert result.reason.endswith("A floor above zero may be the reason for the rest")
    assert overfitted(trained=1.95, probe=TaskProbe(compares_samples="with matmul"), **stuck).status == "fault"
    assert overfitted(constant=None, trained=0.7, **stuck).status == "fault"


def test_a_loss_below_zero_must_beat_a_constant_output():
    """Such as a likelihood, whose least value is not known: no share of it can be left."""
    for curve in ([-1.0, -3.0], [2.0, -3.0]):
        falls = {"1": curve, "10": curve, "0.1": curve}
        assert overfitted(constant=-1.0, trained=-3.0, **falls).status == "passed"
        assert overfitted(constant=-3.0, trained=-3.0, **falls).status == "fault"


NOISE = [0.1 * random.Random(seed).gauss(0, 1) for seed in range(32)]


@pytest.mark.parametrize(
    ("trained", "names", "status"),
    [
        ([0.5 + noise for noise in NOISE], ["randn_like"], "passed"),
        ([1.0 + noise / 10 for noise in NOISE], ["randn_like"], "fault"),  # a model that never sees its input
        ([0.9 + 2 * noise for noise in NOISE], ["randn_like"], "not shown"),
    ],
)
def test_a_loss_that_draws_random_numbers_is_compared_with_a_constant_output_over_repeated_draws(
    trained, names, status
):
    lucky = {"1-240": [2.0, 0.01, *FLAT], "10-240": FLAT, "0.1-240": FLAT}  # one low loss shows nothing
    probe = TaskProbe(random_without_dropout=names)
    result = overfitted(constant=[1.0] * 32, trained=trained, probe=probe, **lucky)
    assert (result.status, result.bound) == (status, 0.05)
    assert f"because the loss draws {names[0]}" in result.reason
    assert ("too little to judge" in result.reason) == (status == "not shown")


def test_a_policy_gradient_need_not_fall():
    probe = TaskProbe(random_without_dropout=["multinomial"])
    assert "as a policy gradient does" in overfitted(probe=probe).reason
    result = learning.loss(experiments({"task-probe": probe}))
    assert (result.status, "draws actions from the model's output (multinomial)" in result.reason) == (
        "not shown",
        True,
    )
