"""Which of several trainings is better: `lockstep compare --evaluate`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import UsageError, number_of
from lockstep_lab.report.intervals import EvaluatedRun, ResultDifference, differences, verdicts
from lockstep_lab.report.page import number_text
from lockstep_lab.report.run import RunSummary

_SEEDS = ("seed", "name")
"""Keys of the config that may differ between runs of one training."""
_ENOUGH = 3  # runs of a training


@dataclass(frozen=True)
class RepeatedTraining:
    """The runs of one training, which differ only in their seeds."""

    letter: str
    labels: list[str]
    runs: list[EvaluatedRun]


@dataclass(frozen=True)
class Judgement:
    """How a training compares with the first."""

    first: RepeatedTraining
    other: RepeatedTraining
    found: list[ResultDifference]
    words: dict[str, str]
    """See `intervals.verdicts`."""
    main: str
    """The result by which the trainings are judged."""

    @property
    def heads(self) -> list[str]:
        """The names of the columns of `rows`."""
        first, other = self.first.letter, self.other.letter
        return ["", first, other, f"{other} - {first}", "95 % interval", "verdict"]

    def rows(self) -> list[list[str]]:
        """Name, values of both, the difference with its interval, and the verdict, of each result."""
        rows = []
        for one in self.found:
            low, high = one.interval
            text = "unknown" if math.isnan(low) else f"{low:+.4g} to {high:+.4g}"
            values = [number_text(one.first), number_text(one.other), f"{one.value:+.4g}", text]
            rows.append([one.name, *values, self.words.get(one.name, "no difference shown")])
        return rows

    def summary(self) -> list[str]:
        """A sentence on the main result, and what it does not show."""
        first, other, few = self.first, self.other, min(len(self.first.runs), len(self.other.runs))
        is_single = len(first.runs) == len(other.runs) == 1
        what = "checkpoint" if is_single else "training"
        word = self.words.get(self.main)
        if word is None:
            lines = [f"{self.main}: no difference between {first.letter} and {other.letter} is shown"]
        else:
            relation = f"{word} {'from' if word == 'different' else 'than'}"
            lines = [f"{self.main}: the {what} {other.letter} is {relation} {first.letter}"]
        if is_single:
            lines.append(
                "  One run of each does not show which training is better, because another seed may reverse it. Train "
                "both with three seeds, and give all six runs"
            )
        elif few < _ENOUGH:
            lines.append("  There are few runs: three or more of each training, with different seeds, show more")
        return lines


def judge(
    labels: Sequence[str], runs: Sequence[RunSummary], evaluate: Callable[[Path], EvaluatedRun]
) -> tuple[list[RepeatedTraining], list[Judgement]]:
    """Evaluate all runs, and compare the trainings with the first.

    Args:
        evaluate: evaluates the run in a folder: `left_out.of_run`.

    Raises:
        UsageError: the runs have different evaluation data, or no result in common.
        LockstepError: a run cannot be evaluated.
    """
    trainings = []
    for letter, places in zip(_letters(), _by_training(runs), strict=False):
        evaluated = []
        for place in places:
            print(f"evaluating {labels[place]}", file=sys.stderr)
            evaluated.append(evaluate(runs[place].folder))
        trainings.append(RepeatedTraining(letter, [labels[place] for place in places], evaluated))
    first, *others = trainings
    for training in trainings:
        for label, run in zip(training.labels, training.runs, strict=True):
            _check_data(first, label, run)
    main = _main(runs[0], first.runs[0])
    judged = []
    for other in others:
        found = differences(first.runs, other.runs)
        found.sort(key=lambda one: one.name != main)
        judged.append(Judgement(first, other, found, verdicts(found, main), main))
    return trainings, judged


def _letters() -> Iterator[str]:
    """A, B, ..., Z, A2, B2, ..."""
    for turn in itertools.count(1):
        yield from (letter + str(turn) * (turn > 1) for letter in string.ascii_uppercase)


def lines(trainings: Sequence[RepeatedTraining]) -> list[str]:
    """What was evaluated: a line for each training."""
    counts = {name: count for name, (count, _) in trainings[0].runs[0].samples.items()}
    sizes = ", ".join(number_of(count, "sample") + (f" of {name}" if name else "") for name, count in counts.items())
    written = [f"checkpoints as `lockstep evaluate` takes them, on {sizes}"]
    for training in trainings:
        runs = (f"{label} (step {run.step:,})" for label, run in zip(training.labels, training.runs, strict=True))
        written.append(f"{training.letter}: {', '.join(runs)}")
    return written


def _by_training(runs: Sequence[RunSummary]) -> list[list[int]]:
    """The runs of each training. If all differ only in their seeds, each counts as a training."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        rest = {key: value for key, value in run.config.items() if key not in _SEEDS}
        key = json.dumps(rest, sort_keys=True, default=str) + _source(run.folder)
        groups.setdefault(key, []).append(place)
    seeds = [run.config.get("seed") for run in runs]
    are_repeated = all(len({seeds[place] for place in places}) == len(places) for places in groups.values())
    return list(groups.values()) if len(groups) > 1 and are_repeated else [[place] for place in range(len(runs))]


def _source(folder: Path) -> str:
    """A digest of the code of the task that the run keeps."""
    files = sorted(path for path in (folder / "source").rglob("*") if path.is_file())
    contents = (str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _check_data(first: RepeatedTraining, label: str, run: EvaluatedRun) -> None:
    known = first.runs[0].samples
    if run.samples == known:
        return
    counts = [", ".join(f"{count:,}" for count, _ in samples.values()) for samples in (known, run.samples)]
    what = f"{counts[1]} samples, and {first.labels[0]} {counts[0]}" if counts[0] != counts[1] else "other samples"
    remedy = "give one data set for all: lockstep compare RUN_DIR RUN_DIR --evaluate data.eval=PATH"
    raise UsageError(f"it has different evaluation data than {first.labels[0]}: {what}", where=label, remedy=remedy)


def _main(run: RunSummary, found: EvaluatedRun) -> str:
    """The result that chooses the best checkpoint, or else the loss."""
    best = run.retention.best
    names = [best[1]] if best else []
    names += [name for name in found.full if name.split("/")[-1] == "loss"]
    names += list(found.full)
    return next(name for name in names if name in found.full)
