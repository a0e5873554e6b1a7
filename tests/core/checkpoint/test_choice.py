"""Which checkpoint of a run is used."""

import shutil

import pytest
import torch

from lockstep import Trainer
from lockstep.cli import inventory
from lockstep.core.checkpoint import choice, store
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.errors import CheckpointError, UsageError
from lockstep.weights import first_weights
from tests import own_tasks, runs
from tests.core.checkpoint import cases
from tests.core.checkpoint.cases import ALONE, commit, read
from tests.ranks import run_ranks
from tests.selection import mainly

BEST = CheckpointConfig(keep_best="max eval/accuracy")


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
    assert step_of(folder, CheckpointConfig()) == (4, "")
    assert step_of(folder, BEST, "newest") == (4, "")
    assert step_of(folder, BEST, 3)[0] == step_of(folder, BEST, "3")[0] == 3
    assert step_of(folder, CheckpointConfig(keep_best="min eval/accuracy"), "best")[0] == 1


def test_without_a_rated_checkpoint_the_default_is_the_newest_and_says_so(tmp_path):
    commit(tmp_path, 1)
    step, line = step_of(tmp_path, BEST)
    assert (step, line) == (1, "using the newest checkpoint, of step 1: none is evaluated yet")


@pytest.mark.parametrize(
    ("retention", "wanted", "text"),
    [
        (BEST, "7", "no checkpoint of step 7.*there are the steps 1, 2, 3, 4"),
        (BEST, "last", "'last' is not a checkpoint.*use newest, best or a step"),
        (CheckpointConfig(), "best", "does not say by which result.*set checkpoint.keep_best"),
        (CheckpointConfig(keep_best="max eval/f1"), "best", "no checkpoint is evaluated"),
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


# ---- a run that goes on deletes the chosen checkpoint


@pytest.mark.parametrize(
    ("wanted", "deleted", "then"), [("newest", [4], 3), ("newest", [4, 3], 2), ("best", [2], 3), ("best", [2, 3, 1], 4)]
)
def test_a_checkpoint_that_is_deleted_while_it_is_checked_is_not_chosen(folder, monkeypatch, wanted, deleted, then):
    left = list(deleted)

    def check(checkpoint, *parts):
        if left:
            assert checkpoint.step == left[0]
            store.remove(folder / f"step-{left.pop(0):08d}")
        return files_of(checkpoint, *parts)

    files_of = store.check
    monkeypatch.setattr(store, "check", check)
    found, line = step_of(folder, BEST, None if wanted == "best" else wanted)
    assert (found, left) == (then, [])
    assert "damaged" not in line
    assert ("none is evaluated" in line) == (len(deleted) == 3)


def test_a_step_that_is_deleted_is_named_and_endless_deletion_ends_with_an_error(folder, monkeypatch):
    def check(checkpoint, *parts):
        store.remove(checkpoint.path)
        if endless:
            commit(folder, checkpoint.step + 1, metrics={"eval/accuracy": 1.0})
        return files_of(checkpoint, *parts)

    files_of, endless = store.check, False
    monkeypatch.setattr(store, "check", check)
    with pytest.raises(UsageError, match=r"no checkpoint of step 3.*\n.*there are the steps 1, 2, 4"):
        step_of(folder, BEST, 3)
    endless = True
    for wanted in (None, "newest"):
        with pytest.raises(CheckpointError, match=r"each of 20 checkpoints was deleted.*\n.*keep_last"):
            step_of(folder, BEST, wanted)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_replaced_by_another_on_all_ranks(tmp_path, capsys):
    run, copy = tmp_path / "run", tmp_path / "copy"
    settings = runs.config(train={"steps": 6}, checkpoint={"every_steps": 2})
    runs.fit(own_tasks.Classes(), settings, run)
    losses = {
        step: Trainer(settings, run_dir=run, checkpoint=step, quiet=True).evaluate(own_tasks.Classes())["loss"]
        for step in (2, 4)
    }
    assert losses[2] != losses[4]
    for place, more, step in (("before", 0, 4), ("index", 0, 4), ("index", 1, 2)):
        for world in (1, 2):
            shutil.copytree(run, copy)
            if world == 1:
                answers = [cases.evaluate_while_pruned(copy, settings, place, more)]
            else:
                answers = run_ranks(2, cases.evaluate_while_pruned, copy, settings, place, more)
            for loss, deleted in answers:
                assert deleted == [6, 4][: more + 1]
                assert loss == pytest.approx(losses[step], rel=1e-12)
            shutil.rmtree(copy)

    # The weights with which another run begins, and the list of checkpoints.
    load = first_weights.load_weights

    def load_while_pruned(model, source, skip, checkpoint):
        if checkpoint.step == 6:
            store.remove(checkpoint.path)
        return load(model, source, skip, checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_weights, "load_weights", load_while_pruned)
        train = {"steps": 1, "init_from": str(run)}
        runs.fit(own_tasks.Classes(), runs.config(train=train, optim={"lr": 1e-30}), tmp_path / "second")
    (second,) = store.listed(tmp_path / "second/checkpoints")
    first = read(store.listed(run / "checkpoints")[0])
    assert all(torch.equal(value, first[name]) for name, value in read(second).items() if name.startswith("model."))

    check = store.check

    def check_while_pruned(checkpoint, *parts):
        if checkpoint.step == 4:
            store.remove(checkpoint.path)
            commit(run / "checkpoints", 8)
        return check(checkpoint, *parts)

    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "check", check_while_pruned)
        assert inventory.show(run / "checkpoints", CheckpointConfig(keep_last=1), check=True, prune=True)
    out = capsys.readouterr().out
    assert "DAMAGED" not in out
    assert "step-00000002  " in out
    assert out.endswith("deleted step-00000002\n")
    assert cases.steps(run / "checkpoints") == [8]


# ---- a run that begins with another run's weights


@pytest.mark.parametrize(
    ("wanted", "step"), mainly([(2, 2), ("best", None)], [(None, 4), ("newest", 4), (2, 2), ("best", None)])
)
def test_a_run_begins_with_the_weights_of_another_runs_checkpoint(tmp_path, wanted, step):
    settings = {"train": {"steps": 4, "eval_every_steps": 1}, "checkpoint": {"every_steps": 1, "keep_every_steps": 1}}
    if wanted == "best":
        settings["checkpoint"]["keep_best"] = "max eval/loss"
    runs.fit(own_tasks.Classes(), runs.config(**settings), tmp_path / "first")
    retention = CheckpointConfig(keep_best="max eval/loss" if wanted == "best" else None)
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
