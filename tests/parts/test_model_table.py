"""model.txt: shapes, parameters and operations as they are counted by hand."""

import torch
from torch import nn
from torch.nn import functional

from lockstep.core.parallel.sharded_tensor import chunks
from lockstep.parts.model_table import _counted, table, trace


class Branches(nn.Module):
    """Uses one layer twice, and one layer never."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 2)

    def forward(self, images, *, scale=1.0):
        means = self.convolution(images).mean(dim=(2, 3)) * scale
        return {"logits": self.twice(self.twice(means)), "more": None}


def test_operations_shapes_and_parameters():
    model = Branches()
    images = torch.ones(1, 3, 8, 10)
    found = trace(model, lambda: functional.relu(model(images, scale=2.0)["logits"]) @ torch.ones(4, 4))
    assert found.flops == {"": 2 * 27 * 4 * 80 + 2 * 2 * 16, "convolution": 2 * 27 * 4 * 80, "twice": 2 * 2 * 16}
    assert found.outputs == {"": "1 x 4", "convolution": "1 x 4 x 8 x 10", "twice": "1 x 4"}
    (given,), kwargs = found.arguments
    assert given is images
    assert kwargs == {"scale": 2.0}
    model.never.requires_grad_(False)
    text = table(model, found)
    assert "Branches: 138 parameters, 128 of them trainable" in text
    assert found.total == found.flops[""] + 2 * 16  # also what the task computes outside of its model
    assert "One sample takes 17.4 kFLOP" in text
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines()[5:] if row}
    assert rows["convolution"] == ["Conv2d", "1", "x", "4", "x", "8", "x", "10", "108", "17.3", "k"]
    assert rows["never"] == ["Linear", "10"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_table_without_a_forward_pass_says_why():
    text = table(Branches(), None, note="Outputs are left out: the parameters are sharded.")
    assert "Outputs are left out" in text
    assert "FLOP in a forward pass" not in text
    assert "Conv2d" in text


def test_model_of_which_only_parts_are_called_has_no_arguments():
    model = Branches()
    found = trace(model, lambda: model.twice(torch.ones(1, 4)))
    assert found.arguments is None
    assert "One sample takes 32 FLOP" in table(model, found)


def test_rows_of_many_ranks_are_counted():
    assert _counted([3, 3, 3, 1]) == "3, 3, 3, 1"
    assert _counted(chunks(100, 16)) == "7 on 14 ranks, 2 on 1 rank, 0 on 1 rank"


def test_chunks_are_those_of_torch():
    for rows, ranks in ((10, 4), (8, 4), (3, 4), (5, 2), (1, 8), (17, 8)):
        expected = [len(chunk) for chunk in torch.zeros(rows).chunk(ranks)]
        assert chunks(rows, ranks) == expected + [0] * (ranks - len(expected))
