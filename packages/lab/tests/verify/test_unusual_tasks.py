"""`lockstep verify` finds no fault in tasks that are right and unusual. `benchmarks/verify.py unusual` verifies all."""

import pytest

from lockstep.configs import config_file
from lockstep_lab.verify import command
from packages.lab.tests.verify.unusual_tasks import arguments, tasks
from tests import ranks
from tests.selection import mainly

TASKS = tasks()
QUICK = {  # by task: the check that was wrong about it
    "SpectralNorm": "accumulation",
    "ComplexWeights": "collectives",
    "UnusedByDesign": "collectives",
    "DropoutInEvaluation": "probe",
    "FixedTemperature": "evaluation",
    "GatheredNegatives": "collectives",
    "OnlyEmbeds": "metric",
    "Quantized": "ranks",
    "BalancedExperts": "evaluation",
    "Sampled": "loss",
    "TwoViewsOfGlobalBatch": "overfit",
    "Denoised": "overfit",
}
NOT_SHOWN = {("GatheredNegatives", "collectives"), ("OnlyEmbeds", "metric"), ("Sampled", "loss")}


def statuses(name, folder, checks=(), steps=8):
    """The checks that did not pass, with what they say, by check."""
    settings = config_file.load(arguments(TASKS[name])[0], arguments(TASKS[name])[1:])
    config = settings.model_copy(update={"batch": settings.batch.resolve(2)}).model_dump(by_alias=True)
    result = command.verify(
        config, 2, folder, checks=checks, quick=True, steps=steps, tell=lambda _: None, workers=ranks._ranks
    )
    return {check.name: (check.status, check.reason) for check in result.checks if check.status != "passed"}


@pytest.mark.parametrize("name", mainly(["SpectralNorm", "GatheredNegatives", "OnlyEmbeds"], QUICK))
def test_a_check_that_was_wrong_about_an_unusual_task_no_longer_is(name, tmp_path):
    found = statuses(name, tmp_path / "run", [QUICK[name]], steps=4)
    assert {check: status for check, (status, _) in found.items()} == (
        {QUICK[name]: "not shown"} if (name, QUICK[name]) in NOT_SHOWN else {}
    ), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TASKS)
def test_no_check_finds_a_fault_in_an_unusual_task(name, tmp_path):
    found = statuses(name, tmp_path / "run")
    assert not [reason for status, reason in found.values() if status == "fault"]


def test_there_are_many_unusual_tasks():
    assert len(TASKS) >= 40
