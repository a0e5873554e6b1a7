"""Which checkpoint of a run is used."""

import pytest
import torch

from lockstep.checkpoint import choice
from lockstep.checkpoint.store import Retention
from lockstep.errors import CheckpointError, UsageError
from tests import own_tasks, runs
from tests.checkpoint.cases import ALONE, commit, read

BEST = Retention(best=("max", "eval/accuracy"))


@pytest.fixture
def folder(tmp_path):
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        commit(tmp_path, step, metrics={"eval/accuracy": accuracy})
    commit(tmp_path, 4)
    return tmp_path


def step_of(folder, retention, wanted=None):
    checkpoint, lines = choice.choose(folder, ALONE, retention, wanted)
    return checkpoint.step, " ".join(lines)


def test_the_default_is_the_best_where_the_run_keeps_it_else_the_newest(folder):
    step, line = step_of(folder, BEST)
    assert step == 2
    assert line.startswith("using the best checkpoint, of step 2 (max eval/accuracy 0.9)")
    assert step_of(folder, Retention()) == (4, "")
    assert step_of(folder, BEST, "newest") == (4, "")
    assert step_of(folder, BEST, 3)[0] == step_of(folder, BEST, "3")[0] == 3
    assert step_of(folder, Retention(best=("min", "eval/accuracy")), "best")[0] == 1


def test_without_a_rated_checkpoint_the_default_is_the_newest_and_says_so(tmp_path):
    commit(tmp_path, 1)
    step, line = step_of(tmp_path, BEST)
    assert (step, line) == (1, "using the newest checkpoint, of step 1: none is evaluated yet")


@pytest.mark.parametrize(
    ("retention", "wanted", "text"),
    [
        (BEST, "7", "no checkpoint of step 7.*there are the steps 1, 2, 3, 4"),
        (BEST, "last", "'last' is no checkpoint.*use newest, best or a step"),
        (Retention(), "best", "does not say by which result.*set checkpoint.keep_best"),
        (Retention(best=("max", "eval/f1")), "best", "no checkpoint is evaluated"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_it(folder, retention, wanted, text):
    with pytest.raises(UsageError, match=f"(?s){text}"):
        choice.choose(folder, ALONE, retention, wanted)


def test_a_best_checkpoint_that_is_damaged_is_an_error_and_not_replaced(folder):
    file = folder / "step-00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"(?s)step-00000002: the checkpoint is damaged.*use the newest"):
        choice.choose(folder, ALONE, BEST)


def test_without_any_checkpoint_the_error_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        choice.choose(tmp_path, ALONE, BEST)


# ---- a run that begins with another run's weights


@pytest.mark.parametrize(("wanted", "step"), [(None, 4), ("newest", 4), (2, 2), ("best", None)])
def test_a_run_begins_with_the_weights_of_another_runs_checkpoint(tmp_path, wanted, step):
    settings = {"train": {"steps": 4, "eval_every_steps": 1}, "checkpoint": {"every_steps": 1, "keep_every_steps": 1}}
    if wanted == "best":
        settings["checkpoint"]["keep_best"] = "max eval/loss"
    runs.fit(own_tasks.Classes(), runs.config(**settings), tmp_path / "first")
    retention = Retention(best=("max", "eval/loss") if wanted == "best" else None)
    checkpoint, _ = choice.choose(tmp_path / "first/checkpoints", ALONE, retention, wanted)
    if step is not None:
        assert checkpoint.step == step
    stored = {name.removeprefix("model."): value for name, value in read(checkpoint).items() if "model." in name}
    train = {"steps": 1, "init_from": str(tmp_path / "first"), "init_checkpoint": wanted}
    begun, _ = runs.fit(own_tasks.Classes(), runs.config(train=train, optim={"lr": 1e-30}), tmp_path / "second")
    for name, value in begun.items():
        assert torch.equal(value, stored[name]), name
    log = (tmp_path / "second/train.log").read_text()
    says = f"train.init_from={tmp_path / 'first'}: using the" in log
    assert says == (wanted in ("best", 2))
    assert ("train.init_checkpoint=newest takes the newest" in log) == (wanted == "best")


def test_a_checkpoint_of_what_is_no_run_is_an_error(tmp_path):
    train = {"steps": 1, "init_from": str(tmp_path), "init_checkpoint": "best"}
    with pytest.raises(UsageError, match="is not the directory of a run"):
        runs.fit(own_tasks.Classes(), runs.config(train=train), tmp_path / "second")
