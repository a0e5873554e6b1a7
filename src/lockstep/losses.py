"""Overlap losses for segmentation: Dice per sample, and Dice over the global batch.

Dice is a ratio of sums. Computed per micro-batch, it depends on how the batch is split, and no factor corrects that.
`dice` is a ratio per sample, summed over samples, as `Task.loss` returns it. `overlaps` and `batch_dice` compute a
ratio over the global batch: `Task.embed` returns the sums of each sample, and `Task.loss` gets those of all samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.core.errors import UsageError


class Overlaps(NamedTuple):
    """Sums over the pixels of each sample, of shape (samples, classes). Dice, IoU and F-beta are ratios of them."""

    common: Tensor
    """Sum of probability times target."""
    outputs: Tensor
    """Sum of the probabilities."""
    targets: Tensor
    """Sum of the targets."""


def overlaps(probabilities: Tensor, targets: Tensor, *, valid: Tensor | None = None) -> Overlaps:
    """The sums of each sample, from which ratios are computed.

    Args:
        probabilities: from 0 to 1, of shape (samples, classes, ...), such as `logits.softmax(dim=1)`, or
            `logits.sigmoid()` if classes overlap, or if there is only one class.
        targets: from 0 to 1, of the same shape; or class numbers of shape (samples, ...). With one class, targets of
            shape (samples, ...) are 1 where a pixel has the class.
        valid: true where a pixel counts, of shape (samples, ...). None: all count.

    Raises:
        UsageError: the shapes do not match.
    """
    shape = probabilities.shape
    is_dense, is_numbered = targets.shape == shape, targets.shape == shape[:1] + shape[2:]
    if len(shape) < 2 or not (is_dense or is_numbered) or (valid is not None and valid.shape != shape[:1] + shape[2:]):
        of_valid = "" if valid is None else f", valid of {tuple(valid.shape)}"
        raise UsageError(
            f"the shapes do not match: probabilities {tuple(shape)}, targets {tuple(targets.shape)}{of_valid}",
            where="lockstep.losses",
            remedy="give probabilities of shape (samples, classes, ...), targets of the same shape or of "
            "(samples, ...), and `valid` of (samples, ...)",
        )
    shares = probabilities.float() if probabilities.dtype.itemsize < 4 else probabilities  # sums of many pixels
    truth = targets if is_dense else targets.unsqueeze(1)
    if is_numbered and shape[1] > 1:
        numbers = torch.arange(shape[1], device=targets.device)
        truth = truth == numbers.reshape(-1, *[1] * (len(shape) - 2))
    truth = truth.to(shares.dtype)
    if valid is not None:
        counts = valid.unsqueeze(1).to(shares.dtype)
        shares, truth = shares * counts, truth * counts
    shares, truth = shares.reshape(*shape[:2], -1), truth.reshape(*shape[:2], -1)
    return Overlaps((shares * truth).sum(dim=2), shares.sum(dim=2), truth.sum(dim=2))


def dice(probabilities: Tensor, targets: Tensor, *, valid: Tensor | None = None, smooth: float = 1.0) -> Tensor:
    """1 - Dice of each sample, as the mean over classes, **summed** over samples. `Task.loss` may return it.

    Dice is (2 common + smooth) / (outputs + targets + smooth), by `overlaps`.

    Source: Drozdzal et al., The Importance of Skip Connections in Biomedical Image Segmentation, arXiv:1608.04117,
    equation 1, for each class. Milletari et al., arXiv:1606.04797, have squares in the denominator.

    Args:
        probabilities, targets, valid: see `overlaps`.
        smooth: keeps the ratio defined for empty samples. With 0, classes that a sample lacks are ignored.
    """
    return _by_sample(overlaps(probabilities, targets, valid=valid), smooth).sum()


def batch_dice(sums: Overlaps, *, smooth: float = 1.0) -> Tensor:
    """1 - Dice over all samples, as the mean over classes, **times the number of samples**, for a task with `embed`:

        def embed(self, model, batch):
            return lockstep.losses.overlaps(model(batch[0]).sigmoid(), batch[1])

        def loss(self, model, sums):
            return lockstep.losses.batch_dice(sums)

    Lockstep divides by the number of samples in the global batch, so the loss is 1 - Dice.

    Args:
        sums: the sums of all samples of the global batch.
        smooth: see `dice`.
    """
    whole = Overlaps(*(of_samples.sum(dim=0, keepdim=True) for of_samples in sums))
    return _by_sample(whole, smooth).sum() * len(sums.common)


def _by_sample(sums: Overlaps, smooth: float) -> Tensor:
    """(samples,), the mean over classes of 1 - Dice."""
    size = sums.outputs + sums.targets + smooth
    losses = 1 - (2 * sums.common + smooth) / size.clamp(min=torch.finfo(size.dtype).tiny)
    if smooth:
        return losses.mean(dim=1)
    present = (sums.targets > 0).to(losses.dtype)
    return (losses * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
