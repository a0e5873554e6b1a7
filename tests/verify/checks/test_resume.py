"""Samples, evaluation, determinism and resuming, on trials that a test makes up."""

import math
import signal
from types import SimpleNamespace

import pytest
import torch

from lockstep.data.order import StepPlan
from lockstep.verify.checks import resume
from lockstep.verify.checks.resume import _first_difference
from lockstep.verify.experiments import ExperimentFailed
from lockstep.verify.task_probe import TaskProbe
from lockstep.verify.worker_functions import Answer
from lockstep.verify.workers import WorkerEnded
from tests.checkpoint.cases import commit
from tests.verify.made_up import bench, seen

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
        seen(
            [1.0] * steps,
            length=plan.length,
            samples=[(step, 0, tuple(table[rank, step])) for step in range(steps) if table[rank, step] is not None],
        )
        for rank in (0, 1)
    ]


def judged(change=None, sizes=(LENGTH, 0), plan=None, **sections):
    made = bench({"undisturbed": consumed(change, plan), "sizes": [sizes]}, batch={"global": BATCH}, **sections)
    return resume.samples(made)


def test_every_sample_once_per_epoch_passes():
    verdict = judged()
    assert verdict.status == "passed"
    assert verdict.reason == "2 whole epochs of 26 samples on 2 ranks, each sample once; and one of all 26, as planned"
    assert (verdict.value, verdict.bound) == (0.0, 0.0)


def test_more_data_than_can_be_counted_are_not_counted():
    assert judged(sizes=(10**9, 0)).reason.endswith("each sample once")


def test_a_sample_that_is_used_twice_in_a_step_is_found():
    def repeat(table):
        table[0, 3][0] = table[0, 3][1]

    verdict = judged(repeat)
    assert verdict.status == "fault"
    assert "step 4 uses sample" in verdict.reason
    assert "2 times, on ranks [0]" in verdict.reason


def test_a_sample_that_two_ranks_share_is_found():
    def share(table):
        table[1, 2][0] = table[0, 2][0]

    assert "on ranks [0, 1]" in judged(share).reason


def test_a_lost_sample_is_found():
    def lose(table):
        table[1, 6].pop()

    verdict = judged(lose)
    assert verdict.status == "fault"
    assert "step 7 uses 5 samples of 6" in verdict.reason
    assert verdict.value == 1.0


def test_a_sample_of_another_step_is_found():
    def swap(table):
        table[0, 1][0], table[0, 2][0] = table[0, 2][0], table[0, 1][0]

    verdict = judged(swap)
    assert verdict.status == "fault"
    assert verdict.reason.startswith("step 2 ")
    assert "of another step" in verdict.reason


def test_an_epoch_in_the_order_of_another_seed_is_found():
    other = StepPlan(LENGTH, BATCH, 2, 2, 1)
    assert judged(plan=other).status == "fault"
    assert judged(plan=other, seed=1).status == "passed"


def test_a_rank_that_did_nothing_in_a_step_is_found():
    def idle(table):
        table[1, 5] = None

    assert "step 6 uses 3 samples of 6" in judged(idle).reason


def test_the_partial_batch_may_be_dropped():
    verdict = judged(plan=plan_of(drop=True), data={"drop_last": True})
    assert verdict.status == "passed"
    assert verdict.reason.startswith("3 whole epochs")
    assert judged(plan=plan_of(drop=True)).status == "fault"


def test_a_data_set_smaller_than_a_batch_passes():
    for drop in (False, True):
        assert judged(plan=plan_of(drop, length=4), sizes=(4, 0), data={"drop_last": drop}).status == "passed"


def test_unreadable_samples_may_be_lost_where_the_config_skips_them_and_nothing_else():
    def lose(table):
        table[0, 0].pop()
        table[1, 6].pop()

    assert judged(lose).status == "fault"
    assert judged(lose, data={"on_error": "skip"}).status == "passed"

    def replace(table):
        table[0, 0][0] = table[0, 1][0]

    assert judged(replace, data={"on_error": "skip"}).status == "fault"


# ---- evaluation


def evaluated(many=None, one=None, plain=None, evaluation=50, **nature):
    base = {"loss": 0.5, "accuracy": 0.75, "samples": 50, "bad": 0}
    answers = {"undisturbed": consumed(), "sizes": [(LENGTH, evaluation)], "nature": TaskProbe(epsilon=1e-16, **nature)}
    answers |= {
        f"evaluated-{how}": base | (values or {})
        for how, values in (("together", many), ("alone", one), ("by-hand", plain))
    }
    return resume.evaluation(bench(answers, batch={"global": BATCH}))


def test_equal_evaluations_pass():
    verdict = evaluated()
    assert verdict.status == "passed"
    assert verdict.reason.startswith("2 metrics over 50 samples")
    assert verdict.rows[0] == {"metric": "loss", "2 ranks": 0.5, "one process": 0.5, "plain loop": 0.5}


@pytest.mark.parametrize("where", ["many", "one", "plain"])
def test_a_metric_that_differs_anywhere_is_a_fault(where):
    verdict = evaluated(**{where: {"accuracy": 0.7501}})
    assert verdict.status == "fault"
    assert verdict.reason.startswith("accuracy is ")
    assert verdict.value == pytest.approx(0.0001 / 0.7501)
    assert evaluated(**{where: {"accuracy": 0.75 * (1 + 1e-8)}}).status == "passed"


@pytest.mark.parametrize("where", ["many", "plain"])
def test_a_metric_that_one_side_lacks_or_cannot_compute_is_a_fault(where):
    assert evaluated(**{where: {"extra": 1.0}}).status == "fault"
    assert evaluated(**{where: {"accuracy": math.nan}}).status == "fault"
    assert evaluated(**{where: {"extra": math.nan}}).status == "fault"
    assert evaluated(**{where: {"samples": 49}}).status == "fault"


@pytest.mark.parametrize("what", ["evaluating", "predicting"])
def test_an_evaluation_that_draws_random_numbers_is_compared_between_ranks_alone(what):
    drawing = {what: ["randn_like"]}
    verdict = evaluated(plain={"accuracy": 0.5}, **drawing)
    assert (verdict.status, verdict.value) == ("passed", 0.0)
    assert verdict.notes == ["not compared with a plain loop: the evaluation draws random numbers (randn_like)"]
    assert evaluated(many={"accuracy": 0.5}, **drawing).status == "fault"


def test_the_same_nan_is_no_difference():
    nan = {"accuracy": math.nan}
    assert evaluated(nan, nan, nan).status == "passed"


def test_without_evaluation_data_nothing_is_shown():
    assert evaluated(evaluation=0).status == "not shown"


# ---- determinism


def run(losses=(3.0, 2.0, 1.0), batch=7, digest=5, operations=(), **more):
    """Three steps with the same batch and the same digest of one tensor in each."""
    found = {
        "batches": {step: [batch] for step in range(3)},
        "digests": {step: {"model.batch_norm.weight": (0, 4, digest)} for step in (1, 2, 3)},
    }
    return seen(losses, **found | {"operations": list(operations)} | more)


def differ(first, again):
    return _first_difference(first, again)


def test_equal_runs_do_not_differ():
    assert differ([run(), run()], [run(), run()]) is None


def test_another_batch_on_any_rank_is_said_first():
    step, text = differ([run(), run()], [run(losses=(3.0, 2.0, 9.0)), run(batches={0: [7], 1: [8], 2: [7]})])
    assert step == 1
    assert text.startswith("rank 1 gets another batch in step 2")
    assert differ([run()], [run(batches={0: [7], 1: [7]})])[0] == 2


def test_another_loss_is_said_with_its_step():
    step, text = differ([run(), run()], [run(losses=(3.0, 2.0 + 1e-15, 1.0)), run()])
    assert step == 1
    assert "the loss of step 2 is 2.0, and 2.000000000000001" in text


def test_another_tensor_is_said_with_its_step_and_rank():
    other = run()
    other.digests[2] = {"model.batch_norm.weight": (0, 4, 6)}
    step, text = differ([run(), run()], [run(), other])
    assert (step, text) == (
        1,
        "model.batch_norm.weight and 0 other tensors differ after step 2 of a second run, on rank 1",
    )
    other.digests[2] = {}
    assert differ([run(), run()], [run(), other])[0] == 1


def determined(again, **answers):
    return resume.determinism(bench({"undisturbed": [run(), run()], "again": again} | answers, steps=3))


TWICE = {
    "operations-1": [run(operations=[("aten::mm", 1), ("aten::add", 2)]), run(operations=[("aten::mm", 1)])],
    "operations-2": [run(operations=[("aten::mm", 1), ("aten::add", 3)]), run(operations=[("aten::mm", 1)])],
}
DIFFERENT = {"loss": lambda: run(losses=(3.0, 2.5, 1.0)), "tensor": lambda: run(digest=6)}


def test_the_same_twice_passes():
    assert determined([run(), run()]).status == "passed"


def test_another_batch_is_a_fault_of_the_data():
    verdict = determined([run(), run(batch=8)])
    assert verdict.status == "fault"
    assert "default_rng" in verdict.reason


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_operation_that_differs_is_named(what):
    verdict = determined([DIFFERENT[what](), run()], **TWICE)
    assert verdict.status == "fault"
    assert verdict.reason.endswith("; the first operation that differs is aten::add, number 2 of the step on rank 0")


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_that_does_not_come_again_is_said_to_be_so(what):
    verdict = determined([DIFFERENT[what](), run()], **TWICE | {"operations-2": TWICE["operations-1"]})
    assert verdict.reason.endswith("so it does not happen each time")


# ---- resume


class Killing:
    """Workers of which one dies in the trial "killed", which leaves a checkpoint of step 3."""

    def __init__(self, bad_end=None):
        self.bad_end, self.trial = bad_end, None

    def run(self, world, wrap, function, trial):
        self.trial = trial
        rank, _ = trial.kill
        answers = [WorkerEnded(one, -signal.SIGKILL if one == rank else 1) for one in range(world)]
        if self.bad_end is not None:
            answers[rank] = self.bad_end
        return answers


def resumed(tmp_path, begun=3, last=12, values=None, ranks=None, again=None, shapes=None, **sections):
    """`resume` where the run was resumed from step `begun` and ended at `last` with other plain values."""
    ranks = ranks or Killing()
    answers = {
        "undisturbed": [run(shapes=shapes or {}), run()],
        "again": again or [run(), run()],
        "resumed": [seen([1.0], samples=[(begun, 0, (1,))] if begun < 12 else []), seen()],
    }
    made = bench(answers, folder=tmp_path, ranks=ranks, **sections)
    killed, undisturbed = tmp_path / "killed" / "checkpoints", tmp_path / "undisturbed" / "checkpoints"
    commit(undisturbed, 12, skipped=0, loss_scale=None)
    commit(killed, 3, skipped=0, loss_scale=None)
    train = made.train

    def training(name, *arguments, **more):
        if name == "resumed":
            _, config, _, watch = arguments
            ranks.resumed = config["data"]["workers"], watch.disturb
            assert more["folder"] == "killed"
            shares = [{"weight": torch.arange(10.0) + 12}, {"bias": torch.ones(3)}]
            commit(killed, last, shares, values, skipped=0, loss_scale=None)
        return train(name, *arguments, **more)

    made.train = training
    return resume.resume(made), ranks.trial


def test_a_run_that_was_killed_and_ends_alike_passes(tmp_path):
    verdict, trial = resumed(tmp_path)
    assert verdict.status == "passed"
    rank, step = trial.kill
    assert verdict.reason.startswith(f"rank {rank} was killed after step {step}, resumed from step 3 (")
    assert 3 < step < 12


@pytest.mark.parametrize(("workers", "resumed_with"), [(0, 0), (1, 1), (2, 1), (4, 3)])
def test_a_run_is_resumed_with_disturbed_generators_and_fewer_workers(tmp_path, workers, resumed_with):
    ranks = Killing()
    _, trial = resumed(tmp_path, ranks=ranks, data={"workers": workers})
    assert trial.config["data"]["workers"] == workers
    assert trial.watch is None
    assert ranks.resumed == (resumed_with, True)


def test_a_run_that_ends_otherwise_is_a_fault(tmp_path):
    verdict, _ = resumed(tmp_path, values={"optimizer.weight.steps": 11})
    assert verdict.status == "fault"
    assert "optimizer.weight.steps and 0 others differ from the undisturbed run" in verdict.reason
    assert "a generator that nothing had seeded" in verdict.reason


def test_state_that_no_checkpoint_holds_is_a_fault(tmp_path):
    shapes = {"weight": (10,), "buffer.calls": ()}
    assert resumed(tmp_path / "held", shapes=shapes)[0].status == "passed"
    verdict, _ = resumed(tmp_path / "lacking", shapes=shapes | {"ema.weight": (10,)})
    assert verdict.status == "fault"
    assert "does not hold ema.weight" in verdict.reason


def test_a_run_that_is_never_the_same_shows_nothing(tmp_path):
    verdict, _ = resumed(tmp_path, values={"optimizer.weight.steps": 11}, again=[run(digest=6), run()])
    assert verdict.status == "not shown"


def test_a_run_that_begins_elsewhere_or_ends_early_is_a_fault(tmp_path):
    for number, more in enumerate(({"begun": 0}, {"begun": 4}, {"last": 11}, {"begun": 12})):
        verdict, _ = resumed(tmp_path / str(number), **more)
        assert verdict.status == "fault"
        assert "though the newest checkpoint was of step 3" in verdict.reason


def test_a_run_that_fails_before_it_is_killed_is_a_fault(tmp_path):
    for number, end in enumerate((WorkerEnded(0, 1), Answer(error="the loss is nan"), Answer(seen()))):
        verdict, _ = resumed(tmp_path / str(number), ranks=Killing(end))
        assert verdict.status == "fault"
        assert "failed before it could be killed" in verdict.reason


def test_a_run_that_cannot_be_resumed_is_a_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(resume.compare, "last_checkpoint", lambda _: SimpleNamespace(step=1))
    made = bench(
        {"undisturbed": [run(), run()], "resumed": Answer(error="no checkpoint")}, folder=tmp_path, ranks=Killing()
    )
    with pytest.raises(ExperimentFailed, match="resumed: no checkpoint"):
        resume.resume(made)
