"""The images of a run for people: its samples, its confusion matrices, and a description of its model.

All of this happens on rank 0, without collectives, and without a trace in the training: random states and buffers are
restored. A failure to draw is one warning.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.core import atomic, task_checks
from lockstep.core.build import Run
from lockstep.core.data.dataset import member_of
from lockstep.core.data.randomness import restored_generators
from lockstep.core.defaults import is_default
from lockstep.core.evaluation_run import Findings, Viewer
from lockstep.core.run_data import EvaluationData
from lockstep.core.worst import WorstSamples
from lockstep.drawing import diagrams, drawing
from lockstep.parts import model_table
from lockstep.parts.checks import dry_run
from lockstep.parts.plain import as_numpy, is_tensor
from lockstep.parts.write_guard import Guard

_CPU = torch.device("cpu")
_DRAWS = 4  # epochs in which a training sample is drawn
_COLUMNS = 4
_WIDE = 2240  # pixels of a row of evaluation samples, unless one image is wider
_WIDE_AUGMENTED = 2752  # the same for training samples
AUGMENTED, EVALUATED, WORST = "samples/augmented", "samples/evaluation", "samples/worst"


class RunPictures(Viewer):
    """Draws images into the run directory, and for the writers."""

    def __init__(self, run: Run) -> None:
        self.run, self.task = run, run.task
        self.count = run.config.log.pictures
        """Number of samples that are drawn. 0: nothing is drawn."""
        self.folder, self.writers = run.folder, run.writers
        self.guard = functools.cache(lambda name: Guard(name, run.tell))
        self.drawn: EvaluationData | None = None
        """The evaluation data to draw."""
        self.pairs: list[tuple[int, Any, Any]] | None = None
        """Index, raw sample and prepared sample of the evaluation samples that are drawn. None: not read yet."""

    def begin(self, step: int, evaluated: EvaluationData | None) -> None:
        """For a new run, rank 0 describes the model and draws training samples."""
        self.drawn = evaluated
        path = self.folder / model_table.FILE
        if step or self.run.world.rank:
            return
        if self.run.config.log.model_summary and not path.exists():
            self._attempt(model_table.FILE, lambda: self._describe_model(path, evaluated))
        if self._number_of_samples():
            self._attempt(AUGMENTED, self._draw_training_samples)

    def samples(self, evaluated: EvaluationData) -> tuple[int, ...]:
        """Indices of the evaluation samples that are drawn: spread over the data, the same in every evaluation."""
        plan = evaluated.plan
        if evaluated is not self.drawn:
            return ()
        count = min(self._number_of_samples(), plan.count)
        return tuple(plan.index(number * plan.count // count) for number in range(count))

    def worst(self, evaluated: EvaluationData) -> WorstSamples | None:
        mistakes = task_checks.presenter(self.task).mistakes
        count = self._number_of_samples() if evaluated is self.drawn else 0
        return None if not count or is_default(mistakes) else WorstSamples(mistakes, count=count)

    def show(self, found: Findings) -> None:
        evaluated, step, outputs, worst = found.evaluated, found.step, found.outputs, found.worst
        if evaluated is not self.drawn:
            return
        self.draw_results(step, found.values)
        wanted = [index for index in self.samples(evaluated) if index in outputs]
        if wanted:
            self._attempt(EVALUATED, lambda: self._draw_evaluated(step, evaluated, wanted, outputs))
        if worst is not None:
            self._attempt(WORST, lambda: self._draw_worst(step, evaluated, worst))

    def draw_results(self, step: int, values: Mapping[str, Any]) -> None:
        """Draw the results of an evaluation: what the presenter draws, and each confusion matrix: a square of integers,
        or of numbers by that name.

        Args:
            values: the values of the metrics.
        """
        if not self.count or not values or importlib.util.find_spec("PIL") is None:
            return
        self._attempt("pictures", lambda: self._draw_of_presenter(step, values))
        for name, value in values.items():
            is_square = is_tensor(value) and value.ndim == 2 and value.shape[0] == value.shape[1] > 1
            if is_square and ("confusion" in name or not value.is_floating_point()):
                self._attempt(f"pictures/{name}", functools.partial(self._draw_matrix, step, name, value))

    # ---- drawing, which may fail

    def _attempt(self, name: str, draw: Callable[[], None]) -> None:
        """Call `draw`. A presenter may draw random numbers, which must not affect the training."""
        with restored_generators(_CPU):
            self.guard(name).attempt(draw)

    def _number_of_samples(self) -> int:
        """The number of samples to draw. 0 if the task draws no images."""
        return 0 if is_default(task_checks.presenter(self.task).picture) else self.count

    def _draw_training_samples(self) -> None:
        """A row for each of the first samples of the training, as seen in epochs from the first to the last."""
        plan = self.run.plan
        indices = plan.indices(0)[0][: self.count].tolist()
        last = max(self.run.stop // plan.steps_per_epoch, _DRAWS) - 1
        epochs = [number * last // (_DRAWS - 1) for number in range(_DRAWS)]
        keys = [(index, epoch) for index in indices for epoch in epochs]
        presenter = task_checks.presenter(self.task)
        shown = []
        for (_, epoch), (sample, item) in self.run.batches.loader.read_apart(keys).items():
            picture = presenter.picture(sample, item, None)
            if picture is not None:
                shown.append((picture, f"{presenter.caption(sample, item, None)}\nepoch {epoch + 1}".strip()))
        self._save_sheet(AUGMENTED, shown, step=0, file="samples/augmented.png", columns=_DRAWS)

    def _draw_evaluated(
        self, step: int, evaluated: EvaluationData, indices: Sequence[int], outputs: Mapping[int, Any]
    ) -> None:
        if self.pairs is None:
            read = evaluated.loader.read_apart([(index, 0) for index in indices])
            self.pairs = [(index, *pair) for (index, _), pair in read.items()]
        presenter = task_checks.presenter(self.task)
        shown = []
        for index, sample, item in self.pairs:
            if index in outputs:
                picture = presenter.picture(sample, item, outputs[index])
                if picture is not None:
                    shown.append((picture, presenter.caption(sample, item, outputs[index])))
        self._save_sheet(EVALUATED, shown, step=step, file=f"samples/step-{step:08}.png", columns=_COLUMNS)

    def _draw_worst(self, step: int, evaluated: EvaluationData, worst: WorstSamples) -> None:
        if worst.problem:
            raise RuntimeError(worst.problem)
        read = evaluated.loader.read_apart([(found.index, 0) for found in worst.found])
        where = member_of(evaluated.data, "where", lambda index: f"sample {index}")
        presenter = task_checks.presenter(self.task)
        shown = []
        for found in worst.found:
            if (found.index, 0) not in read:
                continue
            sample, item = read[found.index, 0]
            picture = presenter.picture(sample, item, found.output)
            if picture is not None:
                caption, name = (
                    presenter.caption(sample, item, found.output),
                    str(where(found.index)).rsplit("/", 1)[-1],
                )
                lines = [f"mistake {found.mistake:.4g}", caption, *([] if name in caption.splitlines() else [name])]
                shown.append((picture, "\n".join(lines)))
        self._save_sheet(WORST, shown, step=step, file=f"samples/worst-step-{step:08}.png", columns=_COLUMNS)

    def _draw_of_presenter(self, step: int, values: Mapping[str, Any]) -> None:
        for name, picture in task_checks.presenter(self.task).pictures(values).items():
            self._save(f"eval/{name}", picture, step=step, file=_file_of(name, step))

    def _draw_matrix(self, step: int, name: str, counts: Any) -> None:
        names = list(task_checks.presenter(self.task).class_names())
        if len(names) != len(counts):
            names = []
        picture = diagrams.confusion_matrix(as_numpy(counts), names)
        if picture is not None:
            self._save(f"eval/{name}", picture, step=step, file=_file_of(name, step))

    def _save_sheet(self, name: str, shown: Sequence[tuple[Any, str]], *, step: int, file: str, columns: int) -> None:
        if shown:
            pictures, captions = zip(*shown, strict=True)
            side = task_checks.presenter(self.task).picture_side
            width = _WIDE if name != AUGMENTED else _WIDE_AUGMENTED
            page = drawing.sheet(pictures, captions, columns=columns, side=side, width=width)
            self._save(name, page, step=step, file=file)

    def _save(self, name: str, picture: drawing.ImageArray, *, step: int, file: str) -> None:
        for writer in self.writers:
            writer.picture(name, picture, step)
        drawing.write(self.folder / file, picture)

    def _describe_model(self, path: Path, evaluated: EvaluationData | None) -> None:
        """Write model.txt, and pass the graph of the model to the writers."""
        state, found, note = self.run.state, None, ""
        model, compiled = self.run.model, self.run.is_compiled
        if state.strategy.is_sharded:
            note = "Outputs and operations are left out: each rank holds only a shard of the parameters."
        else:
            loader = self.run.batches.loader if evaluated is None else evaluated.loader
            with state.strategy.inference() as forward, dry_run.without_trace(forward, state.world, compiled):
                try:
                    (micro_batch,) = dry_run.read(loader, [[0]])
                    with state.precision.autocast():
                        found = model_table.trace(model, lambda: forward(micro_batch.batch))
                except Exception as error:
                    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                    note = f"Outputs and operations are left out: the forward pass of one sample failed: {reason}"
                if found is not None and found.arguments is not None:
                    for writer in self.writers:
                        writer.graph(model, *found.arguments)
        atomic.write_text(path, model_table.table(model, found, note=note))


def _file_of(name: str, step: int) -> str:
    """The file of an image of a result, below the run directory."""
    stem = name.replace("/", "_")
    return f"pictures/{stem}-step-{step:08}.png"
