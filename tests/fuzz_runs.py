"""Train a `Case` with Lockstep, on ranks or in this process, and compare it with plain torch or with itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep import Trainer
from tests import runs
from tests.fuzz_case import Case, settings_of
from tests.fuzz_plain import Result, Row, train_plainly
from tests.fuzz_shrink import smallest
from tests.fuzz_tasks import task_of
from tests.ranks import run_ranks

TIGHT = 1e-9
TOLD = ("step", "epoch", "train/loss", "train/lr", "train/grad_norm", "train/skipped", "data/bad", "eval/")


class Different(AssertionError):
    pass


@dataclass
class Found:
    """What a run gave on one rank.

    weights: final weights by name. rows: on rank 0 the entries of the log. afterwards: what `Trainer.evaluate` or
    `Trainer.predict` gave. error: the text of the error that the run ended with.
    """

    weights: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    afterwards: Any = None
    error: str = ""


# ---- running


def fit(case: Case, folder: Path, resumed: bool = False) -> Found:
    """Train to the end.

    resumed: begin with the checkpoints up to `resume_at`, as a run does that was killed after it had saved there.
    """
    settings = settings_of(case)
    first = os.environ.get("RANK", "0") == "0"
    if resumed:
        if first:
            forget_later(folder, case.resume_at)
        settings["parallel"]["strategy"] = case.resume_strategy or case.strategy
        settings["batch"] |= {"micro": case.resume_micro} if case.resume_micro else {}
    weights, _ = runs.fit(task_of(case), settings, folder)
    found = Found({name: tensor.numpy() for name, tensor in weights.items()})
    if first:  # the only one who writes the log; another may leave before it is written
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.rows = [{name: value for name, value in line.items() if name.startswith(TOLD)} for line in lines]
    if case.afterwards and resumed == bool(case.resume_at):
        again = Trainer(settings, run_dir=folder, quiet=True)
        found.afterwards = (
            again.evaluate(task_of(case)) if case.afterwards == "evaluate" else again.predict(task_of(case))
        )
    return found


def forget_later(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def fit_all(cases: Sequence[tuple[Case, str]], resumed: bool) -> list[Found]:
    """Each case in its folder; an error ends the list."""
    answers: list[Found] = []
    for number, (case, folder) in enumerate(cases):
        torch.manual_seed(number)  # what a process did before must not matter
        try:
            answers.append(fit(case, Path(folder), resumed))
        except Exception as error:
            answers.append(Found(error=f"{type(error).__name__}: {error}"))
            break
    return answers


def on_ranks(world: int, cases: Sequence[tuple[Case, str]], resumed: bool) -> list[list[Found]]:
    """For each case the answer of each rank; cases after one that failed have none."""
    if world == 1:
        return [[answer] for answer in fit_all(cases, resumed)]
    by_rank = run_ranks(world, fit_all, list(cases), resumed)
    return [list(answers) for answers in zip(*by_rank, strict=False)]


def outcomes(cases: Sequence[Case]) -> list[list[list[Found]]]:
    """For each case, for its run and, where the case has one, for its resumed run: the answer of each rank.

    All cases have the same number of ranks.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        placed = [(case, f"{folder}/{number}") for number, case in enumerate(cases)]
        found = [[ranks] for ranks in on_ranks(cases[0].world, placed, resumed=False)]
        ended = [number for number, (ranks,) in enumerate(found) if not any(one.error for one in ranks)]
        for world in (1, 2, 3):
            numbers = [
                number
                for number in ended
                if cases[number].resume_at and (cases[number].resume_world or cases[number].world) == world
            ]
            for number, ranks in zip(
                numbers,
                on_ranks(world, [placed[number] for number in numbers], resumed=True) if numbers else [],
                strict=False,
            ):
                found[number].append(ranks)
    return found


# ---- comparing


def check(kind: str, cases: Sequence[Case]) -> None:
    """Raise `Different` for the first case that fails, with the smallest one that fails alike.

    Args:
        kind: `plain` compares with plain torch, `resumed` a run that was stopped with one that was not (bit by bit),
            `workers` no loader worker with two (bit by bit).
        cases: of one world.
    """
    failed = first_failure(kind, cases)
    if failed is None:
        return
    case, text = failed
    alone = first_failure(kind, [case])
    if alone is None:
        raise Different(f"{text}\n\nonly after others: check({kind!r}, {list(cases)!r})")
    case, text = smallest(kind, case, alone[1], lambda one: (first_failure(kind, [one]) or (one, None))[1])
    raise Different(f"{text}\n\ncheck({kind!r}, [{case!r}])")


def first_failure(kind: str, cases: Sequence[Case]) -> tuple[Case, str] | None:
    """The first case that fails, and how."""
    try:
        if kind == "workers":
            both = (
                outcomes([dataclasses.replace(case, workers=number, resume_at=0) for case in cases])
                for number in (0, 2)
            )
            found = [[one[0], other[0]] for one, other in zip(*both, strict=False)]
        else:
            found = outcomes(cases)
    except AssertionError as error:  # a rank died; which case it was is found out one by one
        if len(cases) == 1:
            return cases[0], str(error)
        return next((failed for case in cases if (failed := first_failure(kind, [case]))), None) or (
            cases[-1],
            str(error),
        )
    for case, of_case in zip(cases, found, strict=False):
        try:
            check_plain(case, of_case) if kind == "plain" else check_same(of_case[0], of_case[-1])
        except Different as error:
            return case, str(error)
    return None


def check_plain(case: Case, runs_of_case: Sequence[Sequence[Found]]) -> None:
    """Compare what each rank gave, before and after a stop, with plain torch."""
    wanted = train_plainly(case)
    for resumed, ranks in enumerate(runs_of_case):
        for rank, found in enumerate(ranks):
            if found.error and not wanted.applied:  # a run in which nothing can be learned may end with an error
                return
            try:
                compare(wanted, found, log=rank == 0)
                same_bits(ranks[0].weights, found.weights)
            except Different as error:
                raise Different(f"rank {rank}: {'resumed: ' if resumed else ''}{error}") from None
        afterwards = ranks[0].afterwards
        if afterwards is not None and case.afterwards == "evaluate":
            compare_row({"step": case.stop, **afterwards}, {"step": case.stop, **wanted.evaluation})
        elif afterwards is not None:
            compare_predictions(afterwards, wanted.predictions)


def compare(wanted: Result, found: Found, log: bool) -> None:
    """Raise where weights (and with `log` the log) differ by more than rounding."""
    if found.error:
        raise Different(found.error)
    if wanted.weights.keys() != found.weights.keys():
        raise Different(f"weights {sorted(found.weights)}, not {sorted(wanted.weights)}")
    if log and len(found.rows) != len(wanted.rows):
        raise Different(f"the log has {len(found.rows)} entries {found.rows}, not {len(wanted.rows)} {wanted.rows}")
    for row, expected in zip(found.rows, wanted.rows, strict=True) if log else ():
        compare_row(row, expected)
    for name, tensor in wanted.weights.items():
        if not (off := distance(torch.as_tensor(found.weights[name]), tensor)) <= TIGHT:
            raise Different(f"{name} differs by {off:.3g}: {found.weights[name].tolist()}, not {tensor.tolist()}")


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-3))


def compare_row(row: Row, expected: Row) -> None:
    """One entry of the log."""
    wanted = {name.removesuffix("?"): value for name, value in expected.items()}
    if not {name for name in expected if not name.endswith("?")} <= row.keys() <= wanted.keys():
        raise Different(f"the log says {row}, not {expected}")
    for name, value in row.items():
        if not abs(value - wanted[name]) <= TIGHT * max(abs(wanted[name]), 1e-3):
            raise Different(f"step {row['step']}: {name} is {value}, not {wanted[name]}")


def compare_predictions(found: list[Any], wanted: list[Any]) -> None:
    """Outputs of each evaluation sample."""
    for index, (mine, expected) in enumerate(zip(found, wanted, strict=True)):
        flat = mine and {"outputs": mine["outputs"], "sum": mine["more"][0], "index": mine["more"][1]}
        if (flat is None) != (expected is None) or any(
            not distance(flat[name], expected[name]) <= TIGHT for name in expected or {}
        ):
            raise Different(f"the prediction of sample {index} is {mine}, not {expected}")


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise where weights are not equal bit for bit."""
    unequal = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    if unequal:
        name = unequal[0]
        raise Different(
            f"bits of {', '.join(unequal)} differ: {one[name].tolist()} and {other[name].tolist()} in {name}"
        )


def check_same(one: Sequence[Found], other: Sequence[Found]) -> None:
    """Raise where two runs differ by a single bit, in weights or in what the log says."""
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        try:
            if mine.error and mine.error == theirs.error and "nothing was learned" in mine.error:
                continue
            if mine.error or theirs.error:
                raise Different(mine.error or theirs.error)
            same_bits(mine.weights, theirs.weights)
            for row, other_row in itertools.zip_longest(mine.rows, theirs.rows):
                if row != other_row:
                    raise Different(f"the log says {row}, and {other_row}")
        except Different as error:
            raise Different(f"rank {rank}: {error}") from None
