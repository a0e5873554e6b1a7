"""Predictions in a form for people: their samples and the places of these, rows, files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Subset

from lockstep.core import evaluate, run_data, task_checks
from lockstep.core.data.dataset import member_of
from lockstep.core.defaults import is_default
from lockstep.core.errors import DataError, UsageError
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.presenter import Presenter
from lockstep.core.task import Task
from lockstep.trainer import assemble, memory_shortage
from lockstep.trainer.predictions import PredictionFiles, distinct_names
from lockstep.trainer.trained_model import TrainedModel

Rows = list[dict[str, Any]]


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


def predict_rows(
    used: TrainedModel,
    add: Callable[[list[dict[str, Any]], bool], None],
    inputs: Sequence[str],
    samples: int,
    *,
    on_error: Literal["raise", "skip"] | None,
    begin: Callable[[int], None],
    by_row: bool,
    folder: Path | None,
) -> None:
    """See `Trainer.predict_rows`."""
    world = used.world
    if used.setup.kept.is_dir():
        assemble.set_up(used.setup, used.task, world, trained=True)
    presenter = task_checks.presenter(used.task)
    found = read_samples(used.task, presenter, world, inputs, samples)
    if world.rank == 0 and found.is_input and not used.setup.quiet:
        for note in member_of(found.data, "notes", ()):
            print(f"note: {note}", file=sys.stderr)
    strategy, config = used.load(), used.setup.config
    if on_error is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": on_error})})
    micro_batch = memory_shortage.fitting(used.setup.run_dir, config, world).evaluation
    evaluated = run_data.evaluation_data(config, used.task, world, found.data, micro_batch=micro_batch)
    if world.rank == 0:
        begin(len(found.data))
    with (
        memory_shortage.noted(used.setup.run_dir, config, world, begins_again=False),  # rows may be written already
        strategy.inference() as forward,
    ):
        outputs = evaluate.predict_each(
            used.task,
            forward,
            evaluated.loader,
            plan=evaluated.plan,
            world=world,
            precision=Precision(config.precision, world.device),
            finish=RowsAndFiles(presenter, found, by_row=by_row, folder=folder),
        )
        with contextlib.closing(outputs):
            for index, rows in outputs:
                if isinstance(rows, evaluate.Unreadable):
                    add([found.head(index) | {"error": rows.what}], False)
                else:
                    add(rows, True)
