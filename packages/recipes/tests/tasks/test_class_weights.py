"""Weights of classes where they are needed."""

import torch

from lockstep_recipes.tasks.class_weights import OnDevice


def test_class_weights_are_not_rounded_to_the_16_bits_of_logits():
    weights = torch.tensor([1.001, 0.337])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert OnDevice(weights).like(torch.zeros(2, dtype=dtype)) is not None
        assert torch.equal(OnDevice(weights).like(torch.zeros(2, dtype=dtype)), weights)
    assert OnDevice(weights).like(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
    assert OnDevice(None).like(torch.zeros(2)) is None
