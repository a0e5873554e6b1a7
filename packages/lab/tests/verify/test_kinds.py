"""Right tasks of unusual kinds and their wrong neighbours, by what the probes of a task say."""

from pathlib import Path

import pytest

from lockstep.configs import config_file
from lockstep_lab.verify import command
from lockstep_lab.verify.data_probe import other_preparation
from lockstep_lab.verify.task_probe import probe_task
from tests import ranks, runs
from tests.selection import mainly

HERE = Path(__file__).resolve().parent
RIGHT, WRONG = HERE / "unusual_kinds.py", HERE / "wrong_kinds.py"


def verified(name, file, folder, checks):
    settings = runs.config(task={"kind": f"{file}:{name}"}, batch={"global": 40})
    config = config_file.parse(settings).model_dump(by_alias=True)
    result = command.verify(config, 2, folder, checks=checks, quick=True, tell=lambda _: None, workers=ranks._ranks)
    return result.checks


def probe(name, file):
    return probe_task(runs.config(task={"kind": f"{file}:{name}"}), 40)


def test_a_mean_inside_of_a_sum_is_found_although_the_loss_draws_random_numbers():
    right, wrong = probe("Variational", RIGHT), probe("MeanDivergence", WRONG)
    assert (right.is_no_sum, right.coupling < 1e-12, right.diagnosis()) == (False, True, "")
    assert wrong.is_no_sum
    assert "a term is a mean or is added once per batch, or samples influence each other, first in `add` at wrong" in (
        wrong.diagnosis()
    )
    assert "draws random numbers" in wrong.dependence_on_split()


@pytest.mark.parametrize(
    ("name", "place"),
    mainly(
        [("Quantized", "the module 1 (_Range), by its buffers low, high,"), ("BalancedExperts", "the head 'balance'")],
        [
            ("Quantized", "the module 1 (_Range), by its buffers low, high,"),
            ("BalancedExperts", "the head 'balance'"),
            ("Decorrelated", "`sub` at unusual_kinds.py"),
        ],
    ),
)
def test_what_depends_on_statistics_of_the_batch_is_named_with_the_ways_out(name, place):
    found = probe(name, RIGHT)
    assert found.dependence_on_split().startswith(place)
    assert "Accept that it counts for each micro-batch, synchronise it over ranks, freeze it" in found.obstacle()
    assert (found.is_no_sum, found.compares_samples, found.diagnosis()) == (False, "", "")


@pytest.mark.parametrize("name", ["BalanceOncePerBatch", "StatisticsInEvaluation"])
def test_a_term_once_per_batch_and_statistics_in_evaluations_are_not_intended(name):
    found = probe(name, WRONG)
    assert found.is_no_sum
    assert found.by_statistics == ""
    assert found.adds_once == (name == "BalanceOncePerBatch")


def test_outputs_that_change_with_the_next_token_are_found_where_that_is_the_target():
    assert probe("CausalTokens", RIGHT).sees_future == ""
    assert probe("MaskedTokensAnywhere", RIGHT).sees_future == ""
    for name in ("NoMask", "NoMaskInsideTheLoss"):
        found = probe(name, WRONG).sees_future
        assert found == "the output at position 1 changes with the input at position 2"


def test_states_that_change_with_the_next_state_are_found_where_that_is_the_target():
    assert probe("SeesNextState", WRONG).sees_future == "the output at position 2 changes with the input at position 3"
    assert probe("SeesPastStates", WRONG).sees_future == ""


def test_a_mean_over_a_count_of_the_micro_batch_is_named_with_the_count():
    found = probe("MeanOverHidden", WRONG)
    assert found.is_no_sum
    assert "it was divided by the sum that `sum` at wrong_kinds.py:" in found.diagnosis()
    assert "Return the SUM, and this count by Task.weight" in found.diagnosis()


def test_a_collate_that_normalises_by_the_micro_batch_is_named():
    found = probe("NormalisedInCollate", WRONG)
    assert found.is_no_sum
    assert found.diagnosis().startswith("Task.collate gives a sample other numbers in another micro-batch")


def test_a_method_that_writes_into_its_batch_is_found():
    assert probe("WritesIntoBatch", WRONG).changes_batch == "Task.loss"
    assert probe("PredictsIntoBatch", WRONG).changes_batch == "Task.predict"
    assert probe("NormalisedInCollate", WRONG).changes_batch == ""


def test_dropout_in_predictions_is_found_except_in_the_mean_of_several_passes():
    assert probe("MeanOfPasses", RIGHT).dropped_in_prediction == ""
    assert probe("DropoutInEvaluation", HERE / "unusual_models.py").dropped_in_prediction == ""  # training=True
    for name in ("DropsInPrediction", "PredictsInTraining"):
        assert probe(name, WRONG).dropped_in_prediction.startswith("bernoulli_ at wrong_kinds.py:")


def test_inputs_that_are_normalised_differently_for_evaluations_are_found():
    def found(name, file):
        return other_preparation(runs.config(task={"kind": f"{file}:{name}"}))

    assert [found(name, RIGHT) for name in ("StronglyAugmented", "TwoViewsOfBatch", "CausalTokens")] == [""] * 3
    assert " in training, but the same samples have mean " in found("OtherScale", WRONG)
    assert "Likely cause: Task.prepare normalises them differently" in found("OtherDeviation", WRONG)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        ("BlindDenoised", "overfit", "cannot overfit: the loss of 8 samples is"),
        ("MeanDivergence", "gradients", "a term is a mean or is added once per batch"),
        ("NoMask", "predictions", "which is its target. Likely cause: the model has no causal mask"),
        ("DropsInPrediction", "predictions", "drops features at random, with bernoulli_ at wrong_kinds.py"),
        ("OtherScale", "evaluation", "Task.prepare normalises them differently"),
    ],
)
def test_wrong_tasks_are_found_by_the_whole_command(name, check, said, tmp_path):
    result = verified(name, WRONG, tmp_path, [check])[0]
    assert result.status == "fault"
    assert said in result.reason
    page = "Next: lockstep --explain global_loss"
    assert f"Next: lockstep verify {WRONG}:{name} --checks " in result.reason or result.reason.endswith(page)


@pytest.mark.exhaustive
def test_samples_that_influence_each_other_are_one_finding(tmp_path):
    checks = ["gradients", "ranks", "accumulation", "evaluation"]
    first, *others = verified("StatisticsInEvaluation", WRONG, tmp_path, checks)
    assert (first.status, "first in the model (Net)" in first.reason) == ("fault", True)
    assert first.reason.endswith("Next: lockstep --explain global_loss")
    assert [one.reason for one in others] == ["cannot be shown because of the cause that gradients names"] * 3
