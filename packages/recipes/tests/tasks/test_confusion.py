"""Tables for people say what torchmetrics says."""

import re

import pytest
import torch

from lockstep_recipes.tasks import confusion


def cells(text):
    """Rows of a table by their first column."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.split("\n")]
    return {row[0]: row[1:] for row in rows}


def numbers(row):
    return [float(cell.replace(",", "")) for cell in row]


def close(found, wanted):
    """Within what four digits can say."""
    return torch.allclose(torch.tensor(found, dtype=torch.float64), wanted.double(), rtol=0, atol=0.6e-4)


def drawn(classes, seed):
    """Truth and prediction of samples. A class is never true, another is never predicted, and a third is neither."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, classes, (300,), generator=generator)
    said = torch.where(
        torch.rand(300, generator=generator) < 0.6, truth, torch.randint(0, classes, (300,), generator=generator)
    )
    truth[truth == 1], said[said == 2] = 0, 0
    truth[truth == 3], said[said == 3] = 4, 4
    return truth, said


@pytest.mark.parametrize("seed", range(4))
def test_numbers_by_class_are_those_of_torchmetrics(seed):
    from torchmetrics.functional import classification as metrics

    truth, said = drawn(7, seed)
    labels = [f"class {number}" for number in range(7)]
    found = cells(confusion.by_class(metrics.multiclass_confusion_matrix(said, truth, 7), labels))
    assert list(found) == ["class", *labels, "mean"]
    columns = list(zip(*(numbers(found[label]) for label in labels), strict=True))
    wanted = [
        metric(said, truth, 7, average=None)
        for metric in (metrics.multiclass_precision, metrics.multiclass_recall, metrics.multiclass_f1_score)
    ]
    assert all(close(column, one) for column, one in zip(columns, wanted, strict=False))
    assert list(columns[3]) == torch.bincount(truth, minlength=7).tolist()
    assert numbers(found["mean"])[3] == 300


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_several_labels_are_those_of_torchmetrics(seed):
    from torchmetrics.functional import classification as metrics

    generator = torch.Generator().manual_seed(seed)
    truth = (torch.rand(200, 5, generator=generator) < torch.tensor([0.5, 0.1, 0.0, 0.9, 0.0])).long()
    said = (torch.rand(200, 5, generator=generator) < torch.tensor([0.4, 0.0, 0.2, 0.8, 0.0])).long()
    labels = list("abcde")
    found = cells(confusion.by_class(metrics.multilabel_confusion_matrix(said, truth, 5), labels))
    columns = list(zip(*(numbers(found[label]) for label in labels), strict=True))
    kinds = (metrics.multilabel_precision, metrics.multilabel_recall, metrics.multilabel_f1_score)
    assert all(close(column, kind(said, truth, 5, average=None)) for column, kind in zip(columns, kinds, strict=False))
    assert list(columns[3]) == truth.sum(dim=0).tolist()
    assert close(numbers(found["mean"])[:3], torch.stack([kind(said, truth, 5, average="macro") for kind in kinds]))
    assert numbers(found["mean"])[3] == int(truth.sum())


def test_the_mean_over_classes_is_the_macro_mean():
    from torchmetrics.functional import classification as metrics

    truth = torch.arange(300) % 4
    said = torch.where(torch.arange(300) % 7 < 4, truth, torch.arange(300) % 3)
    found = cells(confusion.by_class(metrics.multiclass_confusion_matrix(said, truth, 4), list("abcd")))
    wanted = [
        metric(said, truth, 4, average="macro")
        for metric in (metrics.multiclass_precision, metrics.multiclass_recall, metrics.multiclass_f1_score)
    ]
    assert close(numbers(found["mean"])[:3], torch.stack(wanted))


def test_a_table_by_class_reads_so():
    text = confusion.by_class(torch.tensor([[1500, 500], [0, 1]]), ["a class with a rather long name", "b"])
    assert text.split("\n") == [
        "  class                     precision  recall      F1  samples",
        "  a class with a rather...     1.0000  0.7500  0.8571    2,000",
        "  b                            0.0020  1.0000  0.0040        1",
        "  mean                         0.5010  0.8750  0.4306    2,001",
    ]


def test_of_few_classes_the_whole_matrix_is_shown():
    text = confusion.confusions(
        torch.tensor([[1500, 2, 0], [3, 4, 5], [6, 0, 7]]), ["a", "long name", "an even longer one that is cut"]
    )
    assert text.split("\n") == [
        "  truth \\ prediction            a  long name  an even longer one th...",
        "  a                         1,500          2                         0",
        "  long name                     3          4                         5",
        "  an even longer one th...      6          0                         7",
    ]
    twelve = confusion.confusions(torch.arange(144).reshape(12, 12), [f"c{number}" for number in range(12)])
    assert cells(twelve)["c3"] == [str(number) for number in range(36, 48)]


def test_of_many_classes_the_pairs_confused_most_are_shown():
    matrix = torch.diag(torch.full((13,), 9999))
    for count, (truth, said) in enumerate(
        [(0, 1), (1, 0), (12, 3), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)], start=1
    ):
        matrix[truth, said] = count * 1000
    before = matrix.clone()
    lines = confusion.confusions(matrix, [f"c{number}" for number in range(13)]).split("\n")
    assert lines[:3] == ["  most confused:", "  11,000  c11 predicted as c12", "  10,000  c10 predicted as c11"]
    assert lines[9:] == ["   3,000  c12 predicted as c3", "   2,000  c1 predicted as c0"]
    assert torch.equal(matrix, before)


def test_only_pairs_that_were_confused_are_shown():
    matrix = torch.diag(torch.full((13,), 5))
    labels = [f"c{number}" for number in range(13)]
    assert confusion.confusions(matrix, labels) == "  no sample was misclassified"
    matrix[2, 1] = 1
    assert confusion.confusions(matrix, labels) == "  most confused:\n       1  c2 predicted as c1"


def test_few_classes_are_listed_in_their_order_and_of_many_the_ends():
    assert confusion.listed({"b": 1, "a": 2000}) == "b (1), a (2,000)"
    eight = {f"c{number}": number for number in range(8)}
    assert confusion.listed(eight) == "c0 (0), c1 (1), c2 (2), c3 (3), c4 (4), c5 (5), c6 (6), c7 (7)"
    expected = "9 in all; most: c8 (8,000), c7 (7), c6 (6); fewest: c2 (2), c1 (1), c0 (0)"
    assert confusion.listed({**eight, "c8": 8000}) == expected


def test_a_class_of_one_sample_counts_fully():
    found = cells(confusion.by_class(torch.tensor([[1, 0], [0, 1]]), ["a", "b"]))
    assert [numbers(found[name]) for name in ("a", "b", "mean")] == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 2]]
