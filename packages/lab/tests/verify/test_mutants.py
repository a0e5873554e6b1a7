"""Each broken engine or task is noticed by the check that was written for it, and what is right is not.

Every test run includes a mutant, each day another mutant. The name of the test tells the number of the day.
LOCKSTEP_MUTANTS=739577 runs the mutant of that day again. `make test-all` runs all mutants; with
LOCKSTEP_MUTANTS_PART=2/8 it runs the second of eight parts of them, because all take hours.
"""

import builtins
import datetime
import dis
import inspect
import os
import re

import pytest

from lockstep_lab.verify.checks import DEFAULT
from packages.lab.tests.verify import broken_tasks, mutants
from packages.lab.tests.verify.edits import function_of
from packages.lab.tests.verify.mutants import MUTANTS
from tests import ranks

DAY = int(os.environ.get("LOCKSTEP_MUTANTS", datetime.date.today().toordinal()))
PART = os.environ.get("LOCKSTEP_MUTANTS_PART", "1/1")


def mutants_of(day):
    return [list(MUTANTS)[day % len(MUTANTS)]]


def part_of(names, part):
    number, count = map(int, part.split("/"))
    return list(names)[number - 1 :: count]


def parameters():
    """Today's mutant, and all others for `make test-all`."""
    today = mutants_of(DAY)
    others = part_of((name for name in MUTANTS if name not in today), PART)
    found = [pytest.param(name, id=f"LOCKSTEP_MUTANTS={DAY}: {name}") for name in today]
    return found + [pytest.param(name, marks=pytest.mark.exhaustive) for name in others]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """What verify says of a base as it is. It is asked once for all checks that today's mutants of the base are for."""
    results = {}

    def verify_base(base, check):
        checks = [MUTANTS[name].check for name in mutants_of(DAY) if MUTANTS[name].base == base]
        checks = tuple(dict.fromkeys(checks)) if check in checks else (check,)
        if (base, checks) not in results:
            folder = tmp_path_factory.mktemp("clean") / "run"
            results[base, checks] = mutants.verify_base(base, ranks._ranks, folder, checks)
        return results[base, checks]

    return verify_base


@pytest.mark.parametrize("name", parameters())
def test_a_fault_is_noticed_by_the_check_written_for_it(name, clean, tmp_path):
    """The check passes the base as it is, and finds a fault in the mutant."""
    mutant = MUTANTS[name]
    right = clean(mutant.base, mutant.check)
    assert not right.error, right.error
    assert right.checks[mutant.check].status == "passed", right.checks[mutant.check].reason
    wrong = mutants.verify_mutant(name, ranks._ranks, tmp_path / "run", [mutant.check])
    assert wrong.faults == ([] if mutant.note else [mutant.check]), wrong.error or wrong.checks[mutant.check].reason
    assert mutant.is_found(wrong), (wrong.checks[mutant.check].reason, wrong.checks[mutant.check].notes)


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_fits_the_source_and_is_put_back(name):
    functions = [function_of(target) for target, _, _ in MUTANTS[name].edits]
    before = [function.__code__ for function in functions]
    with mutants.broken(MUTANTS[name]):
        assert all(function.__code__ is not code for function, code in zip(functions, before, strict=True))
    assert [function.__code__ for function in functions] == before


def globals_of(code):
    """Names that a function and the functions in it load as globals."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(globals_of(inner) for inner in code.co_consts if inspect.iscode(inner)))


def test_an_edit_uses_only_names_that_its_function_knows():
    """Otherwise a NameError would be found, and not the fault."""
    for name, mutant in MUTANTS.items():
        with mutants.broken(mutant):
            for function in {function_of(target) for target, _, _ in mutant.edits}:
                unknown = globals_of(function.__code__) - function.__globals__.keys() - vars(builtins).keys()
                assert not unknown, name


def test_every_mutant_has_its_day():
    days = [mutants_of(day) for day in range(2000)]
    assert {name for names in days for name in names} == MUTANTS.keys()


def test_parts_are_all_mutants_together():
    parts = [part_of(MUTANTS, f"{number}/8") for number in range(1, 9)]
    assert sorted(name for part in parts for name in part) == sorted(MUTANTS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_check_has_mutants_of_its_own():
    for check in DEFAULT:
        assert sum(one.check == check for one in MUTANTS.values()) >= 3, check


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
