"""Class metrics from counts. Counting a batch takes a few operations and does not wait for the device.

The results equal those of torchmetrics, whose confusion matrix and F1 use `torch.bincount`, which makes the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lockstep_recipes.tasks.counting import counted

_MOST_CLASSES = 4096  # limit for a confusion matrix, which then has 16 million counts


def class_metrics(classes: int, *, top_k: int = 1) -> dict[str, Metric]:
    """`accuracy`, `accuracy_top<k>` (if there are more than k classes), `macro_f1`, and the matrix `confusion`.

    `update_class_metrics` updates them.
    """
    metrics: dict[str, Metric] = {"accuracy": ShareRight()}
    if 1 < top_k < classes:
        metrics[f"accuracy_top{top_k}"] = ShareRight(top_k)
    metrics["macro_f1"] = MacroF1(classes)
    if classes <= _MOST_CLASSES:
        metrics["confusion"] = Confusion(classes)
    return metrics


def update_class_metrics(metrics: MetricCollection, probabilities: Tensor, labels: Tensor) -> None:
    """Update the metrics that `class_metrics` made with a batch.

    Args:
        probabilities: (samples, classes).
        labels: int64 (samples).
    """
    metrics.update(probabilities, probabilities.argmax(dim=-1), labels)


class ShareRight(Metric):
    """The fraction of samples whose class is among the `top_k` most probable classes."""

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
        # By class: samples, predictions, correct predictions.
        self.add_state("counts", torch.zeros(3, classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch, see `ShareRight`."""
        # Incorrect predictions are counted in an extra class, which is dropped.
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
    """Its result is drawn rather than logged as a number, so it is not counted in training."""
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
    """For samples with several labels: the number of samples by (label, has it, is predicted to have it)."""

    full_state_update = False
    gives_numbers = False
    """Its result is drawn rather than logged as a number, so it is not counted in training."""
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
