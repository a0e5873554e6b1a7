"""The log of a run that was stopped between two entries and resumed is that of a run that was not."""

import contextlib
import json
import shutil

import pytest
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Metrics
from lockstep.core.errors import Preempted
from tests import own_tasks, runs
from tests.core.parallel.test_virtual_ranks import Images, without_times
from tests.parts.test_epochs import StopAfter
from tests.ranks import run_ranks
from tests.selection import mainly


class Measured(Images):
    """With metrics that add up fractions: their bits depend on the order of addition."""

    def metrics(self):
        def update(metrics, output, batch):
            best = output.softmax(1).max(1).values
            metrics["confidence"].update(best)
            metrics["error"].update(best, batch[1].float())
            metrics["accuracy"].update(output, batch[1])

        found = {"confidence": MeanMetric(), "error": MeanSquaredError(), "accuracy": MulticlassAccuracy(5)}
        return Metrics(found, update)


def fit(kind, options, folder, settings, stop=None):
    """On ranks: train, or stop after a step. The entries of the log."""
    task = Measured() if kind == "Measured" else getattr(own_tasks, kind)(**options)
    with contextlib.suppress(Preempted):
        runs.Trainer(settings, run_dir=folder, quiet=True).fit(task, StopAfter(stop))
    return [without_times(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def whole_and_stopped(folder, settings, turns, kind="Measured", **options):
    """The logs of a run on the first number of ranks, and of one that stops; turns: (ranks, step)."""
    whole = run_ranks(turns[0][0], fit, kind, options, folder / "whole", settings)[0]
    for ranks, stop in turns:
        stopped = run_ranks(ranks, fit, kind, options, folder / "stopped", settings, stop)[0]
    return whole, stopped


def settings_of(**sections):
    base = {"batch": {"micro": 3}, "data": {"drop_last": True}, "train": {"steps": 14, "eval_every_steps": 6}}
    return runs.config(**base | sections)


@pytest.mark.parametrize(("every", "stops"), mainly([(5, (3, 8))], [(5, (3, 8)), (3, (7, 13)), (100, (1, 5))]))
def test_with_virtual_ranks_on_other_numbers_of_ranks(every, stops, tmp_path):
    settings = settings_of(log={"every_steps": every}, parallel={"virtual_ranks": 4})
    whole, stopped = whole_and_stopped(tmp_path, settings, [(2, stops[0]), (4, stops[1]), (1, None)])
    assert stopped == whole
    first = next(entry for entry in whole if "train/loss" in entry)
    assert {"train/grad_norm", "train/confidence", "train/error"} <= first.keys()


def test_from_a_checkpoint_after_which_the_run_continued(tmp_path):
    settings = settings_of(checkpoint={"every_steps": 2, "keep_last": 9}, parallel={"virtual_ranks": 4})
    whole = run_ranks(4, fit, "Measured", {}, tmp_path / "run", settings)[0]
    for ranks, step in ((3, 12), (2, 8), (1, 2)):
        for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        assert run_ranks(ranks, fit, "Measured", {}, tmp_path / "run", settings)[0] == whole


@pytest.mark.parametrize("ranks", mainly([2], [1, 2, 3]))
def test_on_the_same_number_of_ranks(ranks, tmp_path):
    whole, stopped = whole_and_stopped(tmp_path, settings_of(), [(ranks, 3), (ranks, 8), (ranks, None)])
    assert stopped == whole


def test_on_other_numbers_of_ranks_to_rounding(tmp_path):
    settings, turns = settings_of(train={"steps": 14}), [(2, 3), (3, 8), (1, None)]
    whole, stopped = whole_and_stopped(tmp_path, settings, turns, "ClassesWithOutput", length=50)
    assert stopped == [pytest.approx(entry, rel=1e-6) for entry in whole]
    assert "train/accuracy" in whole[0]


def test_unreadable_samples_of_the_steps_before_a_stop_count(tmp_path):
    settings = settings_of(train={"steps": 14}, data={"on_error": "skip"})
    turns = [(2, 3), (2, 8), (2, None)]
    whole, stopped = whole_and_stopped(tmp_path, settings, turns, "FromFiles", broken=[3, 4, 20])
    assert stopped == whole
    assert any("data/bad" in entry for entry in whole)
