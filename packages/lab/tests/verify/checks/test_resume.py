"""Checks of determinism, resuming and elastic resuming, on recordings that a test makes up."""

import signal
from types import SimpleNamespace

import pytest
import torch

from lockstep.parts.digest import digest
from lockstep_lab.verify import compare
from lockstep_lab.verify.checks import resume
from lockstep_lab.verify.compare import TrainingDifference, first_difference_of_runs
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from lockstep_lab.verify.workers import WorkerEnded
from packages.lab.tests.verify.made_up import experiments, recording
from tests.core.checkpoint.cases import commit

# ---- determinism


def run(losses=(3.0, 2.0, 1.0), batch=7, digest=5, operations=(), **more):
    """Three steps with the same batch and the same digest of one tensor in each."""
    found = {
        "batches": {step: [batch] for step in range(3)},
        "digests": {step: {"model.batch_norm.weight": (0, 4, digest)} for step in (1, 2, 3)},
    }
    return recording(losses, **found | {"operations": list(operations)} | more)


def differ(first, again):
    return first_difference_of_runs(first, again)


def test_equal_runs_do_not_differ():
    assert differ([run(), run()], [run(), run()]) is None


def test_another_batch_on_any_rank_is_said_first():
    step, text = differ([run(), run()], [run(losses=(3.0, 2.0, 9.0)), run(batches={0: [7], 1: [8], 2: [7]})])
    assert step == 1
    assert text.startswith("rank 1 gets a different batch in step 2")
    assert differ([run()], [run(batches={0: [7], 1: [7]})])[0] == 2


def test_another_loss_is_said_with_its_step():
    step, text = differ([run(), run()], [run(losses=(3.0, 2.0 + 1e-15, 1.0)), run()])
    assert step == 1
    assert "the loss of step 2 is 2.0, and 2.000000000000001" in text


def test_steps_without_a_loss_shift_no_others():
    """A step without a valid label has none."""

    def skipping(last, again=5):
        found = run(losses=(3.0, 2.0, last))
        del found.entries[1]["train/loss"]
        found.digests[2] = {"model.batch_norm.weight": (0, 4, again)}
        return found

    assert differ([skipping(1.0)], [skipping(1.0)]) is None
    assert differ([skipping(1.0)], [skipping(9.0)])[0] == 2
    assert differ([skipping(1.0)], [skipping(1.0, again=6)])[0] == 1


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
    return resume.determinism(experiments({"undisturbed": [run(), run()], "again": again} | answers, steps=3))


TWICE = {
    "operations-1": [run(operations=[("aten::mm", 1), ("aten::add", 2)]), run(operations=[("aten::mm", 1)])],
    "operations-2": [run(operations=[("aten::mm", 1), ("aten::add", 3)]), run(operations=[("aten::mm", 1)])],
}
DIFFERENT = {"loss": lambda: run(losses=(3.0, 2.5, 1.0)), "tensor": lambda: run(digest=6)}


def test_the_same_twice_passes():
    assert determined([run(), run()]).status == "passed"


def test_another_batch_is_a_fault_of_the_data():
    result = determined([run(), run(batch=8)])
    assert result.status == "fault"
    assert "default_rng" in result.reason


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_operation_that_differs_is_named(what):
    result = determined([DIFFERENT[what](), run()], **TWICE)
    assert result.status == "fault"
    assert result.reason.endswith("; the first operation that differs is aten::add, number 2 of the step on rank 0")


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_that_does_not_come_again_is_said_to_be_so(what):
    result = determined([DIFFERENT[what](), run()], **TWICE | {"operations-2": TWICE["operations-1"]})
    assert result.reason.endswith("so it does not happen every time")


def test_forward_passes_that_draw_the_same_numbers_are_named():
    def check(*generators, **probe):
        ranks = [
            run(samples=[(0, 0, (2 * rank,)), (1, 0, (2 * rank + 1,))], generators=dict(enumerate(states)))
            for rank, states in enumerate(generators)
        ]
        answers = {"undisturbed": ranks, "again": ranks, "task-probe": TaskProbe(epsilon=1e-16, **probe)}
        return resume.determinism(experiments(answers, steps=3))

    drawing = {"random": ["native_dropout"]}
    assert check([["x", "a"], ["b"]], [["x", "c"], ["d"]], **drawing).status == "passed"  # "x" is of a trial
    assert check([["a"], ["a"]], [["c"], ["d"]]).status == "passed"  # nothing is drawn
    result = check([["a"], ["b"]], [["c"], ["b"]], **drawing)
    assert result.status == "fault"
    assert "of step 2 on rank 0 and of step 2 on rank 1 begin with the same random numbers" in result.reason


# ---- resume


class Killing:
    """Workers of which one dies in the experiment "killed", which leaves a checkpoint of step 3."""

    def __init__(self, bad_end=None):
        self.bad_end, self.training_run = bad_end, None

    def run(self, world, wrap, function, training_run):
        self.training_run = training_run
        rank, _ = training_run.kill
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
        "resumed": [recording([1.0], samples=[(begun, 0, (1,))] if begun < 12 else []), recording()],
    }
    made = experiments(answers, folder=tmp_path, workers=ranks, **sections)
    killed, undisturbed = tmp_path / "killed" / "checkpoints", tmp_path / "undisturbed" / "checkpoints"
    commit(undisturbed, 12, skipped=0, loss_scale=None)
    commit(killed, 3, skipped=0, loss_scale=None)
    train = made.train

    def training(name, *arguments, **more):
        if name == "resumed":
            _, config = arguments
            ranks.resumed = config["data"]["workers"], more["record"].disturb_generators
            assert more["resume"] == "killed"
            shares = [{"weight": torch.arange(10.0) + 12}, {"bias": torch.ones(3)}]
            commit(killed, last, shares, values, skipped=0, loss_scale=None)
        return train(name, *arguments, **more)

    made.train = training
    return resume.resume(made), ranks.training_run


def test_a_run_that_was_killed_and_ends_alike_passes(tmp_path):
    result, training_run = resumed(tmp_path)
    assert result.status == "passed"
    rank, step = training_run.kill
    assert result.reason.startswith(f"rank {rank} was killed after step {step}, resumed from step 3 (")
    assert 3 < step < 12


@pytest.mark.parametrize(("workers", "resumed_with"), [(0, 0), (1, 1), (2, 1), (4, 3)])
def test_a_run_is_resumed_with_disturbed_generators_and_fewer_workers(tmp_path, workers, resumed_with):
    ranks = Killing()
    _, training_run = resumed(tmp_path, ranks=ranks, data={"workers": workers})
    assert training_run.config["data"]["workers"] == workers
    assert training_run.record is None
    assert ranks.resumed == (resumed_with, True)


def test_a_run_that_ends_otherwise_is_a_fault(tmp_path):
    result, _ = resumed(tmp_path, values={"optimizer.weight.steps": 11})
    assert result.status == "fault"
    assert "optimizer.weight.steps and 0 others differ from the undisturbed run" in result.reason
    assert "an unseeded generator" in result.reason


def test_state_that_no_checkpoint_holds_is_a_fault(tmp_path):
    shapes = {"weight": (10,), "buffer.calls": ()}
    assert resumed(tmp_path / "held", shapes=shapes)[0].status == "passed"
    result, _ = resumed(tmp_path / "lacking", shapes=shapes | {"ema.weight": (10,)})
    assert result.status == "fault"
    assert "does not hold ema.weight" in result.reason


def test_a_run_that_is_never_the_same_shows_nothing(tmp_path):
    result, _ = resumed(tmp_path, values={"optimizer.weight.steps": 11}, again=[run(digest=6), run()])
    assert result.status == "not shown"


def test_a_run_that_begins_elsewhere_or_ends_early_is_a_fault(tmp_path):
    for number, more in enumerate(({"begun": 0}, {"begun": 4}, {"last": 11}, {"begun": 12})):
        result, _ = resumed(tmp_path / str(number), **more)
        assert result.status == "fault"
        assert "though the newest checkpoint was of step 3" in result.reason


def test_a_run_that_fails_before_it_is_killed_is_a_fault(tmp_path):
    for number, end in enumerate((WorkerEnded(0, 1), Answer(error="the loss is nan"), Answer(recording()))):
        result, _ = resumed(tmp_path / str(number), ranks=Killing(end))
        assert result.status == "fault"
        assert "failed before it could be killed" in result.reason


def test_a_run_that_cannot_be_resumed_is_a_failed_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "newest", lambda _: SimpleNamespace(step=1))
    made = experiments(
        {"undisturbed": [run(), run()], "resumed": Answer(error="no checkpoint")}, folder=tmp_path, workers=Killing()
    )
    with pytest.raises(ExperimentFailed, match="resumed: no checkpoint"):
        resume.resume(made)


# ---- elastic

LOSSES = [4.0, 3.0, 2.0, 1.0]


def consuming(steps, table, curve):
    return recording(curve, samples=[(step, 0, table[step]) for step in steps])


TABLE = {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}


def stretched(monkeypatch, table=TABLE, nproc=2):
    alone = consuming(range(4), TABLE, LOSSES)
    begun, resumed = consuming(range(2), table, LOSSES[:2]), consuming(range(2, 4), table, LOSSES[2:])
    monkeypatch.setattr(ExperimentRunner, "rounding_bound", lambda self: 1e-9)
    monkeypatch.setattr(
        ExperimentRunner,
        "difference_from_one_process",
        lambda self, name, mine: TrainingDifference(0.0, "0.weight", compare.curve_difference(LOSSES, mine[0].losses)),
    )
    answers = {"one-process": alone, "elastic": begun, "elastic-resumed": resumed}
    return resume.elastic(experiments(answers, nproc, steps=4))


def test_going_on_with_the_same_samples_passes(monkeypatch):
    result = stretched(monkeypatch)
    assert result.status == "passed"
    assert result.curves["2 ranks, then 1"] == LOSSES


def test_going_on_with_other_samples_is_a_failed_experiment(monkeypatch):
    with pytest.raises(ExperimentFailed, match="resume with different samples"):
        stretched(monkeypatch, TABLE | {3: (6, 6)})


def test_one_rank_goes_on_on_two_where_there_are_as_many():
    made = experiments(nproc=1)
    assert made.most_ranks == 2


# ---- what is saved and logged


def test_a_checkpoint_that_is_not_the_state_of_its_step_is_named(tmp_path):
    weight, steps = torch.arange(4.0), torch.tensor(3.0)
    commit(tmp_path / "checkpoints", 3, [{"model.weight": weight, "optimizer.weight.step": steps}])
    digests = {"model.weight": (0, 4, digest(weight)), "optimizer.weight.step": (0, 1, digest(steps))}
    assert resume._wrong_checkpoint([Recording(digests={3: digests})], tmp_path) == ""
    shards = [
        Recording(digests={3: {"model.weight": (2 * rank, 2, digest(weight[2 * rank :][:2]))}}) for rank in (0, 1)
    ]
    assert resume._wrong_checkpoint(shards, tmp_path) == ""
    shards[1].digests[3]["model.weight"] = (2, 2, digest(weight[:2]))
    assert "the checkpoint of step 3" in resume._wrong_checkpoint(shards, tmp_path)
    other = Recording(digests={3: digests | {"optimizer.weight.step": (0, 1, digest(steps + 1))}})
    assert "optimizer.weight.step and 0 others" in resume._wrong_checkpoint([other], tmp_path)


@pytest.mark.parametrize("logged", [(1 * 2.0 + 3 * 4.0) / 4, 4.0, 3.0])
@pytest.mark.parametrize("head", ["", "values"])
def test_a_logged_loss_must_be_the_mean_over_the_units_of_its_steps(logged, head):
    key = f"train/loss/{head}" if head else "train/loss"
    rows = [{"step": step, "train/loss": 9.0, key: loss} for step, loss in ((1, 1.0), (2, 2.0), (3, 4.0))]
    units = [{0: {head: 5.0}, 1: {head: rank}, 2: {head: 3.0 * rank}} for rank in (0.0, 1.0)]
    undisturbed = [Recording(entries=rows, units=of_rank) for of_rank in units]
    complaint = resume._wrong_log(undisturbed, [Recording(entries=[{"step": 3, "train/loss": 9.0, key: logged}])], 1)
    assert bool(complaint) == (logged != 3.5)
    assert not complaint or f"{logged:.9g}; the mean over their units is 3.5" in complaint
