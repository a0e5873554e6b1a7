"""The gradient by plain torch beside the one that the optimizer gets."""

import math
from pathlib import Path

import pytest
import torch

from lockstep.core import step
from lockstep.core.data.loader import MicroBatches
from lockstep.core.errors import TrainingError, UsageError
from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.recorder import RecorderOptions
from lockstep_lab.verify.reference.gradient import GradientComparison
from lockstep_lab.verify.worker_functions import TrainingRun
from tests import runs
from tests.processes import ROOT
from tests.selection import mainly

HERE = Path(__file__).resolve().parent
OWN, ODD = ROOT / "tests" / "own_tasks.py", HERE / "odd_tasks.py"
ROUNDING = 1e-13


def update(condition=3.0, epsilon=1e-7, **gradient):
    return GradientComparison(
        {name: torch.tensor(values) for name, values in gradient.items()}, condition=condition, epsilon=epsilon
    )


def actual(**gradient):
    return {name: torch.tensor(values) for name, values in gradient.items()}


def test_the_same_gradient_has_no_difference():
    found = update(a=[3.0, 0.0], b=[4.0]).compare(actual(a=[3.0, 0.0], b=[4.0]), None)
    assert (found.difference, found.ratio) == (0.0, 1.0)
    assert (found.condition, found.epsilon) == (3.0, 1e-7)
    assert found.gradient == {}


def test_a_difference_is_relative_to_the_plain_gradient_and_its_worst_parameter_is_named():
    found = update(a=[3.0, 0.0], b=[4.0]).compare(actual(a=[3.0, 1.0], b=[6.0]), None)
    assert found.difference == pytest.approx(math.sqrt(5) / 5)
    assert found.ratio == pytest.approx(math.sqrt(46) / 5)
    assert found.worst == "b"


def test_what_was_clipped_is_compared_with_the_clipped_gradient():
    clipped = actual(a=[0.3, 0.0], b=[0.4])
    found = update(a=[3.0, 0.0], b=[4.0]).compare(clipped, 0.5)
    assert found.difference < 1e-6
    assert found.ratio == pytest.approx(1.0, abs=1e-6)
    assert update(a=[3.0, 0.0], b=[4.0]).compare(clipped, None).difference == pytest.approx(0.9)
    unclipped = update(a=[3.0, 0.0], b=[4.0]).compare(actual(a=[3.0, 0.0], b=[4.0]), 0.5)
    assert unclipped.ratio == pytest.approx(10.0, rel=1e-6)
    assert update(a=[0.3], b=[0.4]).compare(actual(a=[0.3], b=[0.4]), 0.6).difference == 0.0


def test_a_missing_gradient_and_a_superfluous_one_count_in_full():
    found = update(a=[3.0], b=[4.0]).compare(actual(b=[4.0]), None)
    assert (found.difference, found.worst) == (pytest.approx(0.6), "a")
    found = update(b=[4.0]).compare(actual(b=[4.0], a=[[3.0, 0.0], [0.0, 0.0]]), None)
    assert (found.difference, found.worst) == (pytest.approx(0.75), "a")
    assert update(a=[0.0], b=[4.0]).compare(actual(b=[4.0]), None).difference == 0.0


def test_no_gradient_at_all_and_nan_are_no_success():
    assert update().compare({}, 1.0).difference == 0.0
    assert update(a=[0.0]).compare(actual(a=[2.0]), None).difference == 2.0
    assert math.isnan(update(a=[1.0]).compare(actual(a=[math.nan]), None).difference)


EXACT, TWO = TaskChanges(exact=True), RecorderOptions(gradient_steps=(0, 2))


def train(tmp_path, name, file=OWN, adjustment=EXACT, watch=TWO, **sections):
    """What one process saw of three steps."""
    sections = {"train": {"steps": 3}, "log": {"every_steps": 1}} | sections
    settings = runs.config(task={"kind": f"{file}:{name}"}, **sections)
    return worker_functions.train(TrainingRun("alone", 1, settings, str(tmp_path), adjustment, watch))


CASES = {
    "samples": ("Plain", {}),
    "masked labels": ("Masked", {}),
    "masked labels in micro-batches": ("Masked", {"batch": {"global": 20, "micro": 3}}),
    "several heads with coefficients": ("TwoHeads", {}),
    "several heads in micro-batches, clipped": (
        "TwoHeads",
        {"batch": {"global": 20, "micro": 3}, "optim": {"clip_norm": 0.05}},
    ),
    "clipped": ("Masked", {"optim": {"clip_norm": 0.01}}),
    "not clipped, for it is short": ("Masked", {"optim": {"clip_norm": 1e6}}),
    "more than are taken at once": ("Masked", {"batch": {"global": 100, "micro": 30}}),
    "dropout switched off": ("Dropout", {"batch": {"global": 20, "micro": 6}}),
    "buffers that no checkpoint holds": ("Deep", {"batch": {"global": 20, "micro": 6}}),
}


COVERED = (
    "samples",
    "masked labels",
    "several heads with coefficients",
    "more than are taken at once",
    "not clipped, for it is short",
)
"""Other cases show the same."""


@pytest.mark.parametrize("name", mainly([name for name in CASES if name not in COVERED], CASES))
def test_the_optimizer_gets_plain_torchs_gradient(tmp_path, name):
    task, sections = CASES[name]
    found = train(tmp_path, task, **sections).gradients
    assert list(found) == [0, 2]
    for one in found.values():
        assert (
            one.difference < 1e-5 if name == "clipped" else one.difference < 1e-6
        )  # clipping knows its norm in its own format
        assert one.ratio == pytest.approx(1.0, abs=1e-5)
        assert one.epsilon == torch.finfo(torch.float64).eps
        assert one.condition >= 1.0
        if "clip" not in name or "not" in name:
            assert one.difference < ROUNDING


def test_frozen_parameters_and_batch_norm_are_as_in_training(tmp_path):
    for name in ("Blocks", "BatchNorm"):
        found = train(tmp_path / name, name, HERE / "clean_tasks.py", TaskChanges(exact=True, float64=True)).gradients
        assert all(one.difference < ROUNDING for one in found.values())


def test_a_gradient_of_many_parts_says_how_far_rounding_is_amplified(tmp_path):
    few = train(tmp_path / "few", "Plain", batch={"global": 60}).gradients[0]
    many = train(tmp_path / "many", "Plain", batch={"global": 200}).gradients[0]
    assert few.condition == pytest.approx(1.0)
    assert many.condition > 1.001


def test_a_skipped_update_is_not_compared(tmp_path):
    settings = {"task": {"kind": f"{OWN}:Masked", "mask_all": True}, "train": {"steps": 3}, "log": {"every_steps": 1}}
    watch = RecorderOptions(gradient_steps=(0, 2))  # stopped, because a run that ends without any update is an error
    found = worker_functions.train(
        TrainingRun("alone", 1, runs.config(**settings), str(tmp_path), TaskChanges(), watch, stop_at=3)
    )
    assert found.gradients == {}
    assert found.grad_norms == []


def broken(monkeypatch, change):
    """The engine's factors, each changed by a function of the training, the head and the factor."""
    factors = step._factors

    def changed(run, *arguments):
        found, rest = factors(run, *arguments)
        return {head: change(run, head, factor) for head, factor in found.items()}, rest

    monkeypatch.setattr(step, "_factors", changed)


def test_a_wrong_factor_is_seen(monkeypatch, tmp_path):
    broken(monkeypatch, lambda run, head, factor: 1.01 * factor)
    found = train(tmp_path, "Masked").gradients
    for one in found.values():
        assert one.difference == pytest.approx(0.01, rel=1e-6)
        assert one.ratio == pytest.approx(1.01, rel=1e-9)


def test_a_forgotten_coefficient_is_seen(monkeypatch, tmp_path):
    broken(monkeypatch, lambda run, head, factor: factor / run.coefficients.get(head, 1.0))
    assert train(tmp_path, "TwoHeads").gradients[0].difference > 0.01


def test_samples_counted_instead_of_labels_are_seen(monkeypatch, tmp_path):
    broken(monkeypatch, lambda run, head, factor: torch.full_like(factor, 1 / 24))
    assert train(tmp_path, "Masked").gradients[2].difference > 0.01


def test_a_mean_of_means_is_seen(monkeypatch, tmp_path):
    count = step._count_units

    def of_first(run, micros, samples):
        totals, counting = count(run, micros[:1], samples)
        return {"loss": 7 * (totals or counting())["loss"]}, None

    monkeypatch.setattr(step, "_count_units", of_first)
    assert train(tmp_path, "Masked", batch={"global": 20, "micro": 3}).gradients[0].difference > 0.01


def test_a_gradient_that_is_not_clipped_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "clip_grads", lambda *_: None)
    found = train(tmp_path, "Masked", optim={"clip_norm": 0.01}).gradients[0]
    assert found.ratio > 2
    assert found.difference > 1


@pytest.mark.parametrize("name", ["Masked", "Dropout"])
def test_other_samples_than_those_of_the_plan_are_seen(monkeypatch, tmp_path, name):
    """Where tensors are read at once, and where samples are read one by one."""
    read, ways = MicroBatches.__getitem__, set()

    def shifted(self, chunk):
        ways.add(self.at_once)
        return read(self, chunk._replace(indices=tuple((index + 1) % len(self.data) for index in chunk.indices)))

    monkeypatch.setattr(MicroBatches, "__getitem__", shifted)
    assert train(tmp_path, name).gradients[0].difference > 0.01
    assert ways == {name == "Masked"}


def test_the_same_unreadable_samples_are_left_out(tmp_path):
    found = train(tmp_path, "Unreadable", ODD, TaskChanges(), batch={"global": 40}, data={"on_error": "skip"}).gradients
    assert all(one.difference < 1e-5 for one in found.values())


def test_looking_leaves_no_trace_in_the_training(tmp_path):
    watch = RecorderOptions(
        digest_every=1,
        digest_batches=True,
        probe_steps=(1, 3),
        gradient_steps=(0, 1, 2),
        unused_parameters=True,
        communication_steps=(1,),
    )
    for task in ("Masked", "Dropout"):
        unwrap_ddp, watched = (
            train(tmp_path / f"{task}-{number}", task, adjustment=TaskChanges(), watch=one)
            for number, one in enumerate((RecorderOptions(), watch))
        )
        assert watched.losses == unwrap_ddp.losses
        assert watched.moved == unwrap_ddp.moved
        assert (sorted(watched.digests), sorted(watched.batches)) == ([0, 1, 2, 3], [0, 1, 2])
        assert unwrap_ddp.digests == unwrap_ddp.batches == unwrap_ddp.gradients == {}


def test_a_recorder_sees_norms_rates_and_what_was_never_used(tmp_path):
    found = train(
        tmp_path,
        "Unused",
        adjustment=TaskChanges(),
        watch=RecorderOptions(unused_parameters=True),
        parallel={"find_unused_parameters": True},
        optim={"clip_norm": 0.5},
    )
    assert set(found.unused) == {"forgotten.weight", "forgotten.bias"}
    assert [updates for updates, _, _ in found.learning_rates] == [0, 1, 2]
    assert [at for at, _ in found.grad_norms] == [0, 1, 2]
    assert all(0 < norm <= 0.5 * (1 + 1e-6) for _, norm in found.grad_norms)
    assert found.steps_in_eval_mode == []
    assert found.base_lr == 0.01
    assert (found.stop, found.length, found.steps_per_epoch) == (3, 240, 10)
    assert sorted(found.trainable) == sorted(found.parameters)
    assert [len(indices) for _, _, indices in found.samples] == [24] * 3


def test_a_training_ends_where_it_is_to_end(tmp_path):
    settings = runs.config(
        task={"kind": f"{OWN}:Plain"}, log={"every_steps": 1}, optim={"lr": 0.05, "weight_decay": 0.0}
    )
    stopped = worker_functions.train(TrainingRun("stopped", 1, settings, str(tmp_path / "a"), stop_at=3))
    assert len(stopped.losses) == 3
    resumed = worker_functions.train(TrainingRun("resumed", 1, settings, str(tmp_path / "a"), stop_at=5))
    assert [at for at, _, _ in resumed.samples][:2] == [3, 4]
    whole = worker_functions.train(TrainingRun("whole", 1, settings, str(tmp_path / "b")))
    share = (whole.losses[6] - 0.1) / (whole.losses[0] - 0.1)
    until = worker_functions.train(TrainingRun("until", 1, settings, str(tmp_path / "c"), until=(share, 0.1)))
    assert until.losses[-1] <= whole.losses[6]
    assert all(loss > whole.losses[6] for loss in until.losses[:-1])


def test_answers_tell_a_wrong_config_from_a_failure(capfd):
    def fail(error):
        raise error

    assert worker_functions.answering(lambda value: value + 1, 1).value == 2
    refused = worker_functions.answering(fail, UsageError("no", where="there"))
    assert (refused.error, refused.refused) == ("there: no", True)
    failed = worker_functions.answering(fail, TrainingError("the loss is nan"))
    assert (failed.error, failed.known, failed.refused) == ("the loss is nan", True, False)
    crashed = worker_functions.answering(fail, ValueError("the sheep are asleep"))
    assert (crashed.known, crashed.refused) == (False, False)
    assert crashed.error.startswith("ValueError: the sheep are asleep (test_reference.py:")
    assert "in fail" in capfd.readouterr().err


SECTIONS = [
    {"optim": {"layer_decay": 0.5, "groups": [{"name": "biases", "match": ["*bias"], "weight_decay": 0.0}]}},
    {"schedule": {"name": "cosine", "warmup_steps": 2}, "train": {"steps": 5, "ema_decay": 0.9}},
    {"optim": {"name": "SGD", "args": {"momentum": 0.9}, "lr_scaling": "sqrt", "reference_batch": 6}},
]


@pytest.mark.parametrize(
    "sections",
    mainly(SECTIONS[:1], SECTIONS),
    ids=["layer decay", "schedule and averages", "scaled rate"],
)
def test_updates_are_those_of_a_new_optimizer(tmp_path, sections):
    changes = TaskChanges(exact=True, float64=True)
    watch = RecorderOptions(repeat_updates=True)
    found = train(tmp_path, "Blocks", HERE / "clean_tasks.py", changes, watch, **sections)
    assert found.moved > 0
    assert set(found.reference_differences) == {"weights", *(["averages"] if "train" in sections else [])}
    assert all(difference < ROUNDING for difference in found.reference_differences.values())


def test_a_wrong_rate_of_a_level_is_seen(monkeypatch, tmp_path):
    from lockstep.core import optim

    monkeypatch.setattr(optim, "_depths", lambda model, blocks: {name: 0 for name, _ in model.named_parameters()})
    changes, watch = TaskChanges(exact=True, float64=True), RecorderOptions(repeat_updates=True)
    found = train(tmp_path, "Blocks", HERE / "clean_tasks.py", changes, watch, optim={"layer_decay": 0.5})
    assert found.reference_differences["weights"] > 1e-6
