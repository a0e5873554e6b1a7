"""Advice on real runs: what was done to a run on purpose is what the advice names."""

import os
import time

import pytest

from lockstep import Trainer
from lockstep.core.checkpoint import files
from lockstep_lab.plan import advise
from tests import own_tasks, runs
from tests.clock import only_sleep_takes_time
from tests.ranks import run_ranks

_LONG_S = 0.01  # far longer than all else of a step or of a sample's preparation


class Steady(own_tasks.Plain):
    """Each forward pass takes as long as a pass of a larger model."""

    def loss(self, model, batch):
        time.sleep(_LONG_S)
        return super().loss(model, batch)


class SleepyLoading(own_tasks.Plain):
    """Each sample takes long to prepare."""

    def prepare(self, sample, epoch, training):
        time.sleep(_LONG_S / 10)
        return sample


class SlowRank(own_tasks.Plain):
    """Rank 1 computes slowly."""

    def loss(self, model, batch):
        time.sleep(_LONG_S * (4 if os.environ.get("RANK") == "1" else 1))
        return super().loss(model, batch)


class SlowLoadingOfARank(own_tasks.Plain):
    """Rank 1 loads slowly."""

    def prepare(self, sample, epoch, training):
        if os.environ.get("RANK") == "1":
            time.sleep(_LONG_S / 5)
        return sample


class SlowEvaluation(own_tasks.Plain):
    """Evaluations take longer than the training."""

    def loss(self, model, batch):
        time.sleep(0 if model.training else 4 * _LONG_S)
        return super().loss(model, batch)


def train(kind, folder, **sections):
    """A training of 12 steps, which logs every second."""
    settings = runs.config(**{"train": {"steps": 12}, "log": {"every_steps": 2}} | sections)
    evaluated = {"eval_length": 8} if "train" in sections else {}
    with only_sleep_takes_time():
        Trainer(settings, run_dir=folder, quiet=True).fit(globals()[kind](**evaluated))


def advice(folder):
    return {one.name: one for one in advise.advise(folder).advice}


def test_loading_that_sleeps(tmp_path):
    train("SleepyLoading", tmp_path)
    found = next(iter(advice(tmp_path).values()))
    assert found.name == "waiting for data"
    assert found.changes[0].startswith("data.workers=")
    assert found.saves_share > 0.4


def test_a_checkpoint_after_every_step(tmp_path, monkeypatch):
    write = files.write_share
    monkeypatch.setattr(files, "write_share", lambda *arguments: (time.sleep(_LONG_S), write(*arguments))[1])
    train("Steady", tmp_path, checkpoint={"every_steps": 1, "mode": "sync"})
    found = advice(tmp_path)["saving"]
    assert found.changes[:2] == ("checkpoint.mode=async", "checkpoint.every_steps=0")
    assert "about 12 saves" in found.source


def test_evaluations_that_sleep(tmp_path):
    train("SlowEvaluation", tmp_path, train={"steps": 12, "eval_every_steps": 2})
    found = advice(tmp_path)["evaluating"]
    assert found.source.startswith("time/evaluation_s: 6 evaluations")
    assert found.changes[0].startswith("train.eval_every_steps=")


def test_a_run_that_is_well(tmp_path):
    train("Steady", tmp_path)
    advised = advise.advise(tmp_path)
    assert not [one for one in advised.advice if one.saves_share > 0.4]
    assert advised.shares["computing and starting"] > 0.5


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("SlowRank", "a slow rank", "Rank 1 computes more slowly"),
        ("SlowLoadingOfARank", "waiting for data", "Rank 1 waits"),
    ],
)
def test_the_slow_rank_is_named(tmp_path, kind, name, said):
    run_ranks(2, train, kind, tmp_path)
    found = next(iter(advice(tmp_path).values()))
    assert found.name == name
    assert said in found.finding
