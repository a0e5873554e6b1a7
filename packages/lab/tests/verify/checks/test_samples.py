"""The check of samples, on recordings that a test makes up."""

import numpy as np
import pytest

from lockstep.core.data.order import StepPlan
from lockstep_lab.verify.checks import samples
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from packages.lab.tests.verify.made_up import experiments, recording

BATCH, LENGTH = 6, 26  # five steps are an epoch, the last of two samples


def plan_of(drop=False, length=LENGTH):
    return StepPlan(length, BATCH, 2, 2, 0, drop)


def consumed(change=None, plan=None, steps=12):
    """What each of two ranks consumed; `change` gets a dict by (rank, step) of indices."""
    plan = plan or plan_of()
    table = {
        (rank, step): [i for chunk in plan.rank_micro_batches(step, rank) if not chunk.filler for i in chunk.indices]
        for rank in (0, 1)
        for step in range(steps)
    }
    if change:
        change(table)
    return [
        recording(
            [1.0] * steps,
            length=plan.length,
            samples=[(step, 0, tuple(table[rank, step])) for step in range(steps) if table[rank, step] is not None],
        )
        for rank in (0, 1)
    ]


def checked(change=None, sizes=(LENGTH, 0), plan=None, **sections):
    made = experiments(
        {"undisturbed": consumed(change, plan), "data-sizes": [sizes]}, batch={"global": BATCH}, **sections
    )
    return samples.samples(made)


def test_every_sample_once_per_epoch_passes():
    result = checked()
    assert result.status == "passed"
    assert result.reason == (
        "2 whole epochs of 26 samples on 2 ranks use each sample once; so do the plans of two epochs of all 26, "
        "each in its own order"
    )
    assert (result.value, result.bound) == (0.0, 0.0)


def test_more_data_than_can_be_counted_are_not_counted():
    assert checked(sizes=(10**9, 0)).reason.endswith("use each sample once")


LENGTHS = [1 + number * 5 % 7 for number in range(LENGTH)]


def checked_grouped(group):
    """Recordings of windows of two batches, in a training whose config has windows of `group` batches."""
    plan = StepPlan(LENGTH, BATCH, 2, 2, 0, lengths=np.array(LENGTHS), group_by_length=2)
    answers = {"undisturbed": consumed(plan=plan), "data-sizes": [(LENGTH, 0)], "train-lengths": [Answer(LENGTHS)]}
    return samples.samples(experiments(answers, batch={"global": BATCH}, data={"group_by_length": group}))


def test_samples_that_are_grouped_by_length_pass():
    assert checked_grouped(2).status == "passed"


@pytest.mark.parametrize("group", [None, 3])
def test_samples_of_other_groups_are_found(group):
    result = checked_grouped(group)
    assert result.status == "fault"
    assert "of a different step" in result.reason


def test_a_sample_that_is_used_twice_in_a_step_is_found():
    def repeat(table):
        table[0, 3][0] = table[0, 3][1]

    result = checked(repeat)
    assert result.status == "fault"
    assert "step 4 uses sample" in result.reason
    assert "2 times, on ranks [0]" in result.reason


def test_a_sample_that_two_ranks_share_is_found():
    def share(table):
        table[1, 2][0] = table[0, 2][0]

    assert "on ranks [0, 1]" in checked(share).reason


def test_a_lost_sample_is_found():
    def lose(table):
        table[1, 6].pop()

    result = checked(lose)
    assert result.status == "fault"
    assert "step 7 uses 5 samples of 6" in result.reason
    assert result.value == 1.0


def test_a_sample_of_another_step_is_found():
    def swap(table):
        table[0, 1][0], table[0, 2][0] = table[0, 2][0], table[0, 1][0]

    result = checked(swap)
    assert result.status == "fault"
    assert result.reason.startswith("step 2 ")
    assert "of a different step" in result.reason


def test_an_epoch_in_the_order_of_another_seed_is_found():
    other = StepPlan(LENGTH, BATCH, 2, 2, 1)
    assert checked(plan=other).status == "fault"
    assert checked(plan=other, seed=1).status == "passed"


def test_a_rank_that_did_nothing_in_a_step_is_found():
    def idle(table):
        table[1, 5] = None

    assert "step 6 uses 3 samples of 6" in checked(idle).reason


def test_the_partial_batch_may_be_dropped():
    result = checked(plan=plan_of(drop=True), data={"drop_last": True})
    assert result.status == "passed"
    assert result.reason.startswith("3 whole epochs")
    assert checked(plan=plan_of(drop=True)).status == "fault"


def test_a_data_set_smaller_than_a_batch_passes():
    for drop in (False, True):
        assert checked(plan=plan_of(drop, length=4), sizes=(4, 0), data={"drop_last": drop}).status == "passed"


def test_unreadable_samples_may_be_lost_where_the_config_skips_them_and_nothing_else():
    def lose(table):
        table[0, 0].pop()
        table[1, 6].pop()

    assert checked(lose).status == "fault"
    assert checked(lose, data={"on_error": "skip"}).status == "passed"

    def replace(table):
        table[0, 0][0] = table[0, 1][0]

    assert checked(replace, data={"on_error": "skip"}).status == "fault"


def test_a_generator_that_every_sample_seeds_alike_is_a_fault():
    probe = TaskProbe(seeded_for_sample=["torch"], seeded_alike=["torch"])
    answers = {"undisturbed": consumed(), "data-sizes": [(LENGTH, 0)], "task-probe": probe}
    result = samples.samples(experiments(answers, batch={"global": BATCH}))
    assert result.status == "fault"
    assert result.reason.startswith("reading a sample seeds torch with the same number for the first and last")
    answers["task-probe"] = TaskProbe(seeded_for_sample=["torch"])
    result = samples.samples(experiments(answers, batch={"global": BATCH}))
    assert result.status == "passed"
    assert result.notes == ["reading sample 0 seeds torch: later draws are the same in every epoch"]
