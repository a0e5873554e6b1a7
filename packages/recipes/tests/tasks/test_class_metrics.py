"""Metrics of classes, against torchmetrics."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torchmetrics import MetricCollection, classification

from lockstep_recipes.tasks.class_metrics import ConfusionByLabel, class_metrics, update_class_metrics
from lockstep_recipes.tasks.ct.metrics import AnswerAccuracy


class NoWaiting(TorchFunctionMode):
    """Refuses functions that read values of tensors on the host, for which a GPU's host waits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("item", "tolist", "bincount", "nonzero", "unique", "__bool__", "cpu", "numpy"), name
        return func(*args, **(kwargs or {}))


def batches(classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for size in (7, 1, 24):
        probabilities = torch.randn(size, classes, generator=generator).softmax(dim=1)
        yield probabilities, torch.randint(0, max(1, classes - 2), (size,), generator=generator)


@pytest.mark.parametrize(("classes", "top_k"), [(2, 5), (6, 5), (30, 3)])
def test_numbers_are_those_of_torchmetrics_and_no_batch_is_waited_for(classes, top_k):
    ours = MetricCollection(class_metrics(classes, top_k=top_k), compute_groups=False)
    theirs = {
        "accuracy": classification.MulticlassAccuracy(classes, average="micro"),
        "macro_f1": classification.MulticlassF1Score(classes),
        "confusion": classification.MulticlassConfusionMatrix(classes),
    }
    if top_k < classes:
        theirs[f"accuracy_top{top_k}"] = classification.MulticlassAccuracy(classes, average="micro", top_k=top_k)
    for probabilities, labels in batches(classes):
        with NoWaiting():
            update_class_metrics(ours, probabilities, labels)
        for metric in theirs.values():
            metric.update(probabilities, labels)
    found = ours.compute()
    assert found.keys() == theirs.keys()
    for name, metric in theirs.items():
        assert torch.equal(found[name].float(), metric.compute().float()), name


def test_confusions_of_several_labels_are_those_of_torchmetrics():
    ours, theirs = ConfusionByLabel(4), classification.MultilabelConfusionMatrix(4)
    generator = torch.Generator().manual_seed(0)
    for size in (5, 1, 9):
        outputs, labels = torch.rand(size, 4, generator=generator), torch.randint(0, 2, (size, 4), generator=generator)
        with NoWaiting():
            ours.update(outputs, labels)
        theirs.update(outputs, labels)
    assert torch.equal(ours.compute(), theirs.compute())


def test_accuracy_of_answers_is_over_known_labels_by_question():
    nan = float("nan")
    metric = AnswerAccuracy(["soon", "later", "never"], threshold=0.3)
    risks = torch.tensor([[0.3, 0.9, 0.5], [0.2, nan, 0.5], [0.1, 0.2, 0.5]])
    labels = torch.tensor([[1.0, 0.0, nan], [1.0, 0.0, nan], [nan, 0.0, nan]])
    with NoWaiting():
        metric.update(risks, labels, torch.arange(3))
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == {"accuracy": 2 / 5, "accuracy/soon": 1 / 2, "accuracy/later": 1 / 3}
    assert set(found) <= set(metric.possible_results)
