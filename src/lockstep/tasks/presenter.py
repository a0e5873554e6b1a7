"""How a task shows its samples, outputs and results to people. Optional: every method has a default that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lockstep.tasks.task import Task


class Presenter:
    """The texts and files about a task that people read. Training does not depend on it.

    A task names its presenter in its attribute `presenter`. Lockstep makes it with `task.presenter(task)`.
    """

    def __init__(self, task: Task) -> None:
        self.task: Any = task

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

    def describe(self, output: Any) -> dict[str, Any]:
        """The output of a single sample, as plain values by name."""
        return {"output": output}

    def truth(self, sample: Any) -> Any:
        """The label of a raw sample, in the form that `describe` gives a prediction.

        None if the sample has no label.
        """
        return None

    def show(self, sample: Any) -> dict[str, Any]:
        """A raw sample as plain values by name. `lockstep predict` writes them beside the prediction."""
        return {}

    show.default = show  # type: ignore[attr-defined]  # see `data.loader.is_default`

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """A text about an evaluation, for the log. An empty text is not logged.

        Args:
            values: the results of `Task.metrics` by name. Results with two or more dimensions, such as a confusion
                matrix, are not logged as numbers, so this is the place to show them.
            samples: a few pairs (raw sample, output of this sample).
        """
        return ""

    report.default = report  # type: ignore[attr-defined]  # see `data.loader.is_default`

    def picture(self, sample: Any, prepared: Any, output: Any) -> npt.NDArray[np.uint8] | None:
        """A sample as a picture, with what can be drawn into it: masks, boxes, in their true and predicted form.

        The log shows such pictures of some training samples before the first step, and of the same few evaluation
        samples at every evaluation. None: there is no picture. This is the default.

        Args:
            sample: a raw sample.
            prepared: what `Task.prepare` made of it.
            output: the output of this sample. None for a training sample.

        Returns:
            uint8 (height, width, 3), RGB. Small pictures are enlarged later.
        """
        return None

    picture.default = picture  # type: ignore[attr-defined]  # see `data.loader.is_default`

    def caption(self, sample: Any, prepared: Any, output: Any) -> str:
        """Up to three lines below a picture, for the arguments of `picture`. By default: `prediction` and
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

    def class_names(self) -> Sequence[str]:
        """Names of the classes, for the picture of a confusion matrix. Empty, the default: classes have numbers."""
        return ()

    def epoch_header(self, epoch: int) -> str:
        """What the log says of the task where an epoch begins, such as `image size 160`. An empty text adds nothing.

        Args:
            epoch: counted from 0, as `Task.prepare` gets it.
        """
        return ""

    def log_header(self) -> list[str]:
        """Lines about the data and the model, for the head of the log."""
        return []

    def export(self, model: nn.Module, folder: Path) -> Sequence[str] | None:
        """Write the files that users of the weights need besides `model.safetensors` (labels, a tokenizer).

        Args:
            folder: exists, and is empty. The weights come later: a file of that name is an error.

        Returns:
            warnings for whoever exports, such as that a library cannot load the files. None: there are none.
        """
        return None
