"""Segmentation losses as sums over units that depend only on labels: valid pixels, or images with valid pixels.

Dice and Lovasz are not sums over pixels. Here they are defined per image and summed over images, so that the loss of a
global batch does not depend on how it is split into ranks and micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep import losses

IGNORED = -1
"""The class number of ignored pixels."""


def valid_pixels(masks: Tensor, weights: Tensor | None = None) -> Tensor:
    """The number of pixels with a class, or the sum of the weights of their classes.

    Args:
        masks: integers (..., height, width).
        weights: (classes,) on the device of `masks`.
    """
    if weights is None:
        return (masks != IGNORED).sum()
    # Counts are exact integers, so the sum does not depend on the order of pixels.
    counts = torch.stack([(masks == number).sum() for number in range(len(weights))])
    return (counts.double() * weights.double()).sum()


def images_with_labels(masks: Tensor) -> Tensor:
    """The number of images with at least one pixel that has a class: masks (images, height, width)."""
    return (masks != IGNORED).flatten(1).any(dim=1).sum()


def cross_entropy(logits: Tensor, masks: Tensor, *, weights: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """The cross-entropy, summed over valid pixels, each with the weight of its class.

    Args:
        logits: (images, classes, height, width).
        masks: integers (images, height, width).
    """
    target = masks.long()
    options = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": smoothing}
    return functional.cross_entropy(logits, target, weights, **options)  # type: ignore[arg-type]


def focal(logits: Tensor, masks: Tensor, *, gamma: float, weights: Tensor | None = None) -> Tensor:
    """-(1 - p)^gamma log p of the true class, summed over valid pixels, each with the weight of its class.

    Source: Lin et al., Focal Loss for Dense Object Detection, arXiv:1708.02002, equations 4 and 5, with softmax.

    Args:
        logits: (images, classes, height, width).
        masks: integers (images, height, width).
    """
    target = masks.long()
    plain = functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
    # The gradient of a power with an exponent below 1 is infinite at zero.
    hard = (1 - (-plain).exp()).clamp(min=torch.finfo(plain.dtype).tiny) ** gamma
    losses = hard * plain
    if weights is not None:
        losses = losses * weights[target.clamp(min=0)]
    return (losses * (target != IGNORED)).sum()


def dice(logits: Tensor, masks: Tensor) -> Tensor:
    """1 - Dice over the valid pixels of an image, as the mean over the classes that occur in the image; summed over
    images. See `lockstep.losses.dice`.

    Args:
        logits: (images, classes, height, width).
        masks: integers (images, height, width).
    """
    return losses.dice(logits.softmax(dim=1), masks, valid=masks != IGNORED, smooth=0.0)


def lovasz(logits: Tensor, masks: Tensor) -> Tensor:
    """The Lovasz extension of 1 - IoU, as the mean over the classes that occur in an image; summed over images.

    Source: Berman et al., The Lovasz-Softmax loss, arXiv:1705.08790, algorithm 1, for each image separately.

    Args:
        logits: (images, classes, height, width).
        masks: integers (images, height, width).
    """
    valid, classes = (masks != IGNORED).flatten(1), logits.shape[1]
    numbers = torch.where(valid, masks.flatten(1), classes).long()
    occurs = torch.zeros(len(masks), classes + 1, dtype=torch.bool, device=masks.device).scatter_(1, numbers, True)
    total = logits.sum() * 0  # a scalar with a gradient, even if no pixel is valid
    found = occurs[:, :classes].tolist()  # the only wait of the host for the device
    for picture, mask, used, of_image in zip(logits.flatten(2), masks.flatten(1), valid, found, strict=True):
        shares = picture.softmax(dim=0)
        for number in (number for number in range(classes) if of_image[number]):
            truth = (mask == number).to(shares.dtype)
            # Ignored pixels come last, with an error of 0: they change neither the sum nor the gradient.
            errors, order = torch.where(used, (truth - shares[number]).abs(), 0).sort(descending=True, stable=True)
            total = total + torch.dot(errors, _lovasz_gradient(truth[order])) / sum(of_image)
    return total


def _lovasz_gradient(truth: Tensor) -> Tensor:
    """The gradient of the Lovasz extension of 1 - IoU with respect to sorted errors: `truth` sorted alike."""
    positives = truth.sum()
    intersection = positives - truth.cumsum(0)
    union = positives + (1 - truth).cumsum(0)
    jaccard = 1 - intersection / union
    return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
