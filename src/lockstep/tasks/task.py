"""The contract between a task and the engine: what a user writes, and nothing else."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = Any
Losses = dict[str, Tensor]


class Task(abc.ABC):
    """A model, its data, its loss and its metrics, for one process on one device.

    A task knows nothing of ranks, devices, precision or accumulation. `model`, `train_data` and `loss` must be written;
    everything else has a default. Its constructor takes the keys of the config's `task` section.
    """

    # ---- what it is made of

    def setup(self, folder: Path, trained: bool) -> None:  # noqa: B027 - it may be left as it is
        """Called before anything else where the task belongs to a run, on rank 0 and then on the others: `folder` is kept with
        the run for what the task finds out from its data (label names, a vocabulary). trained: a checkpoint gives the weights."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A new model. Called under a seeded RNG: the same weights on every rank."""

    @abc.abstractmethod
    def train_data(self) -> Dataset[Any]:
        """Raw training samples: a map-style data set (`len` and `[index]`). Its optional method `where(index)` names
        the file of a sample in error messages."""

    def eval_data(self) -> Dataset[Any] | None:
        """Raw samples for evaluation; None where there are none."""
        return None

    # ---- from a sample to a batch; runs in loader workers

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        """Turn a raw sample into what `collate` takes. Randomness (torch, numpy, random) drawn here depends on
        (seed, epoch, sample) alone."""
        return sample

    prepare.default = prepare  # type: ignore[attr-defined]

    def collate(self, samples: list[Any]) -> Batch:
        """A batch of prepared samples."""
        return default_collate(samples)

    collate.default = collate  # type: ignore[attr-defined]

    def weight(self, batch: Batch) -> Tensor | float | Mapping[str, Tensor | float] | None:
        """How many units the loss of this batch sums over, by head, from the labels alone (valid labels, tokens,
        pixels, boxes). None, the default: the unit is the sample."""
        return None

    # ---- from a batch to a loss

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """The SUM of the loss over the units that `weight` counts; with several heads a dict with the same keys."""

    def coefficients(self) -> Mapping[str, float]:
        """Factor of each head's mean in the total loss; 1 for those not named."""
        return {}

    # ---- what comes out

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """Outputs for metrics and users: tensors whose first dimension is the batch, or a dict, tuple or list of them."""
        raise UsageError(
            f"{type(self).__name__} has no predict",
            where="Task.predict",
            remedy="write it: predictions and metrics need outputs",
        )

    def metrics(self) -> MetricCollection | None:
        """torchmetrics, on the CPU; they are moved to the device, and see every evaluation sample once."""
        return None

    def update_metrics(self, metrics: MetricCollection, output: Any, batch: Batch) -> None:
        """Feed one batch to the metrics. The default is for batches that are (input, target) pairs."""
        metrics.update(output, batch[1])

    def loss_and_output(self, model: nn.Module, batch: Batch) -> tuple[Tensor | Losses, Any]:
        """Both for one evaluation batch. Override it to spare the second forward pass."""
        return self.loss(model, batch), self.predict(model, batch)

    # ---- for people

    def input_data(self, inputs: Sequence[str]) -> Dataset[Any]:
        """Samples from the command line's INPUT arguments, prepared like evaluation samples."""
        raise UsageError(
            f"{type(self).__name__} reads no files",
            where="Task.input_data",
            remedy="write it, or predict without INPUT",
        )

    def describe(self, output: Any) -> dict[str, Any]:
        """One sample's output as plain values for a person to read."""
        return {"output": output}

    def show(self, sample: Any) -> dict[str, Any]:
        """A raw sample as plain values, to stand beside its prediction."""
        return {}

    def notes(self) -> list[str]:
        """Lines about the data, for the head of the log."""
        return []

    def report(self, values: Mapping[str, Tensor], samples: Sequence[tuple[Any, Any]]) -> str:
        """What an evaluation found, as text for the log, beside the numbers.

        Args:
            values: what `metrics` computed; those of two and more dimensions, such as a confusion matrix, are shown nowhere else.
            samples: some (raw sample, output).
        """
        return ""

    report.default = report  # type: ignore[attr-defined]

    def export(self, model: nn.Module, folder: Path) -> None:  # noqa: B027 - it may be left as it is
        """Write what users of the weights need besides them (labels, a tokenizer) into `folder`, beside `model.safetensors`."""

    def truth(self, sample: Any) -> Any:
        """A raw sample's label as `describe` would name it, to show beside a prediction; None where it has none."""
        return None
