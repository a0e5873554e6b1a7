"""A check is worth what it catches: each broken engine or task is noticed by the check that it was written for, and what is right is not."""

import inspect
import re

import pytest

from lockstep.verify.checks import CHECKS
from tests import ranks
from tests.verify import broken_tasks, mutants
from tests.verify.mutants import MUTANTS, SURVIVORS

QUICK = (
    "one rank drifts by 1e-7",
    "one micro-batch twice",
    "all ranks read rank 0's share",
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """What verify says of a base as it is, made once for each set of checks."""
    found = {}

    def judge(base, checks):
        if (base, checks) not in found:
            found[base, checks] = mutants.judge_clean(
                base, ranks._ranks, tmp_path_factory.mktemp("clean") / "run", checks
            )
        return found[base, checks]

    return judge


def catches(name, checks, clean, folder):
    mutant = MUTANTS[name]
    right = clean(mutant.base, checks)
    assert not right.error, right.error
    assert right.checks[mutant.check].status == "passed", right.checks[mutant.check].reason
    wrong = mutants.judge(name, ranks._ranks, folder, [mutant.check])
    assert wrong.faults == [mutant.check], wrong.error or wrong.checks[mutant.check].reason


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_engine_is_noticed(name, clean, tmp_path):
    checks = tuple(dict.fromkeys(MUTANTS[one].check for one in QUICK if MUTANTS[one].base == MUTANTS[name].base))
    catches(name, checks, clean, tmp_path / "run")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(reason=SURVIVORS[name], strict=True)] if name in SURVIVORS else [])
        for name in MUTANTS
        if name not in QUICK
    ],
)
def test_every_broken_engine_is_noticed_by_the_check_written_for_it(name, clean, tmp_path):
    catches(name, (MUTANTS[name].check,), clean, tmp_path / "run")


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_fits_the_source_and_is_put_back(name):
    functions = [mutants._function(target) for target, _, _ in MUTANTS[name].edits]
    before = [function.__code__ for function in functions]
    with mutants.broken(MUTANTS[name]):
        assert all(function.__code__ is not code for function, code in zip(functions, before, strict=True))
    assert [function.__code__ for function in functions] == before


def test_each_check_has_mutants_of_its_own():
    for check in CHECKS:
        assert sum(one.check == check and name not in SURVIVORS for name, one in MUTANTS.items()) >= 3, check


def test_each_broken_task_is_used_and_says_what_is_wrong():
    used = {one.task for one in MUTANTS.values() if one.task} | {
        one.partition(":")[0] for base in mutants.BASES.values() for one in base[:1]
    }
    tasks = {
        name: one
        for name, one in vars(broken_tasks).items()
        if inspect.isclass(one) and issubclass(one, broken_tasks.Task)
    }
    assert tasks.keys() - {"Task"} == used
    assert all(re.search(r"\w\.", tasks[name].__doc__) for name in used)
