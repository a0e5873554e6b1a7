"""Metrics of the training, against torchmetrics over all samples in one process."""

import json
import re

import numpy as np
import pytest
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lockstep import Metrics
from lockstep.core.data.order import permute
from lockstep.core.errors import Preempted, TrainingError
from tests import own_tasks, runs
from tests.parts.test_epochs import StopAfter
from tests.ranks import run_ranks
from tests.selection import mainly

# 50 samples in batches of 24, 24 and 2: with three ranks, the last has a filler. Windows of 2 steps cross epochs.
LENGTH, BATCH, PER_EPOCH, EPOCHS, EVERY = 50, 24, 3, 4, 2
SETTINGS = {
    "batch": {"global": BATCH, "micro": 5},
    "train": {"steps": None, "epochs": EPOCHS},
    "log": {"every_steps": EVERY},
}


def by_hand():
    """Of each step, the outputs of the model before its update and the labels, in plain torch."""
    task = own_tasks.Classes(length=LENGTH)
    inputs, labels = task.train_data().tensors
    seen = []

    def look(model, step):
        epoch, within = divmod(step, PER_EPOCH)
        indices = permute(np.arange(within * BATCH, min((within + 1) * BATCH, LENGTH)), LENGTH, 0, epoch)
        with torch.no_grad():
            seen.append((model(inputs[indices]).softmax(dim=1), labels[indices]))

    runs.by_hand(task, steps=PER_EPOCH * EPOCHS, before_step=look)
    return seen


def computed(steps):
    """Numbers of torchmetrics over all samples of some steps at once."""
    outputs, labels = (torch.cat(parts) for parts in zip(*steps, strict=True))
    confidence = MeanMetric()
    confidence.update(outputs.max(dim=1).values)
    found = {
        "accuracy": MulticlassAccuracy(3, average="micro")(outputs, labels),
        "f1": MulticlassF1Score(3)(outputs, labels),
    }
    return {name: float(value) for name, value in found.items()} | {"confidence": float(confidence.compute())}


def entries(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "train/loss" in line}


def epoch_lines(folder):
    """By epoch, from 1: the line on its end."""
    found = re.findall(r"epoch (\d+) of \d+ ends[^:]*: (.*)", (folder / "train.log").read_text())
    return {int(epoch): line for epoch, line in found}


def check(folder, seen):
    for step, entry in entries(folder).items():
        expected = computed(seen[step - EVERY : step])
        for name, value in expected.items():
            assert entry[f"train/{name}"] == pytest.approx(value, rel=1e-6), (step, name)
    for epoch, line in epoch_lines(folder).items():
        expected = computed(seen[(epoch - 1) * PER_EPOCH : epoch * PER_EPOCH])
        said = dict(re.findall(r"(\w+) (\d[\d.e+-]*\d|\d)", line.partition("; eval")[0]))
        for name, value in expected.items():
            assert float(said[name]) == pytest.approx(value, rel=1e-3), (epoch, name)


@pytest.mark.parametrize("world", mainly([3], [1, 2, 3]))
def test_metrics_of_windows_and_epochs_are_those_of_one_process_over_all_samples(world, tmp_path):
    expected, _ = runs.by_hand(own_tasks.Classes(length=LENGTH), steps=PER_EPOCH * EPOCHS)
    answers = run_ranks(
        world, runs.fit_kind, "ClassesWithOutput", {"length": LENGTH}, runs.config(**SETTINGS), tmp_path
    )
    assert all(runs.difference(weights, expected) < 1e-10 for weights, _ in answers)
    assert sorted(entries(tmp_path)) == [2, 4, 6, 8, 10, 12]
    assert sorted(epoch_lines(tmp_path)) == [1, 2, 3, 4]
    check(tmp_path, by_hand())
    log = (tmp_path / "train.log").read_text()
    assert log.count("note: the log has no auroc, correlation of the training") == 1
    assert "auroc" not in str(entries(tmp_path))


def test_switch_changes_the_log_and_no_bit_of_the_training(tmp_path):
    settings = runs.config(**SETTINGS)
    kept, _ = runs.fit(own_tasks.ClassesWithOutput(length=LENGTH), settings, tmp_path / "on")
    settings["log"]["train_metrics"] = False
    found, _ = runs.fit(own_tasks.ClassesWithOutput(length=LENGTH), settings, tmp_path / "off")
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    on, off = (entries(tmp_path / name)[12].keys() for name in ("on", "off"))
    assert {name for name in on - off if not name.startswith("data/")} == {
        "train/accuracy",
        "train/f1",
        "train/confidence",
    }
    assert on >= off


@pytest.mark.parametrize("stop", mainly([4], [3, 4, 5]))
def test_a_resumed_run_has_the_metrics_of_all_steps_of_its_window_and_its_epoch(stop, tmp_path):
    settings = runs.config(**SETTINGS)
    with pytest.raises(Preempted):
        runs.Trainer(settings, run_dir=tmp_path, quiet=True).fit(
            own_tasks.ClassesWithOutput(length=LENGTH), StopAfter(stop)
        )
    runs.fit(own_tasks.ClassesWithOutput(length=LENGTH), settings, tmp_path)
    check(tmp_path, by_hand())
    assert "(of" not in str(epoch_lines(tmp_path))


class Broken(own_tasks.ClassesWithOutput):
    def metrics(self):
        def update(metrics, output, batch):
            if len(batch[0]) == 2:  # the last batch of each epoch
                raise ValueError("no such thing")
            metrics.update(output, batch[1])

        return Metrics({"accuracy": MulticlassAccuracy(3)}, update)


def test_metrics_that_fail_are_told_once_and_end_no_training(tmp_path):
    settings = runs.config(**SETTINGS)
    runs.fit(Broken(length=LENGTH), settings, tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert log.count("warning: the log has no more metrics of the training, because Task.metrics cannot take") == 1
    assert "ValueError: no such thing" in log
    assert {step: "train/accuracy" in entry for step, entry in entries(tmp_path).items()} == {
        2: True, 4: False, 6: False, 8: False, 10: False, 12: False
    }  # fmt: skip


def test_a_second_loss_in_the_place_of_the_output_is_refused():
    class TwoLosses(own_tasks.Classes):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return loss, 2 * loss

    with pytest.raises(TrainingError, match="it returned a tuple of two scalars") as caught:
        runs.fit(TwoLosses(), runs.config())
    assert "a dict of scalar tensors by head" in caught.value.remedy
