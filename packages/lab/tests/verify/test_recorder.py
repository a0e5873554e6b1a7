"""What a recorder records, and that it leaves no trace in the training."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.generators import disturb
from lockstep_lab.verify.recorder import RecorderOptions, modules_in_wrong_mode
from lockstep_lab.verify.worker_functions import TrainingRun
from packages.lab.tests.verify import broken_tasks, mutants
from tests import own_tasks, runs
from tests.selection import mainly

TASKS = Path(broken_tasks.__file__)


def fitted(name, folder, disturbed=False, workers=0, **options):
    """What was recorded of a training of six steps in two micro-batches each."""
    batch, task = {"global": 20, "micro": 12}, {"kind": f"{TASKS}:{name}", **options}
    settings = runs.config(
        task=task, batch=batch, train={"steps": 6}, log={"every_steps": 1}, data={"workers": workers}
    )
    return worker_functions.train(
        TrainingRun(
            "one",
            1,
            settings,
            str(folder),
            TaskChanges(),
            RecorderOptions(digest_batches=True, digest_every=1, disturb_generators=disturbed),
        )
    )


def trained(*arguments, **options):
    seen = fitted(*arguments, **options)
    return seen.losses, seen.batches, seen.digests


TASKS_THAT_DRAW = {
    "MixedInLoss": {},
    "MixedInLoss, random": {"generator": "random"},
    "MixedInCollate": {},
    "Rarely": {},
    "Classes": {"dropout": 0.3},
}
UNSEEDED = {  # by mutant: which of these draw something else then
    "NumPy not seeded before a forward pass": "MixedInLoss",
    "Python's random not seeded before a forward pass": "MixedInLoss, random",
    "collate not seeded": "MixedInCollate",
    "samples that draw found, and not seeded": "Rarely",
    "dropout not a function of progress": "Classes",
}


@pytest.mark.parametrize("name", mainly(list(TASKS_THAT_DRAW)[:1], TASKS_THAT_DRAW))
def test_disturbed_generators_change_nothing_where_all_draws_are_seeded(tmp_path, name):
    one, other = (
        trained(name.partition(",")[0], tmp_path / str(how), how, **TASKS_THAT_DRAW[name]) for how in (False, True)
    )
    assert one == other


@pytest.mark.parametrize("mutant", mainly(list(UNSEEDED)[:1], UNSEEDED))
def test_disturbed_generators_show_a_draw_that_nothing_seeds(tmp_path, mutant):
    name = UNSEEDED[mutant]
    with mutants.broken(mutants.MUTANTS[mutant]):
        one, other = (
            trained(name.partition(",")[0], tmp_path / str(how), how, **TASKS_THAT_DRAW[name]) for how in (False, True)
        )
    assert one[0] != other[0]


def test_all_generators_are_disturbed_each_time_in_another_way():
    found = []
    for number in (-1, 0, 1):
        disturb(number)
        found.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert all(len(set(draws)) == 3 for draws in zip(*found, strict=True))


def test_a_mode_that_train_does_not_give_is_seen_and_left():
    model = broken_tasks.FrozenNorm().model()
    assert model.norm.training
    assert modules_in_wrong_mode(model) == ["norm"]
    assert model.norm.training
    assert modules_in_wrong_mode(model.train()) == []
    model.body.eval()
    assert modules_in_wrong_mode(model) == ["body"]
    assert not model.body.training
    assert modules_in_wrong_mode(model.eval()) == ["FrozenNetwork", "body", "drop", "head"]


def test_training_begins_in_the_mode_that_train_gives(tmp_path):
    assert fitted("FrozenNorm", tmp_path / "right").wrong_modes == []
    with mutants.broken(mutants.MUTANTS["modules put into training mode past the model's own train()"]):
        assert fitted("FrozenNorm", tmp_path / "wrong").wrong_modes == ["norm"]


def test_a_gradient_is_compared_in_the_next_step_where_a_step_makes_no_update(tmp_path):
    """A global batch without a valid label makes none."""
    task = {"kind": f"{Path(own_tasks.__file__)}:FewLabels"}
    settings = runs.config(task=task, batch={"global": 20}, train={"steps": 6}, log={"every_steps": 1})
    record = RecorderOptions(gradient_steps=(0, 1))
    seen = worker_functions.train(TrainingRun("few", 1, settings, str(tmp_path), TaskChanges(), record))
    skipped = [step for step in range(6) if not any(seen.units[step].values())]
    assert 1 in skipped, skipped
    updated = [step for step in range(6) if step not in skipped]
    assert set(seen.gradients) == {next(step for step in updated if step >= wanted) for wanted in (0, 1)}
    assert [step for step, _ in seen.grad_norms] == updated
    assert all(comparison.difference < 1e-12 for comparison in seen.gradients.values())
