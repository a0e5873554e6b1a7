"""Samples are sorted by their labels, so that the halves of a batch differ."""

import torch

from lockstep.parts.checks.unlike_halves import unlike_order


def test_samples_are_sorted_by_labels_and_else_by_contents():
    inputs = torch.tensor([[9.0, 1.0], [0.0, 1.0], [5.0, 5.0], [7.0, 7.0]])
    classes, shares = torch.tensor([2, 0, 1, 0]), torch.tensor([0.1, 0.4, 0.3, 0.2])
    cases = [
        ((inputs, classes), [1, 3, 2, 0]),
        ({"y": classes, "x": inputs}, [1, 3, 2, 0]),  # integers before fractions
        ((inputs, shares), [0, 3, 2, 1]),  # the last
        ((inputs, torch.zeros(4)), [1, 0, 2, 3]),  # equal labels tell nothing
        ((inputs, shares.log() - torch.inf), [1, 0, 2, 3]),
        ([[inputs], torch.arange(3)], [1, 0, 2, 3]),  # no row for each sample
        ("text", [0, 1, 2, 3]),
    ]
    for batch, order in cases:
        assert unlike_order(batch, 4) == order, batch
