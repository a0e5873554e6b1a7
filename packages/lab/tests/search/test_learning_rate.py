"""The losses of a range test are those of plain torch, on any number of ranks; nothing of it stays."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import Task
from lockstep.configs import config_file
from lockstep_lab.search import learning_rate, show_rates
from tests import runs
from tests.ranks import run_ranks

INPUTS = np.random.default_rng(0).normal(size=(12, 3))
TARGETS = INPUTS @ [1.0, -2.0, 0.5] + 0.3
LOW, HIGH, STEPS = 1e-4, 1.0, 30
OPTIM = {"name": "SGD", "lr": 0.02, "weight_decay": 0.0, "clip_norm": None}


class Line(Task):
    def model(self):
        layer = nn.Linear(3, 1).double()
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
        return layer

    def train_data(self):
        return [(torch.tensor(x), torch.tensor(y)) for x, y in zip(INPUTS, TARGETS, strict=True)]

    def loss(self, model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square().sum()


class Infinite(Line):
    """Its loss overflows as soon as the weights have changed by much."""

    def loss(self, model, batch):
        return super().loss(model, batch) * torch.where(model.weight.abs().max() > 0.5, math.inf, 1.0)


def config(**optim):
    return config_file.parse(runs.config(batch={"global": 12}, optim=OPTIM | optim), needs_task=False)


def losses_of(task=Line, **optim):
    found = learning_rate.range_test(config(**optim), task(), low=LOW, high=HIGH, steps=STEPS)
    return found.rates, found.losses, found.ended, found.suggestion


def plain(factor=1.0, bias=1.0):
    """The same test in plain torch: each batch has all samples."""
    model, found = Line().model(), []
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
    inputs, targets = torch.tensor(INPUTS), torch.tensor(TARGETS)
    for step in range(STEPS):
        rate = LOW * (HIGH / LOW) ** (step / (STEPS - 1)) * factor
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate * bias
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_losses_are_those_of_plain_torch_on_one_rank_and_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = plain()
    rates, losses, *rest = losses_of()
    assert rates == pytest.approx([LOW * (HIGH / LOW) ** (step / (STEPS - 1)) for step in range(len(rates))])
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-10)
    assert len(losses) > 20
    assert rest[1].steepest is not None
    of_ranks = run_ranks(2, losses_of)
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0][1] == pytest.approx(losses, rel=1e-10)
    assert not list(tmp_path.iterdir())


def test_groups_keep_their_ratios_and_the_keys_are_those_of_the_config():
    settings = config(groups=[{"name": "bias", "match": ["bias"], "lr": 0.1}], lr_scaling="linear", reference_batch=6)
    found = learning_rate.range_test(settings, Line(), low=LOW, high=HIGH, steps=STEPS)
    assert found.losses == pytest.approx(plain(2.0, bias=5.0)[: len(found.losses)], rel=1e-10)
    assert found.scale == 2.0
    assert found.overrides(0.004) == ["optim.lr=0.004", "optim.groups.0.lr=0.02"]
    text = show_rates.text(found)
    assert "multiplies these rates by 2" in text
    assert f"optim.lr={found.suggestion.steepest:.2g} optim.groups.0.lr=" in text


def test_a_loss_that_is_not_finite_ends_the_test_and_is_no_error():
    rates, losses, ended, _ = losses_of(Infinite)
    assert "the loss is inf at" in ended
    assert len(rates) == len(losses) < STEPS
    assert all(map(math.isfinite, losses))


def test_a_chart_is_written_as_svg_and_as_pixels(tmp_path):
    from PIL import Image

    found = learning_rate.range_test(config(), Line(), low=LOW, high=HIGH, steps=STEPS)
    chart = show_rates.chart(found, "line")
    for name in ("lr.svg", "lr.png"):
        chart.write(tmp_path / name)
    svg = (tmp_path / "lr.svg").read_text()
    assert f"steepest {found.suggestion.steepest:.2g}" in svg
    assert svg.count("<polyline") > 5
    with Image.open(tmp_path / "lr.png") as image:
        assert image.size == (1280, 760)
