"""Folds of patients: everyone once, no patient in two, answers spread evenly, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.ct.folds import Fold, folds_of


def test_a_fold_by_its_text():
    assert Fold.parse("2/5") == (2, 5)
    for text in ("0/5", "6/5", "1/1", "2", "a/b", "", "-1/5"):
        with pytest.raises(UsageError, match="is not a fold"):
            Fold.parse(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(6, 60), st.integers(1, 4), st.integers(0, 10**9))
def test_folds_are_patients_and_even(folds, count, questions, seed):
    rng = np.random.default_rng(seed)
    patients = [f"p{number}" for number in rng.integers(0, count, 2 * count)]
    if len(set(patients)) < folds:
        return
    values = rng.choice([0.0, 1.0, np.nan], (len(patients), questions))
    fold = folds_of(patients, values, folds, seed=seed)
    assert fold.min() >= 0
    assert fold.max() < folds
    by_patient = {name: set(fold[[patient == name for patient in patients]]) for name in patients}
    assert all(len(own) == 1 for own in by_patient.values())
    order = rng.permutation(len(patients))
    np.testing.assert_array_equal(
        folds_of([patients[row] for row in order], values[order], folds, seed=seed), fold[order]
    )


def test_rare_answers_are_spread_one_by_one():
    values = np.zeros((50, 2))
    values[:10, 0] = 1
    values[7:12, 1] = 1
    fold = folds_of([str(number) for number in range(50)], values, 5, seed=3)
    assert np.bincount(fold[values[:, 1] == 1], minlength=5).tolist() == [1] * 5
    positives = np.bincount(fold[values[:, 0] == 1], minlength=5)
    assert positives.min() >= 1
    assert positives.max() <= 3
    sizes = np.bincount(fold, minlength=5)
    assert sizes.max() - sizes.min() <= 2
    assert not np.array_equal(fold, folds_of([str(number) for number in range(50)], values, 5, seed=4))


def test_too_few_patients():
    with pytest.raises(DataError, match="2 patients are too few for 3 folds"):
        folds_of(["a", "b", "a"], np.zeros((3, 1)), 3, seed=0)
