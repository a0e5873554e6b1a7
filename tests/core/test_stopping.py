"""When a training ends before its last step."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import LockstepError, Trainer
from lockstep.core.stopping import Stopping, StopRule
from tests import runs
from tests.ranks import run_ranks
from tests.selection import mainly


def ends_after(rule, results):
    """How many evaluations a training with these results makes."""
    for count in range(1, len(results) + 1):
        if rule.reason(results[:count]):
            return count
    return None


@pytest.mark.parametrize(
    ("changes", "results", "count"),
    [
        ({"patience": 2}, [3, 2, 1, 2, 2, 0], 5),
        ({"patience": 2, "mode": "max"}, [1, 2, 3, 2, 3, 4], 5),  # 3 again is no improvement
        ({"patience": 1}, [math.nan, 2, 1], 1),
        ({"patience": 2}, [math.nan, 2, math.nan, 1, math.nan, math.nan, 0], 6),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 1.95, 1], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 1.8], None),
        ({"target": 1.0}, [3, 1.5, 1.0, 0.5], 3),
        ({"target": 1.0, "mode": "max"}, [0.5, 0.99, 1.2], 3),
        ({"target": -5.0, "patience": 2}, [3, 4, 5, -6], 3),
    ],
)
def test_the_evaluation_at_which_a_training_ends(changes, results, count):
    rule = StopRule(**({"metric": "eval/loss", "mode": "min"} | changes))
    assert ends_after(rule, results) == count


@pytest.mark.exhaustive  # as test_the_evaluation_at_which_a_training_ends
@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=False, width=16), max_size=30), st.integers(1, 5))
def test_a_training_ends_after_as_many_evaluations_without_a_new_best_as_its_patience(results, patience):
    numbers = [math.inf if math.isnan(result) else result for result in results]
    best_at, expected = -1, None
    for place, number in enumerate(numbers):
        if number < min(numbers[:place], default=math.inf):
            best_at = place
        if place - best_at >= patience:
            expected = place + 1
            break
    assert ends_after(StopRule(metric="eval/loss", mode="min", patience=patience), results) == expected


def test_an_evaluation_that_is_made_again_counts_once():
    stopping = Stopping(StopRule(metric="eval/loss", mode="min", patience=2))
    for step, loss in [(1, 3.0), (2, 4.0), (3, 5.0), (2, 4.0)]:
        stopping.add(step, {"eval/loss": loss})
    assert stopping.history.results == [(1, 3.0), (2, 4.0)]


# ---- whole trainings


class Valley(lockstep.Task):
    """The weight falls by 1 in each step, and the loss of the evaluation is its distance from -5."""

    def model(self):
        return nn.ParameterDict({"weight": nn.Parameter(torch.zeros(()))})

    def train_data(self):
        return TensorDataset(torch.ones(24))

    def eval_data(self):
        return TensorDataset(torch.ones(8))

    def loss(self, model, batch):
        weight = model["weight"]
        return batch[0].sum() * (weight if weight.requires_grad and torch.is_grad_enabled() else (weight + 5).abs())


SETTINGS = {
    "train": {
        "steps": 20,
        "eval_every_steps": 1,
        "stop_when": {"metric": "eval/loss", "mode": "min", "patience": 3},
    },
    "optim": {"name": "SGD", "lr": 1.0, "weight_decay": 0.0},
    "log": {"every_steps": 50},
}


def fit(folder, changes=None, **options):
    trainer = Trainer(runs.config(**(SETTINGS | (changes or {}))), run_dir=folder, quiet=True, **options)
    return trainer, trainer.fit(Valley())


def steps_saved(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.exhaustive  # as test_a_training_that_goes_on_after_a_break_ends_at_the_same_evaluation
def test_a_training_ends_and_saves_where_its_evaluations_get_no_better(tmp_path):
    _, results = fit(tmp_path)
    assert results["eval/loss"] == 3.0
    assert steps_saved(tmp_path)[-1] == 8
    log = (tmp_path / "train.log").read_text()
    text = "the training ended at step 8 of 20: eval/loss has not improved on 0 (step 5) for 3 evaluations"
    assert text in log
    assert "train/loss" in json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])  # of the last steps
    fit(tmp_path)  # again: nothing is left to do
    assert steps_saved(tmp_path)[-1] == 8
    assert "is complete at step 8: change train.stop_when to continue" in (tmp_path / "train.log").read_text()
    fit(tmp_path, {"train": SETTINGS["train"] | {"stop_when": None}})  # changed: on to the end
    assert steps_saved(tmp_path)[-1] == 20


def test_a_training_ends_at_its_target(tmp_path):
    changes = {"metric": "eval/loss", "mode": "min", "target": 2.0}
    fit(tmp_path, {"train": SETTINGS["train"] | {"stop_when": changes}})
    assert steps_saved(tmp_path)[-1] == 3
    assert "eval/loss reached 2 (train.stop_when.target=2)" in (tmp_path / "train.log").read_text()


def fit_on_ranks(folder, changes):
    from pathlib import Path

    fit(Path(folder), changes)


@pytest.mark.parametrize("world", mainly([2], [1, 2]))
def test_a_training_that_goes_on_after_a_break_ends_at_the_same_evaluation(tmp_path, world):
    """It is stopped at several places by ending after fewer steps, which saves there."""
    short = SETTINGS | {"schedule": {"total_steps": 20}}
    for steps in (4, 6, 7):
        run_ranks(world, fit_on_ranks, str(tmp_path), short | {"train": short["train"] | {"steps": steps}})
    run_ranks(world, fit_on_ranks, str(tmp_path), short)
    assert steps_saved(tmp_path)[-1] == 8


def test_another_metric_counts_from_where_it_is_asked_for(tmp_path):
    """The results in a checkpoint are those of the metric that decided then: no number of another metric counts."""
    first = {"metric": "eval/samples", "mode": "max", "patience": 2}
    fit(tmp_path, {"train": SETTINGS["train"] | {"stop_when": first}})
    assert steps_saved(tmp_path)[-1] == 3
    fit(tmp_path)  # by the loss, which is 2 after step 3, and best after step 5
    log = (tmp_path / "train.log").read_text()
    assert steps_saved(tmp_path)[-1] == 8
    assert "eval/loss has not improved on 0 (step 5) for 3 evaluations" in log
    assert "train.stop_when counts from here on: the earlier evaluations were of eval/samples" in log


def test_a_run_that_was_killed_in_its_last_evaluation_when_its_time_was_up_is_evaluated(tmp_path, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(
        "lockstep.core.parallel.stop_consensus.StopConsensus.elapsed_s", property(lambda _: float(next(clock)))
    )
    train = {"steps": 1000, "eval_every_steps": 500, "max_time": "2m"}

    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("lockstep.core.evaluation_run.evaluation.evaluate", kill)
        with pytest.raises(Killed):
            fit(tmp_path, {"train": train, "checkpoint": {"keep_best": "min eval/loss"}})
    steps = steps_saved(tmp_path)[-1]
    fit(tmp_path, {"train": train, "checkpoint": {"keep_best": "min eval/loss"}})
    assert steps_saved(tmp_path)[-1] == steps
    assert "eval/loss" in (tmp_path / "metrics.jsonl").read_text()


def test_a_training_ends_when_its_time_is_up_with_what_its_end_brings(tmp_path, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(
        "lockstep.core.parallel.stop_consensus.StopConsensus.elapsed_s", property(lambda _: float(next(clock)))
    )
    train = {"steps": 1000, "eval_every_steps": 500, "max_time": "2m"}
    _, results = fit(tmp_path, {"train": train})
    steps = steps_saved(tmp_path)[-1]
    assert 1 < steps < 100
    assert {"eval/loss", "train/loss"} <= results.keys()
    assert f"the training ended at step {steps} of 1000: its time is up after" in (tmp_path / "train.log").read_text()
    fit(tmp_path, {"train": train})  # the time of the first start counts
    assert steps_saved(tmp_path)[-1] == steps
    assert f"is complete at step {steps}: raise train.max_time" in (tmp_path / "train.log").read_text()
    fit(tmp_path, {"train": train | {"max_time": "20m"}})
    assert steps_saved(tmp_path)[-1] > steps


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ({"stop_when": {"metric": "eval/lss", "mode": "min", "patience": 1}}, "did you mean eval/loss"),
        ({"stop_when": {"metric": "loss", "mode": "min", "patience": 1}}, "write `eval/NAME`, such as `eval/loss`"),
        ({"stop_when": {"metric": "eval/loss", "mode": "min"}}, "give patience, target, or both"),
        ({"max_time": "4 hours"}, "is not a time"),
        (
            {"eval_every_steps": 0},
            r"the run never evaluates, so there is no eval/loss\n.* or remove train.stop_when$",
        ),
    ],
)
def test_bad_input_is_an_error_before_the_first_step(tmp_path, train, text):
    with pytest.raises((LockstepError, ValueError), match=text):
        fit(tmp_path, {"train": SETTINGS["train"] | train})
    assert not (tmp_path / "checkpoints").exists()
