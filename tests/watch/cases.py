"""Trainings on ranks of which one lies, and how they end."""

import contextlib
import itertools
import json
import os
import random
import re

import torch

from lockstep import Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import LockstepError
from tests import own_tasks, runs
from tests.watch.faults import faulty


class Named(own_tasks.Plain):
    """The code does something else on rank 1."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * 1.0000001 if os.environ["RANK"] == "1" and model.training else loss


class OtherBytes(own_tasks.Plain):
    """In the second epoch, rank 1 reads other targets."""

    def prepare(self, sample, epoch, training):
        inputs, targets, mask = sample
        return inputs, targets + (1e-9 if os.environ["RANK"] == "1" and epoch else 0.0), mask


class Unseeded(own_tasks.Plain):
    """Samples draw from a generator that nobody seeds."""

    def prepare(self, sample, epoch, training):
        inputs, targets, mask = sample
        return inputs + random.SystemRandom().random() * 1e-9, targets, mask


class Trembling(own_tasks.Deep):
    """Each loss is another in its last bits, as with kernels that add in any order."""

    def loss(self, model, batch):
        noise = 1 + 1e-14 * random.SystemRandom().random()
        return super().loss(model, [batch[0] * noise, *batch[1:]])


CALLS = itertools.count()


class UnseededLoss(own_tasks.Deep):
    """The loss has another factor in each call, as if it drew from a generator that nobody seeds."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + next(CALLS) % 8 / 2)


class Diverging(own_tasks.Deep):
    """In the second epoch, the model gives numbers that are not finite, on all ranks alike."""

    def prepare(self, sample, epoch, training):
        inputs, *rest = sample
        return (inputs * (float("nan") if epoch else 1.0), *rest)


class DivergingTrembling(Diverging, Trembling):
    """The same, with kernels that add in any order."""


class Faint(own_tasks.Plain):
    """A parameter has a gradient below the smallest normal number."""

    def model(self):
        model = super().model()
        model.faint = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-312 * (batch[0].sum() * model.faint).sum()


class Single(own_tasks.Deep):
    """In single precision."""

    def __init__(self):
        super().__init__(dtype=torch.float32)


OF_OURS = (own_tasks.Deep, own_tasks.Plain)
OF_THIS_FILE = (Named, OtherBytes, Unseeded, UnseededLoss, Trembling, Diverging, DivergingTrembling, Faint, Single)
KINDS = {kind.__name__: kind for kind in (*OF_THIS_FILE, *OF_OURS)}


def end_of(fault, settings, folder, kind="Deep"):
    """How a training ends on this rank: the text of its error, if there is one.

    Args:
        fault: arguments of `faulty`; None: no rank lies.
    """
    with faulty(**fault) if fault else contextlib.nullcontext():
        try:
            Trainer(settings, run_dir=folder, quiet=True).fit(KINDS[kind]())
        except LockstepError as error:
            return str(error)
    return None


def settings(world, strategy, **sections):
    """12 steps, a checkpoint every 2 and a check every 3."""
    micro = {"micro": -(-24 // world)}
    base = {
        "batch": micro,
        "parallel": {"strategy": strategy},
        "train": {"steps": 12},
        "checkpoint": {"every_steps": 2, "mode": "sync", "keep_last": 9},
        "watch": {"every": 3},
    }
    return runs.config(**{key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def verdict_of(folder):
    """What the run has written as its verdict."""
    path = folder / "watch/verdict.json"
    return json.loads(path.read_text()) if path.exists() else None


def step_of(text):
    """The step that an error names."""
    return int(re.search(r"step (\d+), watch", text)[1])


def saved(folder):
    """The steps of the checkpoints, and of those that are set aside."""
    aside = sorted(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").glob("suspect-*"))
    return sorted(one.step for one in store.listed(folder / "checkpoints")), aside


def evidence_of(folder, step, rank):
    """What a rank has written."""
    return torch.load(folder / f"watch/step-{step}/rank-{rank}.pt", weights_only=False)
