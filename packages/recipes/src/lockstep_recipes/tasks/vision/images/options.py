"""Options for augmentation: config keys. Importing this does not import torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from lockstep.core.config.config_section import Section

Interpolation = Literal["bilinear", "bicubic"]
Crop = Literal["random_resized", "scale_jitter", "shift", "resize", "fit"]
Probability = Annotated[float, Field(ge=0, le=1)]


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError("give two positive numbers, the smaller first")
    return pair


def _share(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[1] > 1:
        raise ValueError("give fractions of the area, at most 1")
    return pair


# YAML has lists, not tuples.
Range = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_ordered)]
Shares = Annotated[Range, AfterValidator(_share)]


class ColorJitterOptions(Section):
    """Brightness, contrast, saturation and hue change at random, in random order."""

    probability: Probability = 1.0
    """Probability of this change."""
    brightness: Annotated[float, Field(ge=0)] = 0.0
    """At 0.4, the factor is drawn from 0.6 to 1.4."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """As for brightness."""
    saturation: Annotated[float, Field(ge=0)] = 0.0
    """As for brightness."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """At 0.1, the hue moves by -0.1 to 0.1 of the colour circle. Takes 1 ms for an image of 224x224 pixels."""


class RandAugmentOptions(Section):
    """Apply `operations` of 14 operations one after another, at one strength.

    Source: Cubuk et al., RandAugment, arXiv:1909.13719.
    """

    operations: Annotated[int, Field(ge=1)] = 2
    """Number of operations (N in the paper). An operation may be drawn several times."""
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """Strength (M in the paper); 30 is the strongest."""


class RandomErasingOptions(Section):
    """Overwrite a rectangle of the image. Mask and boxes stay: the object is there, but hidden.

    Source: Zhong et al., Random Erasing Data Augmentation, arXiv:1708.04896.
    """

    probability: Probability = 0.25
    """Probability of this change."""
    area: Shares = (0.02, 1 / 3)
    """Smallest and largest rectangle, as a fraction of the image's area."""
    ratio: Range = (0.3, 10 / 3)
    """Smallest and largest width, divided by height."""
    content: Literal["noise", "fill"] = "noise"
    """`noise`: random values. `fill`: the grey level `fill`."""


class AugmentOptions(Section):
    """Augmentation of training images: crop, flips, one policy, colour, erasing, in this order."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("randaugment", "trivialaugment"),)

    crop: Crop = "random_resized"
    """`random_resized`: a region of random area and aspect ratio is resized (Szegedy et al., arXiv:1409.4842).
    `scale_jitter`: the image keeps its aspect ratio, is scaled at random, and cropped or padded at a random offset
    (large scale jittering of Ghiasi et al., arXiv:2012.07177). `shift`: the whole image is resized and moved by up to
    `shift` pixels. `resize`: the whole image is resized. `fit`: the whole image keeps its aspect ratio and is padded at
    the right and at the bottom."""
    jitter: Range = (0.5, 2.0)
    """scale_jitter: smallest and largest factor, relative to the scale at which the image just fits in."""
    keep_boxes: bool = True
    """random_resized, scale_jitter: if an image has boxes, draw the crop again until it contains a box, up to 10 times,
    then use the whole image. No effect on images without boxes."""
    scale: Shares = (0.08, 1.0)
    """random_resized: smallest and largest area, as a fraction of the image's area."""
    ratio: Range = (3 / 4, 4 / 3)
    """random_resized: smallest and largest width divided by height, relative to the aspect ratio of the result."""
    shift: Annotated[int, Field(ge=0)] = 4
    """shift: the largest distance in pixels, in each direction."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    vertical_flip: Probability = 0.0
    """Probability of a vertical flip."""
    randaugment: RandAugmentOptions | None = None
    """Several random operations."""
    trivialaugment: bool = False
    """One random operation at random strength (Müller and Hutter, arXiv:2103.10158, wide range)."""
    color_jitter: ColorJitterOptions | None = None
    """Random brightness, contrast, saturation, hue."""
    random_erasing: RandomErasingOptions | None = None
    """Overwrite a random rectangle."""
    interpolation: Interpolation = "bilinear"
    """The filter for resizing images. Both are antialiased."""
    fill: Annotated[int, Field(ge=0, le=255)] = 128
    """Grey level of areas that geometry leaves empty."""
    min_visible: Probability = 0.1
    """A box is removed if the visible fraction of its area is smaller."""
