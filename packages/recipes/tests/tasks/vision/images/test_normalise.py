"""Normalisation against plain arithmetic."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep_recipes.tasks.vision.images.normalise import IMAGENET_MEAN, IMAGENET_STD, normalise


def batch(dtype=torch.uint8):
    images = torch.arange(2 * 3 * 4 * 5).reshape(2, 4, 5, 3).permute(0, 3, 1, 2)
    return (images * 2 % 256).to(dtype)


@pytest.mark.parametrize("source", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_values_are_normalised_by_channel(source, dtype, bound):
    result = normalise(batch(source), IMAGENET_MEAN, IMAGENET_STD, dtype=dtype)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    expected = (batch().double() / 255 - mean) / std
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert (result.double() - expected).abs().max() <= bound


def test_other_numbers_of_channels_are_errors():
    with pytest.raises(ValueError, match="3 channels, 1 means"):
        normalise(batch(), [0.5], [0.5])


def test_what_another_mode_computed_is_not_kept():
    """Constants that were made under inference mode, or without memory, would fail in a training step."""
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    with FakeTensorMode():
        assert normalise(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), mean, std).shape == (1, 3, 2, 2)
    with torch.inference_mode():
        normalise(batch(), mean, std)
    weight = torch.ones(3, 1, 1, requires_grad=True)
    (normalise(batch(), mean, std) * weight).sum().backward()
    assert weight.grad.isfinite().all()
