"""What a LightningModule and a DataModule ask for while they train, and what they log, is as their code means it."""

import json
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("pytorch_lightning")

from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lockstep import LockstepError
from lockstep.cli import config_preset, config_text
from lockstep.configs import config_file
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.order import permute
from lockstep.core.foreign_task import with_implied
from lockstep.trainer import foreign
from lockstep_lab.plan import command
from lockstep_lab.plan.inputs import Machines
from lockstep_recipes import adapters
from packages.recipes.tests.adapters import gap_cases as gaps
from packages.recipes.tests.adapters import lightning_cases as cases
from tests import runs


def net(**members):
    return type("Own", (cases.Net,), members)()


def settings(**sections):
    base = runs.config(**sections)
    del base["optim"], base["batch"]
    return base | {"batch": {"micro": 5}}


def by_hand(model, steps):
    """Plain torch: SGD with the rates of `gaps.LogsMetrics`. Yields outputs, labels and the rate of each step."""
    inputs, labels = cases.data(70, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        batch = torch.from_numpy(permute(np.arange(step * 12, min(70, step * 12 + 12)), 70, 0, 0))
        outputs = model.net(inputs[batch])
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        optimizer.zero_grad()
        cross_entropy(outputs, labels[batch]).backward()
        optimizer.step()
        yield outputs, labels[batch], optimizer.param_groups[0]["lr"]


def test_a_metric_of_the_training_counts_each_sample_once_and_the_rate_is_that_of_the_update(tmp_path):
    torch.manual_seed(3)
    module, model = gaps.LogsMetrics(), gaps.LogsMetrics()
    model.load_state_dict(module.state_dict())
    task = adapters.lightning(module, gaps.AsksForDevices(), trainer={"devices": 3, "max_epochs": 1})
    config = settings(train={"steps": 6}, log={"every_steps": 2})
    weights, results = runs.fit(task, config, tmp_path / "run")

    window, expected, rates = MulticlassAccuracy(3, average="micro"), [], []
    for step, (outputs, labels, rate) in enumerate(by_hand(model, 6)):
        window.update(outputs, labels)
        rates += [rate] * len(labels)
        if step % 2:
            expected.append((float(window.compute()), float(np.mean(rates))))
            window.reset()
            rates.clear()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if "train/rate" in entry]
    found = [(entry["train/val_acc"], entry["train/rate"]) for entry in entries]
    assert found == [pytest.approx(one) for one in expected]
    held_back = MulticlassAccuracy(3, average="macro")
    held_back.update(model.net(cases.data(29, 1)[0]), cases.data(29, 1)[1])
    assert results["eval/val_acc"] == pytest.approx(float(held_back.compute()))  # another metric of the same name
    assert runs.difference(weights, {name: value.detach() for name, value in model.state_dict().items()}) < 1e-10


def made(task):
    """The model of a task that knows its config. The trial is made."""
    task.configured(with_implied(RunConfig(), task.implied))
    return task.model()


class KeepsAll(cases.Net):
    def __init__(self):
        super().__init__()
        self.curve = MulticlassAUROC(3)

    def training_step(self, batch, batch_idx):
        self.curve.update(self(batch[0]), batch[1])
        self.log("curve", self.curve)
        return super().training_step(batch, batch_idx)


class Counts:
    def update(self):
        pass

    def compute(self):
        return 1


def no_metric(self, batch, batch_idx):
    self.log("counted", Counts())
    return cross_entropy(self(batch[0]), batch[1])


def steps_itself(self, batch, batch_idx):
    self.optimizers().zero_grad()
    return cross_entropy(self(batch[0]), batch[1])


def asks_for_schedulers(self, batch, batch_idx):
    return cross_entropy(self(batch[0]), batch[1]) * self.lr_schedulers().get_last_lr()[0]


def own_rank(self):
    return self.trainer.global_rank


REFUSED = [
    ({"training_step": no_metric}, {}, "got a Counts, which is not a torchmetrics.Metric of the module", no_metric, 1),
    ({"training_step": steps_itself}, {}, "only param_groups can be read", steps_itself, 1),
    ({"training_step": asks_for_schedulers}, {}, "param_groups[0]['lr']", asks_for_schedulers, 1),
    ({}, {"train_dataloader": own_rank}, "all ranks have the same data", own_rank, 1),
]


@pytest.mark.parametrize(("members", "of_data", "message", "function", "line"), REFUSED)
def test_what_is_refused_names_its_line_and_a_remedy(members, of_data, message, function, line):
    task = adapters.lightning(net(**members), type("OwnData", (cases.Data,), of_data)())
    with pytest.raises(LockstepError) as caught:
        made(task)
    assert message in str(caught.value)
    assert f"{__file__}:{function.__code__.co_firstlineno + line}" in str(caught.value)


def test_a_metric_of_the_training_that_keeps_all_samples_is_named_in_the_log():
    task = adapters.lightning(KeepsAll(), cases.Data())
    made(task)
    assert any("'curve' is not logged during training" in note and "thresholds=100" in note for note in task.notes)


class InSinglePrecision(cases.Net):
    """Weights of 64 bits, and a loss that is computed in 32, as models of transformers do."""

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]).float(), batch[1]).double()


class OfSamples(cases.Net):
    """A mean over samples of means over labels, of which some are missing."""

    def training_step(self, batch, batch_idx):
        losses = cross_entropy(self(batch[0]).unsqueeze(-1).expand(-1, -1, 4), batch[1], reduction="none")
        return (losses.sum(1) / (batch[1] != -100).sum(1)).mean()


class SeveralLabels(cases.Data):
    missing_from = 0

    def setup(self, stage):
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 6, dtype=torch.float64, generator=draw)
        labels = torch.randint(0, 3, (64, 4), generator=draw)
        labels[self.missing_from :: 4, 1:] = -100
        self.sets = [(inputs, labels), (inputs, labels[:, 0])]


def loss_and_weight(task, count):
    model, data = made(task), task.train_data()
    batch = task.collate([task.prepare(data[index], 0, True) for index in range(count)])
    return task.loss(model, batch), task.weight(batch)


def test_a_loss_that_is_computed_in_another_format_than_the_weights_is_a_mean():
    data = cases.Data(missing=True)
    _, weight = loss_and_weight(adapters.lightning(InSinglePrecision(), data), 70)
    assert weight == (data.sets[0][1] != -100).sum()


def test_labels_may_be_missing_where_samples_that_were_tried_lacked_some():
    assert loss_and_weight(adapters.lightning(OfSamples(), SeveralLabels()), 64)[1] is None  # the sample
    data = SeveralLabels()
    data.missing_from = 1  # every fourth sample is tried, from the first
    with pytest.raises(LockstepError, match=r"batch\[1\] contains -100.*no sample that was tried had it there"):
        loss_and_weight(adapters.lightning(OfSamples(), data), 64)


def test_commands_that_do_not_train_have_the_config_of_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "AsksForDevices, LogsMetrics"
    (tmp_path / "mine.py").write_text(f"from packages.recipes.tests.adapters.gap_cases import {names}\n")
    (tmp_path / "machine.yaml").write_text("batch: {micro: 4}\n")
    config = foreign.load("mine.py:LogsMetrics", ["train.epochs=2"])
    assert (config.batch.global_, config.train.epochs) == (12, 2)
    machine = config_preset.read("machine.yaml").apply(config_file.load("mine.py:LogsMetrics"))
    assert (foreign.settled_alone(machine).batch.global_, machine.batch.micro) == (12, 4)
    text = config_text.resolved("mine.py:LogsMetrics", explained=False)
    assert re.search(r"global: 12 +# code of mine.py:LogsMetrics\n", text)
    found = command.plan_of(config, Machines(gpus=1, gpus_per_node=1))
    assert found.facts.global_batch == 12
