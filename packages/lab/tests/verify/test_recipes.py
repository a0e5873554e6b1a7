"""`lockstep verify` finds no fault in any shipped recipe."""

import pytest

from lockstep.configs import config_file
from lockstep_lab.verify import command
from packages.lab.tests.verify import recipe_cases
from tests import ranks

RECIPES = sorted(config_file.recipes())
NOT_SHOWN = {
    ("ct_small", "metric"): "6 evaluation samples are too few",
}


def results(recipe, folder, checks=(), **options):
    """What the checks say of a recipe on two ranks: by check, its status and its reason."""
    folder.mkdir()
    settings = config_file.load(recipe, recipe_cases.overrides(recipe, folder))
    config = settings.model_copy(update={"batch": settings.batch.resolve(2)}).model_dump(by_alias=True)
    run = {"checks": checks, "quick": True, "tell": lambda _: None, "workers": ranks._ranks} | options
    result = command.verify(config, 2, folder / "run", **run)
    return {check.name: (check.status, check.reason) for check in result.checks}


def assert_right(recipe, found):
    """Assert that no check found a fault, and that those that are not shown are known, with their reasons."""
    assert not [reason for status, reason in found.values() if status == "fault"], found
    lacking = {name: reason for name, (status, reason) in found.items() if status == "not shown"}
    known = {check: reason for (name, check), reason in NOT_SHOWN.items() if name == recipe and check in found}
    assert lacking.keys() == known.keys(), lacking
    assert all(known[name] in reason for name, reason in lacking.items()), lacking


def test_every_recipe_has_small_data():
    assert sorted(recipe_cases.CASES) == RECIPES


@pytest.mark.exhaustive  # the tests of each task compare its trainings on ranks
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_and_two_ranks_train_the_same_model_of_a_recipe(recipe, tmp_path):
    assert_right(recipe, results(recipe, tmp_path / "small", ["ranks"], steps=4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_check_finds_a_fault_in_a_recipe(recipe, tmp_path):
    found = results(recipe, tmp_path / "small")
    assert len(found) == 16
    assert_right(recipe, found)
