"""Folds of patients for cross-validation, with nearly equal shares of every known answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.core.data.order import permute
from lockstep.core.errors import DataError, UsageError, number_of
from lockstep_recipes.tasks.arrays import Array


class Fold(NamedTuple):
    """The fold for evaluation."""

    number: int
    """Counted from 1."""
    folds: int

    @staticmethod
    def parse(text: str) -> Fold:
        """The fold that `2/5` names: the second of five.

        Raises:
            UsageError: the text does not name a fold.
        """
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]) or int(match[2]) < 2:
            remedy = "write 2/5 for the second of five folds"
            raise UsageError(f"{text!r} is not a fold", where="data.fold", remedy=remedy)
        return Fold(int(match[1]), int(match[2]))


def folds_of(patients: Sequence[str], values: Array, count: int, *, seed: int) -> npt.NDArray[np.int64]:
    """The fold of each row, from 0. All rows of a patient are in one fold.

    Iterative stratification (Sechidis, Tsoumakas, Vlahavas, ECML PKDD 2011, algorithm 1): the rarest answer is
    distributed first. A patient has the answers of all of their rows. The result does not depend on the order of rows.

    Args:
        patients: the patient of each row.
        values: (rows, questions): 1, 0 or NaN.
        count: number of folds.

    Returns:
        int64 (rows).

    Raises:
        DataError: there are fewer patients than folds.
    """
    names = sorted(set(patients))
    if len(names) < count:
        remedy = "use fewer folds"
        raise DataError(
            f"{number_of(len(names), 'patient', 'is', 'are')} too few for {count} folds",
            where="data.fold",
            remedy=remedy,
        )
    place = {name: number for number, name in enumerate(names)}
    mine = np.array([place[name] for name in patients])
    answers = np.zeros((len(names), 2 * values.shape[1] + 1), dtype=bool)
    np.logical_or.at(
        answers, mine, np.concatenate([values == 1, values == 0, np.ones((len(values), 1))], 1).astype(bool)
    )
    shuffled = np.asarray(permute(np.arange(len(names)), len(names), seed))  # ties are broken at random
    fold: npt.NDArray[np.int64] = np.full(len(names), -1, dtype=np.int64)
    wanted = np.repeat(answers.sum(0, dtype=np.float64)[None] / count, count, axis=0)  # (folds, answers) still missing
    while (left := fold < 0).any():
        rest = answers[left].sum(0)
        rarest = int(np.argmin(np.where(rest > 0, rest, len(names) + 1)))
        for number in shuffled[(left & answers[:, rarest])[shuffled]]:
            # The last column counts patients: it decides between folds that need the answer equally.
            best = max(range(count), key=lambda one: (wanted[one, rarest].round(9), wanted[one, -1].round(9), -one))
            fold[number] = best
            wanted[best] -= answers[number]
    of_rows: npt.NDArray[np.int64] = fold[mine]
    return of_rows
