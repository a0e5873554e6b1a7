"""The parts of a prediction besides the model: its samples and their places, and the makers of rows and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from lockstep.core import evaluate, run_data, task_checks
from lockstep.core.data.dataset import member_of
from lockstep.core.defaults import is_default
from lockstep.core.errors import DataError, UsageError
from lockstep.core.parallel.world import World
from lockstep.core.presenter import Presenter
from lockstep.core.task import Task
from lockstep.trainer.prediction_files import PredictionFiles, distinct_names

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Wanted:
    """The samples that a user asks for."""

    inputs: Sequence[str]
    """Read by the task. Empty: evaluation samples."""
    samples: int
    """Number of evaluation samples, from the first."""


@dataclass(frozen=True)
class PredictedSamples:
    """The samples of a prediction: inputs that the user names, or evaluation samples."""

    data: Any
    """The raw samples: a map-style data set."""
    place: Callable[[int], Any]
    """Where the sample with an index comes from. Evaluation samples have numbers."""
    is_input: bool
    """True if the user names the samples. Otherwise they may have a truth."""

    def head(self, index: int) -> dict[str, Any]:
        """The values before each prediction of a sample."""
        return {"input" if self.is_input else "sample": self.place(index)}

    def names(self) -> list[str]:
        """Distinct names of the samples, for files."""
        places = [self.place(index) for index in range(len(self.data))]
        return distinct_names([place if isinstance(place, str) else f"sample-{place:08}" for place in places])


def read_samples(task: Task, presenter: Presenter, world: World, inputs: Sequence[str], count: int) -> PredictedSamples:
    """The samples to predict. All ranks call it.

    Args:
        inputs: read by the task. Empty: the first `count` evaluation samples.

    Raises:
        UsageError: the task reads no such inputs, or several ranks would read standard input.
        DataError: the ranks found different numbers of samples.
    """
    if not inputs:
        evaluated = run_data.required_evaluation_data(task)
        chosen = range(min(count, len(evaluated)))  # type: ignore[arg-type]
        return PredictedSamples(Subset(evaluated, chosen), int, is_input=False)
    if "-" in inputs and world.size > 1:
        what = f"{world.size} ranks cannot all read standard input"
        raise UsageError(what, where="INPUT -", remedy="write it into a file, or use --nproc 1")
    data: Any = task_checks.data(presenter.inputs(inputs), "Presenter.inputs")
    found = len(data)
    counts = world.broadcast(world.gather(found))
    if len(set(counts)) > 1:
        what = f"the ranks found {', '.join(map(str, counts))} samples in the same inputs"
        raise DataError(what, where="INPUT", remedy="wait until no process changes these files, and start again")
    where = member_of(data, "where", lambda index: inputs[index] if found == len(inputs) else index)
    return PredictedSamples(data, where, is_input=True)


class RowsAndFiles:
    """Makes rows of the outputs of a micro-batch, and writes the files of its samples.

    It runs on the rank that computed the outputs.

    Args:
        by_row: whether a sample has the rows of `Presenter.rows`. Otherwise it has a single row.
        folder: where `Presenter.files` go. None: no files are written.
    """

    def __init__(self, presenter: Presenter, samples: PredictedSamples, *, by_row: bool, folder: Path | None) -> None:
        self.presenter, self.samples = presenter, samples
        self.by_row = by_row and not is_default(presenter.rows)
        self.shows = not is_default(presenter.show)
        self.files: PredictionFiles | None = None
        if folder is not None and not is_default(presenter.files):
            self.files = PredictionFiles(folder, samples.names())

    def __call__(self, indices: Sequence[int], output: Any) -> list[Rows]:
        """The rows of each sample."""
        parts = evaluate.split(output, len(indices))
        return [self._of_sample(index, part) for index, part in zip(indices, parts, strict=True)]

    def _of_sample(self, index: int, output: Any) -> Rows:
        presenter, samples = self.presenter, self.samples
        has_truth = not samples.is_input and not self.by_row
        needs_sample = has_truth or self.shows or self.by_row or self.files is not None
        sample = samples.data[index] if needs_sample else None
        if self.files is not None:
            self.files.write(index, task_checks.row(presenter.files(sample, output), "Presenter.files"))
        head = samples.head(index)
        if self.by_row:
            return [head | row for row in task_checks.rows(presenter.rows(sample, output))]
        if has_truth:
            head["truth"] = presenter.truth(sample)
        if self.shows:
            head |= task_checks.row(presenter.show(sample), "Presenter.show")
        return [head | task_checks.row(presenter.describe(output), "Presenter.describe")]
