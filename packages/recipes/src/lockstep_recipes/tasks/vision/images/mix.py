"""Mixup and cutmix of an image with its partner.

Common implementations mix the samples of a batch with each other, so the result depends on how the batch is split into
ranks and micro-batches. Here each sample is mixed individually, with a partner that is drawn from the whole data set
with the sample's own random numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def draw_partner(samples: int, probability: float) -> int | None:
    """The index of the sample to mix with, uniform over `samples` samples. None: the sample is not mixed.

    Draws from torch's global generator: whether to mix, and the partner.
    """
    mixes = float(torch.rand(())) < probability
    partner = int(torch.randint(samples, ()))
    return partner if mixes else None


def mix(image: Tensor, partner: Tensor, *, mixup_alpha: float, cutmix_alpha: float) -> tuple[Tensor, float]:
    """`image` mixed with `partner` by mixup or cutmix. If both have an alpha above 0, each has probability 1/2.

    Draws from torch's global generator: the kind, a share from Beta(alpha, alpha), and the position of a box.

    Args:
        image, partner: uint8 (channels, height, width), of equal shapes.
        mixup_alpha, cutmix_alpha: 0 or more, not both 0.

    Returns:
        the mixed image, and the share of `image` in it, from 0 to 1.
    """
    cuts = float(torch.rand(())) < 0.5 if mixup_alpha and cutmix_alpha else cutmix_alpha > 0
    alpha = cutmix_alpha if cuts else mixup_alpha
    share = float(torch.distributions.Beta(alpha, alpha, validate_args=False).sample())
    return cutmix(image, partner, share) if cuts else (mixup(image, partner, share), share)


def mixup(image: Tensor, partner: Tensor, share: float) -> Tensor:
    """`share` x image + (1 - share) x partner, rounded to whole levels.

    Source: Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization, arXiv:1710.09412, equation 2.

    Args:
        image, partner: uint8 (channels, height, width).
        share: from 0 to 1.
    """
    return torch.lerp(partner.float(), image.float(), share).round_().to(torch.uint8)


def cutmix(image: Tensor, partner: Tensor, share: float) -> tuple[Tensor, float]:
    """`image` with a box of `partner` that covers about 1 - `share` of it. The centre of the box is drawn uniformly.

    Source: Yun et al. 2019, CutMix, arXiv:1905.04899, equations 1 and 2.

    Args:
        image, partner: uint8 (channels, height, width).
        share: from 0 to 1.

    Returns:
        the mixed image, and the actual share of pixels of `image`. It differs from `share`, because the box is clipped
        at the borders and has whole pixels.
    """
    height, width = image.shape[-2:]
    side = math.sqrt(1 - share)
    top, bottom = _interval(height, side)
    left, right = _interval(width, side)
    mixed = image.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _interval(length: int, share: float) -> tuple[int, int]:
    """The start and the end (exclusive) of `share` of `length` positions around a random position."""
    size = round(length * share)
    first = int(torch.randint(length, ())) - size // 2
    return max(0, first), min(length, first + size)
