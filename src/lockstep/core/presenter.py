"""Presenters show samples, outputs and results of a task to people. Optional: every method has a default that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.core.defaults import default
from lockstep.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lockstep.core.program import Program


class Presenter:
    """The texts and files about a task that people read. Training does not depend on it.

    A task names its presenter in its attribute `presenter`. Lockstep makes it with `task.presenter(task)`.
    """

    has_program: bool = True
    """True if an export has a program, `model.pt2`. False: another library makes the model from the exported files."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def inputs(self, arguments: Sequence[str]) -> Dataset[Any]:
        """Samples from the INPUT arguments of `lockstep predict`.

        Every rank calls this, and finds the same samples.
        They go through `prepare` and `collate` as evaluation samples do. An optional method `where(index)` of the data
        set names the source of a sample.

        Raises:
            UsageError: the task reads no files. This is the default.
        """
        raise UsageError(
            f"{type(self.task).__name__} reads no files",
            where="Presenter.inputs",
            remedy="write this method, or predict without INPUT",
        )

    def stream(self, arguments: Sequence[str]) -> bool:
        """Called before `inputs` if the prediction goes to a terminal, on a single process.

        Returns:
            whether the prediction will be written to stdout while it is computed, so that nothing else is to be
            written. By default it is not.
        """
        return False

    def describe(self, output: Any) -> dict[str, Any]:
        """The output of a single sample, as plain values by name."""
        return {"output": output}

    def truth(self, sample: Any) -> Any:
        """The label of a raw sample, in the form that `describe` gives a prediction.

        None if the sample has no label.
        """
        return None

    @default
    def show(self, sample: Any) -> dict[str, Any]:
        """A raw sample as plain values by name. `lockstep predict` writes them next to the prediction."""
        return {}

    @default
    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """A text about an evaluation, for the log. An empty text is not logged.

        Args:
            values: the results of `Task.metrics` by name. Results with two or more dimensions, such as a confusion
                matrix, are not logged as numbers, so this is the place to show them.
            samples: a few pairs (raw sample, output of this sample).
        """
        return ""

    @default
    def picture(self, sample: Any, prepared: Any, output: Any) -> npt.NDArray[np.uint8] | None:
        """A sample as an image, with what can be drawn into it, such as true and predicted masks or boxes.

        The log shows such images of some training samples before the first step, and of the same few evaluation
        samples at every evaluation. None, the default: there is no image.

        Args:
            sample: a raw sample.
            prepared: what `Task.prepare` made of it.
            output: the output of this sample. None for a training sample.

        Returns:
            uint8 (height, width, 3), RGB. Small images are enlarged later.
        """
        return None

    def caption(self, sample: Any, prepared: Any, output: Any) -> str:
        """Up to three lines below an image, for the arguments of `picture`. By default: `prediction` and
        `probability` of `describe`, and `truth`."""
        described = self.describe(output) if output is not None else {}
        lines = []
        if "prediction" in described:
            probability = described.get("probability")
            share = f"{probability:.2f} " if isinstance(probability, float) else ""
            lines.append(f"{share}{described['prediction']}")
        truth = self.truth(sample)
        if truth is not None:
            lines.append(f"truth: {truth}" if lines else str(truth))
        return "\n".join(lines)

    picture_side: int = 160
    """The largest longer side of an image on a sheet, in pixels. Larger images are reduced to it, and images of less
    than 160 pixels are enlarged, so that a text in them may be hard to read. Others are shown as they are."""

    @default
    def mistakes(self, output: Any, batch: Any) -> Tensor | None:
        """The mistake in the output of each sample of an evaluation batch, such as its loss, or the number of missed
        and invented boxes.

        The log shows the samples of an evaluation with the highest numbers on one sheet, drawn by `picture`. The
        numbers of a sample must not depend on the other samples of its batch. NaN counts as the highest number. Samples
        with the number -inf are not shown.

        Args:
            output: of the whole batch, as the metrics get it, on the device of the batch.

        Returns:
            (samples,), floating-point numbers. None, the default: not known.
        """
        return None

    def pictures(self, values: Mapping[str, Tensor]) -> Mapping[str, npt.NDArray[np.uint8]]:
        """Images of the results of an evaluation by name, such as a precision-recall curve. None by default.

        A confusion matrix needs no image from here. A metric that returns the points of a curve should return a
        tensor of two dimensions: it is kept in metric_arrays.jsonl, and is not logged as numbers.

        Args:
            values: the results of `Task.metrics` by name.

        Returns:
            arrays of uint8 (height, width, 3), RGB. They are shown as they are.
        """
        return {}

    @default
    def files(self, sample: Any, output: Any) -> Mapping[str, bytes]:
        """The files of one prediction, which `lockstep predict --out FOLDER` writes: masks, images with boxes.

        The rank that computed the output calls this and writes the files.

        Args:
            sample: a raw sample.
            output: the output of this sample.

        Returns:
            the contents by path below FOLDER. Each path contains a `*`, such as `masks/*.png`. Lockstep replaces it
            by a name of the sample that no other sample of the prediction has. By default there are no files.
        """
        return {}

    @default
    def rows(self, sample: Any, output: Any) -> list[dict[str, Any]]:
        """The rows of one prediction in files of CSV, JSON and JSON lines: any number of dicts of plain values.

        Lockstep puts `input` (the source of the sample) or `sample` (its number) before the values of each row. A
        detection has a row for each box with the keys of COCO's results, so that `--out boxes.json` is a file of COCO
        results. By default there is a single row: `describe(output)`, with `truth` and `show` next to it.

        Args:
            sample: a raw sample.
            output: the output of this sample.
        """
        return [{**self.describe(output)}]

    def class_names(self) -> Sequence[str]:
        """Names of the classes, for the image of a confusion matrix. Empty, the default: classes have numbers."""
        return ()

    def epoch_header(self, epoch: int) -> str:
        """The words of the log on the task when an epoch begins, such as `image size 160`. An empty text adds nothing.

        Args:
            epoch: counted from 0, as `Task.prepare` gets it.
        """
        return ""

    def log_header(self) -> list[str]:
        """Lines about the data and the model, for the head of the log."""
        return []

    @default
    def program(self, model: nn.Module) -> Program:
        """The program that `lockstep export` writes as `model.pt2`. torch runs it without the code of the model.

        By default, it is `Task.predict` for batches like that of the first samples of the data.

        Args:
            model: as `Task.model` makes it, with the trained weights, on the CPU.

        """
        raise NotImplementedError

    merged: bool = False
    """Whether `lockstep export --merge` asks for adapters merged into the weights."""
    step: int | None = None
    """The step of the checkpoint that is exported. None: it is not known."""

    @default
    def export_weights(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """The file of weights in an export, and its tensors. By default all of the model, under their names.

        Args:
            model: with the trained weights; it may hold only shards of them.
            tensors: of its `state_dict`, whole, in host memory.

        Raises:
            UsageError: `merged` is true, and there are no adapters.
        """
        if self.merged:
            raise UsageError("the model has no adapters", where="--merge", remedy="leave it out")
        return "model.safetensors", tensors

    def export(self, model: nn.Module, folder: Path) -> Sequence[str] | None:
        """Write the files that users of the weights need besides `model.safetensors` (labels, a tokenizer).

        Args:
            folder: exists, and is empty. The weights come later: a file of that name is an error.

        Returns:
            warnings for whoever exports, such as that a library cannot load the files. None: there are none.
        """
        return None
