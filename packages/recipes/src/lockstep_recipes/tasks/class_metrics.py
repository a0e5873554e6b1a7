"""Metrics of classes from counts. A batch is counted without waiting for the device, in a few operations.

The numbers are those of torchmetrics. Its confusion matrix and its F1 use `torch.bincount`, for which the host waits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lockstep_recipes.tasks.counting import counted

_MOST_CLASSES = 4096  # with a confusion matrix: it has 16 million counts then


def class_metrics(classes: int, *, top_k: int = 1) -> dict[str, Metric]:
    """`accuracy`, `accuracy_top<k>` (where there are more classes than that), `macro_f1`, and the matrix `confusion`.

    `update_class_metrics` feeds them.
    """
    metrics: dict[str, Metric] = {"accuracy": ShareRight()}
    if 1 < top_k < classes:
        metrics[f"accuracy_top{top_k}"] = ShareRight(top_k)
    metrics["macro_f1"] = MacroF1(classes)
    if classes <= _MOST_CLASSES:
        metrics["confusion"] = Confusion(classes)
    return metrics


def update_class_metrics(metrics: MetricCollection, probabilities: Tensor, labels: Tensor) -> None:
    """Feed a batch to the metrics that `class_metrics` made.

    Args:
        probabilities: (samples, classes).
        labels: int64 (samples).
    """
    metrics.update(probabilities, probabilities.argmax(dim=-1), labels)


class ShareRight(Metric):
    """The share of the samples whose class is among the `top_k` most probable classes."""

    higher_is_better = True
    full_state_update = False
    right: Tensor
    samples: Tensor

    def __init__(self, top_k: int = 1) -> None:
        super().__init__()
        self.top_k = top_k
        for name in ("right", "samples"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch: probabilities (samples, classes), the most probable classes (samples), labels (samples)."""
        is_right = predicted == labels
        if self.top_k > 1:
            is_right = (probabilities.topk(self.top_k, dim=-1).indices == labels.unsqueeze(-1)).any(dim=-1)
        self.right += is_right.sum()
        self.samples += len(labels)

    def compute(self) -> Tensor:
        return self.right / self.samples


class MacroF1(Metric):
    """The mean of the F1 of the classes that occur or are predicted."""

    higher_is_better = True
    full_state_update = False
    counts: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        # By class: samples, predictions, right predictions.
        self.add_state("counts", torch.zeros(3, classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch, see `ShareRight`."""
        # What is not right is counted in a class of its own, which is left out.
        places = torch.stack([labels, predicted, torch.where(predicted == labels, labels, self.classes)])
        places += torch.arange(3, device=places.device).unsqueeze(1) * (self.classes + 1)
        self.counts += counted(places, 3 * (self.classes + 1)).reshape(3, -1)[:, :-1]

    def compute(self) -> Tensor:
        true, said, right = self.counts
        either = true + said
        f1 = 2 * right / either.clamp(min=1)
        mean: Tensor = (f1 / (either > 0).sum().clamp(min=1)).sum()
        return mean


class Confusion(Metric):
    """The number of samples by (class, predicted class)."""

    full_state_update = False
    gives_numbers = False
    """Its result is drawn, and is no figure of the log. So it is not counted in training."""
    counts: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.add_state("counts", torch.zeros(classes, classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch, see `ShareRight`."""
        self.counts += counted(labels * self.classes + predicted, self.classes**2).reshape(self.classes, -1)

    def compute(self) -> Tensor:
        return self.counts


class ConfusionByLabel(Metric):
    """Where a sample may have several labels: the number of samples by (label, has it, is said to have it)."""

    full_state_update = False
    gives_numbers = False
    """Its result is drawn, and is no figure of the log. So it is not counted in training."""
    counts: Tensor

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(labels, 2, 2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Count a batch: both (samples, labels)."""
        true, said = labels.bool(), probabilities > 0.5
        has = torch.stack([~true, true], dim=-1)
        told = torch.stack([~said, said], dim=-1)
        self.counts += (has.unsqueeze(-1) & told.unsqueeze(-2)).sum(dim=0)

    def compute(self) -> Tensor:
        return self.counts
