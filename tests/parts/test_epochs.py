"""What changes with the epoch: the size of micro-batches, and the lines of the log for people."""

import json
import os
import re
import signal

import pytest
import torch

from lockstep import LockstepError, Presenter, Trainer
from lockstep.configs import config_file
from lockstep.core.checkpoint import manifest
from lockstep.core.data.order import StepPlan, at_epoch
from lockstep.core.errors import Preempted
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly

SIZES = {0: 12, 1: 5, 3: 24}  # 240 samples in global batches of 24: ten steps in an epoch


class StopAfter(runs.FinalWeights):
    """Stops the training after a step, and counts the samples of each micro-batch on the way."""

    def __init__(self, step):
        super().__init__()
        self.step, self.sizes = step, {}

    def before_step(self, training):
        if training.step == self.step:
            raise Preempted
        self.sizes[training.step] = [len(micro.indices) for micro in training.micro_batches]


# ---- the size of micro-batches


def test_value_holds_from_its_epoch_on():
    assert [at_epoch(SIZES, epoch) for epoch in range(6)] == [12, 5, 5, 24, 24, 24]


def test_plan_cuts_the_same_samples_into_other_pieces():
    plain = StepPlan(100, 30, 30, 2, seed=1)
    plan = StepPlan(100, 30, 30, 2, seed=1, micro_by_epoch={0: 4, 2: 30})
    for step in range(16):
        pieces = plan.by_rank(step)
        used = sorted(index for rank in pieces for micro in rank for index in micro.indices)
        assert used == sorted(plain.indices(step)[0].tolist())
        assert {len(rank) for rank in pieces} == {plan.count(step)}
        assert max(len(micro.indices) for rank in pieces for micro in rank) <= plan.micro_batch_at(step)
    assert [plan.micro_batch_at(step) for step in (0, 7, 8, 15)] == [4, 4, 30, 30]
    assert plan.smallest_micro_batch() == (2, 3)  # 10 samples in 2 x 2 pieces, at the end of the first epoch


@pytest.mark.parametrize("world", [1, 2])
def test_training_is_that_of_plain_torch(world):
    expected, _ = runs.by_hand(own_tasks.Masked(), 40)
    settings = runs.config(batch={"micro": SIZES}, train={"steps": 40})
    for weights, _ in run_ranks(world, runs.fit_kind, "Masked", {}, settings):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("stop", mainly([10], [4, 10, 17, 30, 34]))
def test_run_goes_on_in_every_phase_with_the_same_bits(stop, tmp_path):
    settings = runs.config(batch={"micro": SIZES}, train={"steps": 40})
    whole, rest = StopAfter(None), StopAfter(None)
    Trainer(settings, run_dir=tmp_path / "whole", quiet=True).fit(own_tasks.Dropout(), whole)
    with pytest.raises(Preempted):
        Trainer(settings, run_dir=tmp_path / "cut", quiet=True).fit(own_tasks.Dropout(), StopAfter(stop))
    Trainer(settings, run_dir=tmp_path / "cut", quiet=True).fit(own_tasks.Dropout(), rest)
    assert whole.sizes == {step: rest.sizes.get(step, sizes) for step, sizes in whole.sizes.items()}
    assert [whole.sizes[step] for step in (0, 10, 30)] == [[12, 12], [5, 5, 5, 5, 4], [24]]
    assert whole.tensors.keys() == rest.tensors.keys()
    assert all(torch.equal(whole.tensors[name], rest.tensors[name]) for name in whole.tensors)


@pytest.mark.exhaustive
def test_size_that_did_not_fit_is_halved_also_for_later_epochs(tmp_path):
    expected, _ = runs.by_hand(own_tasks.Deep(), 40)
    settings = runs.config(batch={"micro": {0: 6, 2: 24}}, train={"steps": 40})
    for size in (24, 12):
        ((_, text, _),) = run_ranks(1, rank_cases.fit_out_of_memory, settings, tmp_path, (None, "forward"))
        assert f"step 21, rank 0: out of memory with micro-batches of {size}" in text
    (weights,) = run_ranks(1, rank_cases.fit_out_of_memory, settings, tmp_path, (None, "forward"))
    weights.pop("calls")
    assert runs.difference(weights, {name: tensor for name, tensor in expected.items() if name != "calls"}) < 1e-10
    note = json.loads((tmp_path / "micro.json").read_text())
    assert (note["asked"], note["world"], note["micro"]) == ([[0, 6], [2, 24]], 1, 6)


@pytest.mark.parametrize(
    ("micro", "message"),
    [
        ({1: 12}, "epoch 0"),
        ({0: 12, -1: 3}, "epoch 0"),
        ({0: 12, 5: 0}, r"batch\.micro\.5"),
        ({0: 12, 5: 25}, r"micro \(25\) is above global \(24\)"),
        ({0: 12, "x": 5}, r"batch\.micro"),
        ({0: 12, True: 5}, "must be text"),
    ],
)
def test_wrong_sizes_are_refused(micro, message):
    with pytest.raises(LockstepError, match=message):
        Trainer(runs.config(batch={"micro": micro}))


def test_run_directory_keeps_sizes_by_epoch_and_evaluates_with_the_smallest(tmp_path):
    settings = runs.config(batch={"micro": SIZES}, train={"steps": 1})
    Trainer(settings, run_dir=tmp_path, quiet=True).fit(own_tasks.Masked())
    batch = config_file.read_run(tmp_path).batch
    assert batch.micro == SIZES
    assert batch.smallest_micro == 5


# ---- the lines


class Named(Presenter):
    def epoch_header(self, epoch):
        return f"image size {[8, 16, 32][epoch]}"


class Sized(own_tasks.Classes):
    presenter = Named

    def __init__(self):
        super().__init__(length=100)  # five steps in an epoch


def epoch_lines(folder):
    lines = [line.partition("  ")[2] for line in (folder / "train.log").read_text().splitlines()]
    return [re.sub(r" after \d+\.\d s", "", line) for line in lines if line.startswith("epoch ")]


def settings_of_epochs(every=4, **train):
    return runs.config(train={"steps": None, "epochs": 3, "eval_every_epochs": 1} | train, log={"every_steps": every})


def test_epochs_begin_and_end_with_a_line(tmp_path):
    length = len(Sized().train_data())
    steps = -(-length // 24)
    results = Trainer(settings_of_epochs(), run_dir=tmp_path / "a", quiet=True).fit(Sized())
    lines = epoch_lines(tmp_path / "a")
    assert [line.split(":")[0] for line in lines] == [
        f"epoch {number} of 3 {verb}" for number in (1, 2, 3) for verb in ("starts", "ends")
    ]
    assert lines[2] == f"epoch 2 of 3 starts: steps {steps + 1} to {2 * steps}, learning rate 0.01, image size 16"
    shown = {
        name: value
        for name, value in results.items()
        if name.startswith("eval/") and name not in ("eval/samples", "eval/bad")
    }
    for name, value in shown.items():
        assert f"{name.removeprefix('eval/')} {value:.4g}" in lines[-1].split("; eval ")[1]

    Trainer(settings_of_epochs(every=1), run_dir=tmp_path / "b", quiet=True).fit(Sized())
    entries = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["train/loss"] for entry in entries if "train/loss" in entry}
    for epoch in range(3):
        counts = {step: min(24, length - (step - epoch * steps - 1) * 24) for step in losses}
        inside = [step for step in losses if epoch * steps < step <= (epoch + 1) * steps]
        mean = sum(losses[step] * counts[step] for step in inside) / length
        assert f"train loss {mean:.4g}; eval" in lines[2 * epoch + 1]
    assert epoch_lines(tmp_path / "b") == lines


@pytest.mark.parametrize("every", [4, 5])
def test_end_of_an_epoch_stands_after_the_entry_of_its_last_step(every, tmp_path):
    settings = settings_of_epochs(every=every, eval_every_epochs=None)
    Trainer(settings, run_dir=tmp_path, quiet=True).fit(own_tasks.Classes(length=100))  # 5 steps in an epoch
    lines = [line.split("  ")[1] for line in (tmp_path / "train.log").read_text().splitlines() if line[:2] == "20"]
    lines = [line.split(":")[0] for line in lines if line.startswith(("step", "epoch"))]
    numbers = [4, 8, 12, 15] if every == 4 else [5, 10, 15]
    assert [line for line in lines if line.startswith("step")] == [f"step {number}/15" for number in numbers]
    ends = [re.sub(r" after .*", "", line) for line in lines if "ends" in line]
    assert ends == [f"epoch {epoch} of 3 ends" for epoch in (1, 2, 3)]
    assert lines[-2] == "step 15/15"
    if every == 5:
        assert [line.split()[0] for line in lines] == ["epoch", "step", "epoch"] * 3


@pytest.mark.exhaustive
def test_lines_are_the_same_and_once_on_two_ranks(tmp_path):
    Trainer(settings_of_epochs(), run_dir=tmp_path / "one", quiet=True).fit(own_tasks.Classes(length=100))
    run_ranks(2, runs.fit_kind, "Classes", {"length": 100}, settings_of_epochs(), tmp_path / "two")
    assert epoch_lines(tmp_path / "two") == epoch_lines(tmp_path / "one")


class Stopped(Sized):
    """A signal comes in the last step of the first epoch, before its evaluation."""

    passes = 0

    def loss(self, model, batch):
        self.passes += torch.is_grad_enabled()
        if self.passes == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


@pytest.mark.parametrize(("task", "stop"), [(Sized, 5), (Stopped, None), (Sized, 7)])
def test_resumed_run_goes_on_with_its_epoch(task, stop, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    Trainer(settings_of_epochs(), run_dir=whole, quiet=True).fit(Sized())
    with pytest.raises(Preempted):
        Trainer(settings_of_epochs(), run_dir=cut, quiet=True).fit(task(), StopAfter(stop))
    before = epoch_lines(cut)
    assert len(before) == {5: 2, None: 1, 7: 3}[stop]
    Trainer(settings_of_epochs(), run_dir=cut, quiet=True, allow_change=["task"]).fit(Sized())
    lines, expected = epoch_lines(cut), epoch_lines(whole)
    if stop == 7:
        assert lines.pop(3).startswith("epoch 2 of 3 resumes after step 7: steps 6 to 10, learning rate")
    assert lines == expected


def test_a_checkpoint_without_the_steps_before_it_says_so(tmp_path):
    with pytest.raises(Preempted):
        Trainer(settings_of_epochs(), run_dir=tmp_path, quiet=True).fit(Sized(), StopAfter(7))
    (path,) = (tmp_path / "checkpoints").glob("step-*7/manifest.json")
    content = manifest.read(path.parent)
    assert content.pop("log")["epoch"]["steps"] == 2
    path.write_text(manifest.signed(content))
    Trainer(settings_of_epochs(), run_dir=tmp_path, quiet=True).fit(Sized())
    assert re.match(r"epoch 2 of 3 ends: train loss \S+ \(of the last 3 steps\); eval loss", epoch_lines(tmp_path)[4])


def test_runs_in_steps_have_no_such_lines(tmp_path):
    Trainer(runs.config(), run_dir=tmp_path, quiet=True).fit(own_tasks.Classes(length=100))
    assert epoch_lines(tmp_path) == []


def test_short_epochs_have_one_line_with_both_results_and_the_rate(tmp_path):
    Trainer(settings_of_epochs(every=50), run_dir=tmp_path, quiet=True).fit(own_tasks.Classes(length=100))
    lines = epoch_lines(tmp_path)
    assert [line.split(":")[0] for line in lines] == [f"epoch {number} of 3 ends" for number in (1, 2, 3)]
    assert all(re.search(r": train loss .*; eval loss .*; learning rate 0\.01$", line) for line in lines)


def test_epochs_of_a_single_step_have_a_line(tmp_path):
    Trainer(settings_of_epochs(every=50, eval_every_epochs=2), run_dir=tmp_path, quiet=True).fit(own_tasks.Classes(24))
    lines = epoch_lines(tmp_path)
    assert [line.split(":")[0] for line in lines] == [f"epoch {number} of 3 ends" for number in (1, 2, 3)]
    assert ["eval loss" in line for line in lines] == [False, True, True]


def test_short_epochs_that_the_task_describes_have_a_line_at_their_start(tmp_path):
    Trainer(settings_of_epochs(every=50), run_dir=tmp_path, quiet=True).fit(Sized())
    assert len([line for line in epoch_lines(tmp_path) if "starts: " in line and "image size" in line]) == 3


def test_presenter_that_fails_ends_no_training(tmp_path):
    class Failing(Presenter):
        def epoch_header(self, epoch):
            raise KeyError("size")

    class Shown(own_tasks.Classes):
        presenter = Failing

    Trainer(settings_of_epochs(), run_dir=tmp_path, quiet=True).fit(Shown(length=100))
    assert "warning: Presenter.epoch_header failed: KeyError: 'size'" in epoch_lines(tmp_path)[0]
