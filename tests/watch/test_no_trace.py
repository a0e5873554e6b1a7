"""A training with the watch has the bits of the same training without it."""

import os
import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.watch.part import Watch
from tests import own_tasks, runs
from tests.core.test_strategies import settings_for
from tests.ranks import run_ranks
from tests.selection import mainly


class Restless(own_tasks.Deep):
    """BatchNorm, dropout, a counter, a code book that each forward pass changes, a factor that the task keeps, and
    generators of the model and of the task."""

    def __init__(self, **options):
        super().__init__(**{"dropout": 0.2} | options)
        self.factor, self.passes = 1.0, torch.zeros(1, dtype=self.dtype)
        self.draws = np.random.default_rng(5)

    def model(self):
        built = super().model()
        built.norm = nn.BatchNorm1d(10).to(self.dtype)
        built.noise, built.choice = torch.Generator().manual_seed(3), random.Random(4)
        built.register_buffer("codes", torch.zeros(10, dtype=self.dtype))
        return built

    def loss(self, model, batch):
        inputs = model.norm(batch[0]) + model.codes
        if model.training:
            model.codes.data.lerp_(batch[0].mean(dim=0), 0.1)
            self.factor *= 1.01
            self.passes += 1
            noise = torch.randn(10, generator=model.noise, dtype=self.dtype) * self.draws.random()
            inputs = inputs + noise * model.choice.random()
        return super().loss(model, [inputs * self.factor, *batch[1:]]) * (1 + 0.01 * self.passes[0])


def trained(settings):
    """Final weights, results, and the steps that a whole check has seen."""
    checked, end = [], Watch._end

    def noted(watch, *arguments):
        end(watch, *arguments)
        checked.append(watch.run.checked_step)

    dtype = getattr(torch, settings.pop("dtype"))
    with mock.patch.object(Watch, "_end", noted):
        return *runs.fit(Restless(dtype=dtype), settings), checked


CASES = {
    "single": (1, {"strategy": "single"}, {}),
    "ddp 2, accumulated": (2, {"strategy": "ddp"}, {"accumulate": 3}),
    "ddp 3": (3, {"strategy": "ddp"}, {}),
    "ddp 2, fp16": (2, {"strategy": "ddp"}, {"precision": "fp16", "dtype": "float32"}),
    "ddp 2, bf16, unused": (
        2,
        {"strategy": "ddp", "find_unused_parameters": True},
        {"precision": "bf16", "dtype": "float32"},
    ),
    "ddp 2, static": (2, {"strategy": "ddp", "static_graph": True}, {}),
    "fsdp 2, accumulated": (2, {"strategy": "fsdp"}, {"accumulate": 2}),
    "fsdp 2, each": (2, {"strategy": "fsdp", "reduce_each_micro_batch": True}, {"accumulate": 2}),
    "fsdp 3": (3, {"strategy": "fsdp"}, {}),
    "fsdp 2, low": (2, {"strategy": "fsdp", "reduce_dtype": "bf16"}, {"dtype": "float32"}),
    "hybrid 2x2": (4, {"strategy": "fsdp", "shard_ranks": 2}, {}),
}
KEPT = ["single", "fsdp 2, accumulated"]


@pytest.mark.parametrize("name", mainly(KEPT, list(CASES)))
def test_weights_are_the_same_bits_with_the_watch_and_without(name):
    world, parallel, more = CASES[name]
    more = {"dtype": "float64", "accumulate": 1} | more
    train = {"steps": 11, "ema_decay": 0.9}
    sections = {"precision": more.get("precision", "fp32"), "optim": {"clip_norm": 0.5}}
    settings = settings_for(world, parallel, more["accumulate"], train=train, **sections) | {"dtype": more["dtype"]}
    plain = run_ranks(world, trained, settings)
    watched = run_ranks(world, trained, settings | {"watch": {"every": 2}})
    for (weights, results, _), (others, other_results, checked) in zip(plain, watched, strict=True):
        assert checked == [1, 3, 5, 7, 9, 10]
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert results["train/loss"] == other_results["train/loss"]


class RankDraws(own_tasks.Deep):
    """Each rank adds noise from the task's own generator. Lockstep seeds it for each pass, by step and rank."""

    def __init__(self):
        super().__init__()
        self.noise = np.random.default_rng(int(os.environ["RANK"]))

    def loss(self, model, batch):
        noise = self.noise.random() if model.training else 0.0
        return super().loss(model, [batch[0] + noise, *batch[1:]])


def with_rank_draws(settings, folder):
    return runs.fit(RankDraws(), settings, folder)[0]


def test_a_task_that_draws_from_its_own_generator_is_recomputed(tmp_path):
    settings = settings_for(2, {"strategy": "ddp"}, train={"steps": 7})
    plain = run_ranks(2, with_rank_draws, settings, tmp_path / "plain")
    found = run_ranks(2, with_rank_draws, settings | {"watch": {"every": 2}}, tmp_path / "watched")
    assert all(torch.equal(plain[0][name], found[0][name]) for name in plain[0])
    log = (tmp_path / "watched" / "train.log").read_text()
    assert "own generator" not in log
    assert "only compares" not in log
