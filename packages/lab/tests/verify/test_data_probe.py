"""What is said about data: samples in both data sets, and labels among the inputs."""

import pytest
import torch

from lockstep_lab.verify.data_probe import labels_among_inputs, overlap


def batches(count=60, classes=3, change=lambda inputs, label: inputs):
    generator = torch.Generator().manual_seed(0)
    return [
        (change(torch.randn(1, 4, generator=generator), number % classes), torch.tensor([number % classes]))
        for number in range(count)
    ]


def with_last(value):
    def change(inputs, label):
        return torch.cat([inputs[:, :3], torch.tensor([[float(value(label))]])], dim=1)

    return change


def test_samples_in_both_data_sets_are_counted():
    first, second = batches()[:40], batches()[30:]
    (remark,) = overlap(first, second)
    assert remark.startswith("10 of 30 evaluation samples equal one of 40 training samples")
    assert overlap(first, batches()[40:]) == overlap([("text",)], [("text",)]) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [(lambda label: label, True), (lambda label: 5 - 2 * label, True), (lambda label: label > 0, False)],
)
def test_a_number_that_determines_the_label_is_named(value, said):
    remarks = labels_among_inputs(batches(change=with_last(value)))
    assert remarks == (["number 3 of the inputs determines the label by itself, in each of 60 samples"] if said else [])


def test_few_samples_say_nothing():
    assert labels_among_inputs(batches(count=30, change=with_last(lambda label: label))) == []
    assert labels_among_inputs(batches(classes=20, change=with_last(lambda label: label))) == []
    assert labels_among_inputs([(torch.zeros(1, 4), torch.zeros(1, 4))] * 60) == []
