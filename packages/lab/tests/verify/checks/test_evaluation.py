"""Checks of evaluations and predictions, on results that a test makes up."""

import math

import numpy as np
import pytest
import torch

from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.checks import evaluation
from lockstep_lab.verify.constant_baseline import ConstantBaseline
from lockstep_lab.verify.task_probe import TaskProbe
from packages.lab.tests.verify.made_up import experiments, recording

FALLING = [4.0 / (step + 1) for step in range(60)]


def baseline(**more):
    return ConstantBaseline(
        **{
            "values": {"loss": 1.0, "accuracy": 0.5},
            "untrained": {"loss": 2.0, "accuracy": 0.2},
            "higher_is_better": {"accuracy": True},
        }
        | more
    )


# ---- evaluation


def evaluated(many=None, one=None, plain=None, eval_samples=50, smaller=None, preparation="", **nature):
    base = {"loss": 0.5, "accuracy": 0.75, "samples": 50, "bad": 0}
    answers = {
        "undisturbed": [recording(), recording()],
        "data-sizes": [(26, eval_samples)],
        "preparation": preparation,
        "task-probe": TaskProbe(**{"epsilon": 1e-16} | nature),
    }
    answers |= {
        f"evaluated-{how}": base | (values or {})
        for how, values in (("on-all-ranks", many), ("on-one-process", one), ("by-a-loop", plain))
    }
    answers["evaluated-by-a-loop-in-smaller-batches"] = answers["evaluated-by-a-loop"] | (smaller or {})
    return evaluation.evaluation(experiments(answers, batch={"global": 6}))


def test_equal_evaluations_pass():
    result = evaluated()
    assert result.status == "passed"
    assert result.reason.startswith("2 metrics over 50 samples")
    assert result.rows[0] == {"metric": "loss", "2 ranks": 0.5, "one process": 0.5, "plain loop": 0.5}


@pytest.mark.parametrize("where", ["many", "one", "plain"])
def test_a_metric_that_differs_anywhere_is_a_fault(where):
    result = evaluated(**{where: {"accuracy": 0.7501}})
    assert result.status == "fault"
    assert result.reason.startswith("accuracy is ")
    assert result.value == pytest.approx(0.0001 / 0.7501)
    assert evaluated(**{where: {"accuracy": 0.75 * (1 + 1e-8)}}).status == "passed"


@pytest.mark.parametrize("where", ["many", "plain"])
def test_a_metric_that_one_side_lacks_or_cannot_compute_is_a_fault(where):
    assert evaluated(**{where: {"extra": 1.0}}).status == "fault"
    assert evaluated(**{where: {"accuracy": math.nan}}).status == "fault"
    assert evaluated(**{where: {"extra": math.nan}}).status == "fault"
    assert evaluated(**{where: {"samples": 49}}).status == "fault"


def test_the_loss_may_depend_on_the_cut_where_it_compares_samples_and_metrics_may_not():
    assert evaluated(smaller={"loss": 0.4}).status == "fault"
    assert (
        evaluated(smaller={"loss": 0.4, "loss/a": 0.1}, compares_samples="with matmul at task.py:3").status == "passed"
    )
    assert evaluated(smaller={"loss": 0.4}, by_statistics="the module 1").status == "passed"
    assert evaluated(smaller={"accuracy": 0.7}, compares_samples="with matmul at task.py:3").status == "fault"
    named = evaluated(smaller={"loss": 0.4}, epsilon=1e-16, coupling=0.1)
    assert "Likely cause: the loss of a micro-batch is not the sum over its samples" in named.reason


def test_a_metric_that_depends_on_how_samples_are_cut_is_a_fault():
    result = evaluated(smaller={"accuracy": 0.7})
    assert result.status == "fault"
    assert result.reason.startswith(
        "accuracy is 0.75 if a plain loop evaluates 6 samples at a time, and 0.7 if it evaluates 3: it must not"
    )
    assert evaluated(smaller={"accuracy": 0.75 + 1e-7}).status == "passed"
    assert evaluated(smaller={"accuracy": 0.7}, random_in_evaluation=["randn_like"]).status == "passed"


@pytest.mark.parametrize("what", ["random_in_evaluation", "random_in_prediction"])
def test_an_evaluation_that_draws_random_numbers_is_compared_between_ranks_alone(what):
    drawing = {what: ["randn_like"]}
    result = evaluated(plain={"accuracy": 0.5}, **drawing)
    assert (result.status, result.value) == ("passed", 0.0)
    (note,) = result.notes
    assert note.startswith(
        "not compared with a plain loop: the task draws random numbers in evaluation mode (randn_like)"
    )
    assert evaluated(many={"accuracy": 0.5}, **drawing).status == "fault"


def test_the_same_nan_is_no_difference():
    nan = {"accuracy": math.nan}
    assert evaluated(nan, nan, nan).status == "passed"


def test_without_evaluation_data_nothing_is_shown():
    assert evaluated(eval_samples=0).status == "not shown"


# ---- predictions


def described(plain, engine=None, precision="fp32", **more):
    """plain, engine: rows by a plain loop, and those of all ranks, which lack the truth."""
    if engine is None:
        engine = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    answers = {
        "learned-1": recording(FALLING),
        "baseline": baseline(**more),
        "predicted-by-a-loop": [plain],
        "predicted": [engine],
    }
    return evaluation.predictions(experiments(answers, precision=precision))


def rows(predictions, truths):
    return [
        {"truth": t, "prediction": p, "probability": place / 50}
        for place, (p, t) in enumerate(zip(predictions, truths, strict=True))
    ]


def test_different_predictions_pass():
    result = described(rows([0, 1, 1], [0, 1, 0]))
    assert (result.status, result.value) == ("passed", 2.0)
    assert result.rows[1] == {"sample": 1, "truth": 1, "prediction": 1, "probability": 0.02}


def test_predictions_that_are_drawn_show_nothing():
    answers = {
        "learned-1": recording(FALLING),
        "baseline": baseline(),
        "task-probe": TaskProbe(random_in_prediction=["multinomial"]),
    }
    result = evaluation.predictions(experiments(answers))
    assert result.status == "not shown"
    assert "Task.predict draws random numbers (multinomial)" in result.reason


def test_all_predicted_alike_where_truths_differ_is_a_fault():
    assert described(rows([1, 1, 1], [0, 1, 0])).status == "fault"
    same = described(rows([1, 1, 1], [1, 1, 1]))
    assert same.status == "passed"
    assert same.reason.startswith("1 different prediction for 3 samples with 1 different truth, equal to")


def test_without_a_presenter_for_truths_nothing_is_said_about_them():
    result = described(rows([1, 0, 1], [None, None, None]))
    assert result.reason == "2 different predictions for 3 samples, equal to those of a plain loop"
    assert "Presenter.truth returns no label" in result.notes[0]


def test_outputs_that_are_described_alike_and_differ_are_a_fault():
    def with_outputs(mean, shape=(4,)):
        return [row | {worker_functions.OUTPUT: [(shape, mean, 2.0)]} for row in rows([0, 1], [0, 1])]

    def by_engine(*arguments, **options):
        return [{key: row[key] for key in row if key != "truth"} for row in with_outputs(*arguments, **options)]

    result = described(with_outputs(1.0), by_engine(1.5))
    assert result.status == "fault"
    assert "the output for sample 0 by itself has tensors of (shape, mean, norm) [((4,), 1.0, 2.0)]" in result.reason
    assert "[((4,), 1.0, 2.0)], and [((4,), 1.5, 2.0)] on 2 ranks" in result.reason
    assert described(with_outputs(1.0), by_engine(1.0)).status == "passed"
    assert described(with_outputs(1.0), by_engine(1.5, shape=(6,))).status == "passed"  # padded in a batch
    assert (
        described(
            with_outputs(1.0), [{"prediction": 0, "probability": 0.0}, {"prediction": 1, "probability": 0.02}]
        ).status
        == "fault"
    )


def test_predictions_that_are_not_those_of_a_plain_loop_are_a_fault():
    plain = rows([0, 1, 0, 1], [0, 1, 0, 1])
    engine = [{"prediction": one, "probability": place / 50} for place, one in enumerate([0, 0, 1, 1])]
    result = described(plain, engine)
    assert result.status == "fault"
    assert result.reason.startswith("2 of 4 predictions (4 made) differ from a plain loop's: sample 1 by itself is")
    assert (
        described(plain, [row | {"prediction": one} for row, one in zip(engine, [0, 1, 0, 1], strict=True)]).status
        == "passed"
    )


def test_outputs_that_a_batch_pads_are_compared_before_the_padding():
    plain = [{"truth": None, "output": torch.full((2, 50), number)} for number in (0.0, 1.0)]
    padded = [{"output": torch.cat([row["output"], torch.full((3, 50), 9.0)])} for row in plain]
    result = described(plain, padded)
    assert result.status == "passed"
    assert result.notes[0].startswith("outputs are padded to the longest sample of a batch, such as from (2, 50) to (5")
    result = described(plain, [{"output": row["output"] + 1} for row in padded])
    assert result.status == "fault"
    assert "has the shape (2, 50) alone, and (5, 50) on 2 ranks: batches are padded" in result.reason
    assert len(result.reason) < 1000


def test_predictions_that_are_incomplete_or_too_many_are_a_fault():
    plain = rows([0, 1, 0, 1], [0, 1, 0, 1])
    whole = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    for engine in (whole[:3], [*whole, whole[0]], []):
        assert described(plain, engine).status == "fault"


def test_a_few_predictions_may_be_on_the_edge_and_numbers_are_compared_to_rounding():
    plain = rows([place % 2 for place in range(40)], [place % 2 for place in range(40)])
    engine = [{key: value for key, value in row.items() if key != "truth"} for row in plain]
    engine[7]["prediction"], engine[9]["prediction"] = 5, 5
    assert described(plain, engine).status == "passed"
    engine[11]["prediction"] = 5
    assert described(plain, engine).status == "fault"
    near = [{"prediction": row["prediction"], "probability": row["probability"] + 0.01} for row in plain]
    assert described(plain, near).status == "fault"
    assert described(plain, near, precision="bf16").status == "passed"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": [0.5, 1], "truth": 3}, {"a": [0.5001, 1]}, True),
        ({"a": [0.5, 1]}, {"a": [0.6, 1]}, False),
        ({"a": [0.5]}, {"a": [0.5, 0.5]}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": math.nan}, {"a": math.nan}, True),
        ({"a": "cat"}, {"a": "dog"}, False),
        ({"a": {"b": 1.0}}, {"a": {"b": 1.0}}, True),
        ({"a": torch.tensor([0.5, 2.0])}, {"a": torch.tensor([0.5001, 2.0])}, True),
        ({"a": torch.tensor([0.5, 2.0])}, {"a": torch.tensor([0.6, 2.0])}, False),
        ({"a": np.float32(0.5)}, {"a": np.float32(0.5001)}, True),
        ({"a": np.zeros(3)}, {"a": np.zeros(2)}, False),
        ({"a": np.zeros(2)}, {"a": np.array([0.0, 0.0, 7.0])}, True),  # a batch padded it
        ({"a": np.zeros(2)}, {"a": np.array([0.0, 7.0, 7.0])}, False),
        ({"a": torch.ones(2, 3)}, {"a": torch.ones(4, 5)}, True),
    ],
)
def test_descriptions_are_alike_to_rounding(one, other, same):
    assert evaluation._is_same_prediction(one, other, 1e-3) is same


def test_nothing_to_predict_shows_nothing():
    assert "no evaluation data" in described([], no_data=True).reason
    assert "no predict" in described([], no_predict=True).reason


def test_only_some_rows_are_shown():
    assert len(described(rows(range(40), range(40))).rows) == 12


def test_a_sample_that_the_plan_of_an_evaluation_uses_twice_is_named(monkeypatch):
    plans = {"the plan of an evaluation": [0, 1, 1, 3], "the plan of a prediction": [0, 1, 2, 3]}
    made = experiments({"evaluation-plan": [plans]})
    monkeypatch.setattr(made, "run", lambda *arguments: [plans])
    assert "uses sample 1 2 times" in evaluation._wrong_plan(made, 4, 2)
    plans["the plan of an evaluation"] = [0, 2, 1, 3]
    assert evaluation._wrong_plan(made, 4, 2) == ""
    plans["the plan of a prediction"] = [0, 1, 3]
    assert "the plan of a prediction of 4 samples" in evaluation._wrong_plan(made, 4, 2)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"sees_future": "the output at position 1 changes"}, "Likely cause: the model has no causal mask"),
        (
            {"dropped_in_prediction": "bernoulli_ at task.py:3", "random_in_prediction": ["bernoulli_"]},
            "drops features",
        ),
    ],
)
def test_predictions_that_see_their_target_or_drop_features_are_a_fault(found, said):
    baseline = ConstantBaseline()
    answers = {"learned-1": recording([1.0]), "baseline": baseline, "task-probe": TaskProbe(**found)}
    result = evaluation.predictions(experiments(answers))
    assert result.status == "fault"
    assert said in result.reason


def test_other_inputs_in_evaluations_are_a_fault():
    result = evaluated(preparation="inputs have mean 0 in training, but 100")
    assert (result.status, result.reason) == ("fault", "inputs have mean 0 in training, but 100")
