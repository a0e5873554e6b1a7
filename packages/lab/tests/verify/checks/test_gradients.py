"""Checks of gradients, norms, learning rates and collectives, on recordings that a test makes up."""

import math

import pytest

from lockstep_lab.verify.checks import gradients
from lockstep_lab.verify.checks.gradients import _wrong_learning_rates, _wrong_norms
from lockstep_lab.verify.reference.gradient import GradientComparison
from lockstep_lab.verify.step_operations import StepCommunication
from lockstep_lab.verify.task_probe import TaskProbe
from packages.lab.tests.verify.made_up import experiments, recording

# ---- gradients


def update(difference=1e-15, condition=1.0, epsilon=1e-16, noise=0.0):
    return GradientComparison({}, difference, 1.0 + difference, "0.weight", condition, epsilon, noise)


def steps(count=4, lr=0.01, **more):
    """What was recorded of `count` right steps with a constant learning rate."""
    found = {
        "stop": count,
        "steps_per_epoch": 10,
        "base_lr": lr,
        "grad_norms": [(step, 1.0) for step in range(count)],
        "samples": [(step, 0, (step,)) for step in range(count)],
        "trainable": {"0.weight": (2, 2)},
    }
    found["learning_rates"] = [(step, lr, lr) for step in range(count)]
    return recording([1.0] * count, **found | more)


def rates(found, made):
    made.learning_steps = found.stop
    return _wrong_learning_rates(found, made)


def checked(learned=None, comparisons=None, probe=None, alone=None, **sections):
    accumulated = recording([1.0], gradients={0: update(), 6: update()} if comparisons is None else comparisons)
    answers = {
        "learned-1": learned or [steps(), steps()],
        "accumulated": accumulated,
        "task-probe": probe or TaskProbe(epsilon=1e-16),
    }
    answers["one-process"] = alone or recording([1.0], moved=2.0, reference_differences={"weights": 1e-16})
    return gradients.gradients(experiments(answers, **sections))


def test_right_gradients_pass():
    result = checked()
    assert result.status == "passed"
    assert "in 2 steps" in result.reason
    assert result.value == 1e-15


def test_the_update_that_is_furthest_off_counts():
    result = checked(comparisons={0: update(), 6: update(0.01)})
    assert result.status == "fault"
    assert "differs from plain torch's: 0.01 off" in result.reason


def test_nan_is_furthest_off():
    assert checked(comparisons={0: update(), 6: update(math.nan)}).status == "fault"
    assert checked(comparisons={0: update(math.nan), 6: update()}).status == "fault"


def test_rounding_that_is_amplified_is_allowed():
    assert checked(comparisons={0: update(1e-11)}).status == "fault"
    assert checked(comparisons={0: update(1e-11, condition=1e3)}).status == "passed"
    assert checked(comparisons={0: update(1e-6, epsilon=1e-7)}).status == "passed"
    assert checked(comparisons={0: update(1e-11, noise=1e-12)}).status == "passed"
    assert checked(comparisons={0: update(1e-11, noise=1e-13)}).status == "fault"
    assert checked(comparisons={0: update(1e-11, noise=1e-12), 1: update(1e-12)}).status == "fault"


def test_a_step_without_a_valid_label_is_rightly_skipped():
    """It has no loss and makes no update."""
    found = steps(4)
    found.learning_rates.pop()
    del found.entries[1]["train/loss"]
    found.entries[-1]["train/skipped"] = 1
    assert checked(learned=[found, found]).status == "passed"
    found.entries[-1]["train/skipped"] = 0
    assert "4 steps, 0 of them skipped, made 3 updates" in checked(learned=[found, found]).reason


def test_a_coarse_number_format_inside_of_the_model_is_said_and_counts():
    coarse = TaskProbe(epsilon=2.0**-23, coarse="float32 at model.py:7")
    result = checked(comparisons={0: update(1e-6)}, probe=coarse)
    assert result.status == "passed"
    assert result.reason.endswith("; the task rounds to float32 at model.py:7, which the bound includes")
    assert result.bound == pytest.approx(1000 * 2.0**-23)
    assert checked(comparisons={0: update(1e-2)}, probe=coarse).status == "fault"
    half = checked(comparisons={0: update(1e-2)}, probe=TaskProbe(epsilon=2.0**-7, coarse="bfloat16 at model.py:7"))
    assert half.status == "not shown"
    assert "which could hide a fault; the task rounds to bfloat16 at model.py:7" in half.reason
    assert checked(comparisons={0: update(10.0)}, probe=TaskProbe(epsilon=2.0**-7)).status == "fault"


def test_a_backward_pass_that_somebody_wrote_is_named_with_what_a_numerical_derivative_says():
    def said(**facts):
        return checked(probe=TaskProbe(epsilon=1e-16, own_backwards=["Scale (model.py:3)"], **facts)).reason

    agrees = "a numerical derivative agrees with the backward pass of Scale (model.py:3)"
    assert said(derivative="compared").endswith(agrees)
    assert "not the derivative of the loss, see the note" in said(derivative="wrong")
    assert "not compared with a numerical derivative, because the task does not run in float64" in said(float64=False)


def test_without_an_update_there_is_a_fault():
    assert "training made no update" in checked(learned=[steps(0), steps(0)], comparisons={}).reason
    assert checked(comparisons={}).status == "not shown"  # the steps to compare had no valid label


def test_a_model_that_draws_random_numbers_shows_nothing_but_other_faults():
    random_numbers = TaskProbe(random=["rand"], random_without_dropout=["rand"])
    assert checked(comparisons={0: update(1.0)}, probe=random_numbers).status == "not shown"
    assert checked([steps(steps_in_eval_mode=[2]), steps()], probe=random_numbers).status == "fault"


def test_a_mean_is_named_as_the_likely_cause():
    assert (
        "returns a mean"
        in checked(
            comparisons={0: update(1.0)}, probe=TaskProbe(epsilon=1e-16, mean_heads=["loss"], coupling=0.5)
        ).reason
    )


def test_a_step_in_evaluation_mode_is_a_fault_on_any_rank():
    assert (
        "the model was in evaluation mode in step 2"
        in checked([steps(steps_in_eval_mode=[3]), steps(steps_in_eval_mode=[1, 2])]).reason
    )


def test_modules_that_began_in_another_mode_are_named_for_any_rank():
    words = "when training began, modules were not in the mode that model.train() sets: "
    assert f"{words}norm" in checked([steps(), steps(wrong_modes=["norm"])]).reason
    assert f"{words}a, b, c, d, e and others" in checked([steps(wrong_modes=list("abcdef")), steps()]).reason


def test_a_parameter_without_gradient_on_all_ranks_is_a_fault():
    assert (
        "1 trainable parameter got only zero gradients in 4 steps: b"
        in checked([steps(unused=["a", "b"]), steps(unused=["b"])]).reason
    )
    assert checked([steps(unused=["a"]), steps(unused=["b"])]).status == "passed"


def test_right_norms_are_not_wrong():
    assert _wrong_norms(steps(), experiments()) == []
    assert _wrong_norms(steps(grad_norms=[(0, 0.5), (1, 0.3)]), experiments(optim={"clip_norm": 0.5})) == []
    assert _wrong_norms(steps(grad_norms=[]), experiments()) == []


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_a_norm_of_zero_and_one_that_is_not_finite_are_wrong(norm):
    (text,) = _wrong_norms(steps(grad_norms=[(0, 1.0), (1, norm)]), experiments())
    assert "at step 2" in text


def logged(*norms, **more):
    found = steps(len(norms), **more)
    for entry, norm in zip(found.entries, norms, strict=True):
        entry["train/grad_norm"] = norm
    return found


def test_a_norm_is_what_was_logged_or_what_it_was_clipped_to():
    assert _wrong_norms(logged(1.0, 3.0, grad_norms=[(0, 1.0), (1, 2.0)]), experiments(optim={"clip_norm": 2.0})) == []
    (text,) = _wrong_norms(logged(1.0, 3.0, grad_norms=[(0, 1.0), (1, 3.0)]), experiments(optim={"clip_norm": 2.0}))
    assert "at step 2 the optimizer got a gradient of norm 3, after 2 was logged (clipped to 2.0)" in text
    (text,) = _wrong_norms(logged(1.0, 3.0, grad_norms=[(0, 1.0), (1, 2.5)]), experiments())
    assert "of norm 2.5, after 3 was logged" in text
    assert _wrong_norms(logged(1.0, 3.0, grad_norms=[(0, 1.0005), (1, 3.0)]), experiments()) == []
    (text,) = _wrong_norms(steps(grad_norms=[(0, 0.6)]), experiments(optim={"clip_norm": 0.5}))
    assert "norm 0.6" in text


def test_a_skipped_step_has_no_norm_and_shifts_none():
    assert _wrong_norms(logged(1.0, 3.0, 2.0, grad_norms=[(0, 1.0), (2, 2.0)]), experiments()) == []


def test_rates_of_the_schedule_are_right():
    assert rates(steps(), experiments()) == []
    cosine = [(step, 0.01 * (1 + math.cos(math.pi * step / 4)) / 2, 0.01) for step in range(4)]
    assert rates(steps(learning_rates=cosine), experiments(schedule={"name": "cosine"})) == []
    assert rates(steps(lr=0.02), experiments(optim={"lr_scaling": "linear", "reference_batch": 12})) == []


def test_a_rate_that_is_not_the_schedules_is_wrong():
    (text,) = rates(steps(), experiments(schedule={"name": "linear"}))
    assert "update 2 was made with a learning rate of 0.01; the schedule says 0.0075" in text


def test_an_update_that_was_counted_twice_or_not_at_all_is_wrong():
    assert rates(
        steps(learning_rates=[(0, 0.01, 0.01), (0, 0.01, 0.01), (1, 0.01, 0.01), (2, 0.01, 0.01)]), experiments()
    )
    (text,) = rates(steps(learning_rates=[(step, 0.01, 0.01) for step in range(3)]), experiments())
    assert "4 steps, 0 of them skipped, made 3 updates" in text
    (text,) = rates(steps(learning_rates=[(step, 0.01, 0.01) for step in range(5)]), experiments())
    assert "made 5 updates" in text


def test_skipped_steps_make_no_updates():
    found = steps(learning_rates=[(step, 0.01, 0.01) for step in range(3)])
    found.entries[-1]["train/skipped"] = 1
    assert rates(found, experiments()) == []


def test_a_base_rate_that_was_not_scaled_is_wrong():
    (text,) = rates(steps(), experiments(optim={"lr_scaling": "linear", "reference_batch": 12}))
    assert "the base learning rate is 0.01; lr 0.01 scaled to a global batch of 24 is 0.02" in text


def test_groups_with_rates_of_their_own_are_measured_by_those():
    groups = [{"name": "biases", "match": ["*bias"], "lr": 0.5}]
    assert rates(steps(lr=0.5), experiments(optim={"groups": groups})) == []
    assert rates(steps(learning_rates=[(step, 0.4, 0.5) for step in range(4)]), experiments(optim={"groups": groups}))


@pytest.mark.parametrize(
    ("train", "schedule", "words"),
    [
        ({"steps": 12}, {"warmup_steps": 12}, "it has 12 updates, and the training has 12"),
        ({"steps": None, "epochs": 2}, {"warmup_steps": 30}, "it has 30 updates, and the training has 20"),
        ({"steps": 12}, {"warmup_share": 1.0}, "it has 12 updates, and the training has 12"),
        ({"steps": None, "epochs": 4}, {"warmup_steps": 30}, ""),
        ({"steps": 12}, {"warmup_share": 0.9}, ""),
    ],
)
def test_a_warm_up_that_never_ends_is_a_fault(train, schedule, words):
    found = gradients._endless_warmup(experiments(train=train, schedule=schedule))
    assert (words in found[0]) if words else found == []


def test_weights_that_torch_would_have_moved_elsewhere_are_a_fault():
    found = checked(alone=recording([1.0], moved=2.0, reference_differences={"weights": 1e-16, "averages": 0.02}))
    assert found.status == "fault"
    assert "averages differ from those of a new torch.optim.AdamW: 0.01 of what training moved" in found.reason
    assert checked(alone=recording([1.0], moved=2.0, reference_differences={"weights": math.nan})).status == "fault"


def test_what_trains_against_the_config_is_a_fault():
    found = checked(
        alone=recording([1.0], moved=2.0, wrongly_trainable=["body trains in step 1, against train.unfreeze"])
    )
    assert found.status == "fault"
    assert "body trains in step 1" in found.reason


# ---- collectives

SHAPES = {"a": (5, 3), "b": (7,)}  # 22 elements; 6 * 3 + 8 = 26 with rows padded for two ranks
DDP, FSDP = [15, 7], [18, 8]


def communicated(*steps, rank_1=None, nproc=2, sharded=False, **sections):
    """steps: what was said in each that was listened to."""
    by_step = dict(enumerate(steps, 2))
    ranks = [recording([1.0], communication=by_step, trainable=SHAPES, sharded=sharded)] + [
        recording([1.0], communication=rank_1 or by_step, trainable=SHAPES, sharded=sharded)
    ] * (nproc - 1)
    return gradients.collectives(experiments({"communication": ranks}, nproc=nproc, **sections))


def test_each_gradient_once_passes():
    result = communicated(StepCommunication(reductions=DDP, own_reductions=[1]))
    assert (result.status, result.value) == ("passed", 1.0)
    assert "2 reductions of 22 elements in a step of 4 micro-batches, for 22 parameters" in result.reason


def test_padded_shards_pass_and_unpadded_numbers_do_not():
    fsdp = {"sharded": True, "parallel": {"strategy": "fsdp"}}
    assert communicated(StepCommunication(reductions=FSDP, own_reductions=[1, 1]), **fsdp).status == "passed"
    assert communicated(StepCommunication(reductions=DDP, own_reductions=[1, 1]), **fsdp).status == "fault"
    assert communicated(StepCommunication(reductions=FSDP)).status == "fault"


def test_the_bitmap_of_unused_parameters_is_no_gradient():
    waits = [("single.py:3", True)]  # of DDP, which reads the bitmap in the backward pass
    step = StepCommunication(reductions=DDP, reductions_of_integers=[2], host_waits=waits)
    assert communicated(step, parallel={"find_unused_parameters": True}).status == "passed"
    step.host_waits = [*waits, ("single.py:4", True)]
    assert communicated(step, parallel={"find_unused_parameters": True}).status == "fault"
    result = communicated(step)
    assert result.status == "fault"
    assert "2 integers are reduced in every step, but only 0 are needed" in result.reason


def test_collectives_of_the_loss_show_nothing_but_other_faults():
    probe = TaskProbe(epsilon=1e-16, collectives=["allgather"])
    result = gradients.collectives(experiments({"task-probe": probe}))
    assert result.status == "not shown"
    assert "Task.loss makes collectives (allgather)" in result.reason
    assert checked(probe=probe).status == "not shown"
    assert checked([steps(steps_in_eval_mode=[2]), steps()], probe=probe).status == "fault"


def test_wasted_and_missing_reductions_are_faults():
    result = communicated(StepCommunication(reductions=DDP * 3))
    assert (result.status, result.value) == ("fault", 3.0)
    assert communicated(StepCommunication(reductions=[15])).status == "fault"
    assert communicated(StepCommunication()).status == "fault"


def test_the_quietest_step_counts():
    noisy = StepCommunication(reductions=DDP, own_reductions=[1, 1, 2, 2], other_collectives=["allgather"])
    assert communicated(noisy, StepCommunication(reductions=DDP, own_reductions=[1])).status == "passed"
    result = communicated(noisy, noisy)
    assert result.status == "fault"
    assert "4 small reductions" in result.reason


def test_a_wait_of_the_package_is_a_fault_on_any_rank_and_in_any_step():
    ours = ("step.py:12", True)
    assert "at step.py:12" in communicated(StepCommunication(reductions=DDP, host_waits=[ours])).reason
    quiet = StepCommunication(reductions=DDP)
    assert (
        communicated(quiet, StepCommunication(reductions=DDP, own_reductions=[1], host_waits=[ours])).status == "fault"
    )
    assert communicated(quiet, rank_1={2: StepCommunication(reductions=DDP, host_waits=[ours])}).status == "fault"


def test_a_wait_of_the_task_is_a_note():
    result = communicated(StepCommunication(reductions=DDP, host_waits=[("mine.py:3", False)]))
    assert result.status == "passed"
    assert result.notes == ["the task itself makes the host wait for the device at mine.py:3"]


def test_the_loss_scaler_may_wait():
    waits = [("step.py:1", True), ("step.py:2", True), ("step.py:3", True)]
    assert communicated(StepCommunication(reductions=DDP, host_waits=waits), precision="fp16").status == "passed"
    assert (
        communicated(
            StepCommunication(reductions=DDP, host_waits=[*waits, ("step.py:4", True)]), precision="fp16"
        ).status
        == "fault"
    )
    assert communicated(StepCommunication(reductions=DDP, host_waits=waits)).status == "fault"


def test_one_rank_need_not_communicate_and_must_not_wait():
    assert communicated(StepCommunication(), nproc=1).status == "passed"
    assert communicated(StepCommunication(host_waits=[("step.py:1", True)]), nproc=1).status == "fault"


def test_groups_of_ranks_and_too_few_steps_show_nothing():
    hybrid = {"parallel": {"strategy": "fsdp", "shard_ranks": 2}, "sharded": True, "nproc": 4}
    assert communicated(StepCommunication(reductions=FSDP), **hybrid).status == "not shown"
    assert communicated().status == "not shown"
