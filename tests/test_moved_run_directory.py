"""A run directory that is moved, replaced or deleted while it trains, and checkpoints that are of another run."""

import json
import shutil
from pathlib import Path

import pytest

from lockstep import LockstepError, Part, Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import TrainingError
from tests import own_tasks, runs
from tests.ranks import run_ranks

SETTINGS = {"checkpoint": {"every_steps": 5, "mode": "sync"}, "train": {"steps": 20, "eval_every_steps": 10}}


class Meddling(Part):
    """Calls `act` in an event of a step."""

    def __init__(self, act, event="after_step", step=7):
        self.act, self.event, self.step = act, event, step

    def after_step(self, training):
        self._act(training, "after_step")

    def after_evaluation(self, training):
        self._act(training, "after_evaluation")

    def _act(self, training, event):
        if (event, training.step) == (self.event, self.step) and training.rank == 0:
            self.act()


def train(folder, parts=(), allow_change=(), **sections):
    settings = runs.config(**SETTINGS | sections)
    trainer = Trainer(settings, run_dir=folder, quiet=True, parts=parts, allow_change=allow_change)
    return trainer.fit(own_tasks.Masked(eval_length=24))


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def moved(run):
    run.rename(run.with_name("moved"))


def replaced(run):
    moved(run)
    run.with_name("other").rename(run)


def deleted(run):
    while run.exists():  # a checkpoint may be written at the same time
        shutil.rmtree(run, ignore_errors=True)


def test_a_run_whose_directory_is_another_or_gone_ends_with_an_error_and_writes_nothing_there(tmp_path):
    train(tmp_path / "other", seed=1)
    other = content(tmp_path / "other")
    for act, event, step, mode in (
        (moved, "after_step", 7, "sync"),
        (replaced, "after_step", 20, "async"),
        (replaced, "after_evaluation", 20, "sync"),
        (deleted, "after_step", 7, "async"),
    ):
        place = tmp_path / f"{act.__name__}-{event}-{step}"
        shutil.copytree(tmp_path / "other", place / "other")
        run = place / "run"
        parts = [Meddling(lambda act=act, run=run: act(run), event, step)]
        with pytest.raises(TrainingError) as caught:
            train(run, parts, checkpoint={"every_steps": 5, "mode": mode})
        case = f"{act.__name__} in {event} of step {step}: {caught.value}"
        assert (caught.value.where, caught.value.retryable) == (str(run), False), case
        assert ("was moved or deleted" if act is deleted else str(place / "moved")) in str(caught.value), case
        assert content(run if act is replaced else place / "other") == other, case
        assert run.exists() == (act is replaced), case
    moved_run = tmp_path / "moved-after_step-7" / "moved"  # what was saved before is whole, and goes on
    assert [one.step for one in store.listed(moved_run / "checkpoints")] == [5]
    train(moved_run)


def meddle_on_ranks(folder):
    run = Path(folder) / "run"
    try:
        train(run, [Meddling(lambda: moved(run), step=8)], log={"every_steps": 1000})
    except LockstepError as error:
        return str(error)
    return None


def test_every_rank_ends(tmp_path):
    told = run_ranks(2, meddle_on_ranks, str(tmp_path))
    assert all("no longer exists" in text for text in told), told
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    train(run)
    train(other, train={"steps": 25, "eval_every_steps": 0})
    foreign = run / "checkpoints" / "step-00000025"
    shutil.copytree(other / "checkpoints" / "step-00000025", foreign)
    longer = {"steps": 30, "eval_every_steps": 10}
    ids = [json.loads((folder / "environment.json").read_text())["run"] for folder in (other, run)]
    with pytest.raises(LockstepError, match="another run saved the checkpoint of step 25") as caught:
        train(run, train=longer)
    assert (caught.value.where, caught.value.exit_code) == (str(foreign), 2)
    assert all(name in caught.value.what for name in ids)
    shutil.rmtree(foreign)
    train(run, train=longer)


def recorded(folder, **values):
    path = folder / "environment.json"
    about = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))


def test_a_config_that_trained_no_checkpoint_of_the_run_is_refused_and_an_allowed_change_is_not(tmp_path):
    train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")

    def killed():
        raise KeyboardInterrupt

    another = {"optim": {"lr": 0.02}}
    with pytest.raises(KeyboardInterrupt):  # the new config is recorded, and no checkpoint has it
        train(tmp_path, [Meddling(killed, step=16)], allow_change=["optim.lr"], **another)
    assert max(one.step for one in store.listed(tmp_path / "checkpoints")) == 15
    train(tmp_path, **another)
    recorded(tmp_path, configs=["0" * 64])
    with pytest.raises(LockstepError, match="records no such config"):
        train(tmp_path, **another, train={"steps": 30})


def test_runs_of_earlier_versions_which_record_neither_go_on(tmp_path):
    train(tmp_path)
    recorded(tmp_path, run=None, configs=None)
    train(tmp_path, train={"steps": 25})
    train(tmp_path, train={"steps": 30})
