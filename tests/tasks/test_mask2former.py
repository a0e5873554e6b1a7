"""Mask2Former: the losses of transformers as sums, and its class scores."""

import contextlib

import pytest
import torch
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)

from lockstep.tasks.segmentation.mask2former import (
    UNUSED,
    Mask2FormerLosses,
    class_scores,
    counts_of,
    outputs_of,
    true_masks,
)

SIZE = 64


@contextlib.contextmanager
def in_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def made():
    torch.manual_seed(0)
    stages = ["stage1", "stage2", "stage3", "stage4"]
    sizes = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "embed_dim": 8, "window_size": 2}
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(image_size=SIZE, drop_path_rate=0.0, out_features=stages, **sizes),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=2,
        num_queries=5,
        train_num_points=64,
        num_labels=4,
    )
    return Mask2FormerForUniversalSegmentation(config).double().train()


def masks_of(*classes):
    """A picture for each tuple of classes, which share its rows; -1 is ignored."""
    masks = torch.full((len(classes), SIZE, SIZE), -1)
    for mask, own in zip(masks, classes, strict=True):
        for number, rows in zip(own, torch.arange(SIZE).chunk(max(len(own), 1)), strict=False):
            mask[rows] = number
    return masks


def test_true_masks_are_the_classes_of_a_picture():
    masks = masks_of((2, -1, 0), (), (1,))
    found = true_masks(masks)
    assert [one.classes.tolist() for one in found] == [[0, 2], [], [1]]
    assert counts_of(masks).tolist() == [2, 0, 1]
    assert torch.equal(found[0].masks.sum(0) == 1, masks[0] >= 0)


def test_loss_of_one_batch_is_that_of_transformers():
    model, masks = made(), masks_of((0, 3), (1,), (2, -1, 3, 0))
    images = torch.randn(3, 3, SIZE, SIZE).double()
    true = true_masks(masks, torch.float64)
    losses = Mask2FormerLosses(model.config)
    with in_float64():
        model.criterion = type(model.criterion)(model.config, model.weight_dict)
        torch.manual_seed(1)
        labels = {"mask_labels": [one.masks for one in true], "class_labels": [one.classes for one in true]}
        expected = model(pixel_values=images, **labels).loss
        torch.manual_seed(1)
        sums = losses.sums(outputs_of(model, images), masks)
    units = losses.weights(counts_of(masks))
    loss = sum(factor * sums[head] / units[head] for head, factor in losses.coefficients().items())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    trained = [value for value in model.parameters() if value.requires_grad]
    ours, theirs = (torch.autograd.grad(total, trained, allow_unused=True) for total in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= 1e-10 * max(float(other.norm()), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_used_parameter_gets_a_gradient_in_every_precision(dtype):
    model = made().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    images = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        sums = Mask2FormerLosses(model.config).sums(outputs_of(model, images), masks_of((0, 1), (2,)))
    sum(sums.values()).backward()
    without = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    assert [name for name in without if not any(part in name for part in UNUSED)] == []
    assert without


def test_picture_without_valid_pixels_has_no_mask():
    model, masks = made(), masks_of((), ())
    losses = Mask2FormerLosses(model.config)
    sums = losses.sums(outputs_of(model, torch.randn(2, 3, SIZE, SIZE).double()), masks)
    units = losses.weights(counts_of(masks))
    assert sums["mask"].item() == sums["dice"].item() == units["mask"].item() == units["dice"].item() == 0
    assert sums["class"].item() > 0
    assert units["class"].item() == pytest.approx(0.1 * 10)


def test_class_scores_have_the_classes_of_the_image_processor():
    model = made().eval()
    with torch.no_grad():
        outputs = outputs_of(model, torch.randn(2, 3, SIZE, SIZE).double())
    scores = class_scores(outputs)
    assert scores.shape == (2, 4, SIZE // 4, SIZE // 4)
    processor = Mask2FormerImageProcessorPil()
    for one, other in zip(scores, processor.post_process_semantic_segmentation(outputs, [(16, 16)] * 2), strict=True):
        assert (one.argmax(0) == other).double().mean() > 0.9  # it resizes to 384 pixels and back
