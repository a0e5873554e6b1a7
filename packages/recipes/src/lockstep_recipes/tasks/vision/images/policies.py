"""RandAugment and TrivialAugment: random operations of geometry and colour on an image and its targets.

Both draw from the 14 operations of RandAugment's paper: Identity, AutoContrast, Equalize, Rotate, Solarize, Color,
Posterize, Contrast, Brightness, Sharpness, ShearX, ShearY, TranslateX, TranslateY. Geometric operations move mask and
boxes with the image. As in the authors' code, rotations are about the centre, and shears about the upper left corner.

Sources: Cubuk et al., RandAugment, arXiv:1909.13719; Müller and Hutter, TrivialAugment, arXiv:2103.10158, table 1
(wide). The ranges of RandAugment are those of torchvision's `RandAugment`, which has magnitudes from 0 to 30.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep_recipes.tasks.vision.images import color
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage
from lockstep_recipes.tasks.vision.images.geometry import Matrix, about, affine, rotation
from lockstep_recipes.tasks.vision.images.options import AugmentOptions

_STRONGEST = 30  # magnitudes are 0 to 30


class _Colour(NamedTuple):
    """An operation on only the image."""

    change: Callable[[Tensor, float], Tensor]
    """(image, strength) -> image"""
    least: float
    greatest: float
    """Strengths at the magnitudes 0 and 30."""
    signed: bool = False
    """True if the strength is negative half of the time."""


class _Geometry(NamedTuple):
    """An operation on image, mask and boxes. Its strength is negative half of the time."""

    matrix: Callable[[float, int, int], Matrix]
    """(strength, height, width) -> map"""
    least: float
    greatest: float
    signed: bool = True


def _operations(
    *, blend: float, shear: float, move: float, of_side: bool, rotate: float, bits: float
) -> dict[str, _Colour | _Geometry]:
    """The operations of a policy by name.

    Args:
        blend, shear, move, rotate: the maximum strength.
        of_side: `move` is a fraction of the side, not a number of pixels.
        bits: the minimum number of bits that `Posterize` keeps.
    """

    def pixels(far: float, side: int) -> float:
        return float(int(far * side if of_side else far))

    return {
        "Identity": _Colour(lambda image, _: image, 0, 0),
        "AutoContrast": _Colour(lambda image, _: color.auto_contrast(image), 0, 0),
        "Equalize": _Colour(lambda image, _: color.equalize(image), 0, 0),
        "Brightness": _Colour(lambda image, more: color.brightness(image, 1 + more), 0, blend, signed=True),
        "Color": _Colour(lambda image, more: color.saturation(image, 1 + more), 0, blend, signed=True),
        "Contrast": _Colour(lambda image, more: color.contrast(image, 1 + more), 0, blend, signed=True),
        "Sharpness": _Colour(lambda image, more: color.sharpness(image, 1 + more), 0, blend, signed=True),
        "ShearX": _Geometry(lambda share, high, wide: ((1.0, share, 0.0), (0.0, 1.0, 0.0)), 0, shear),
        "ShearY": _Geometry(lambda share, high, wide: ((1.0, 0.0, 0.0), (share, 1.0, 0.0)), 0, shear),
        "TranslateX": _Geometry(lambda far, high, wide: ((1.0, 0.0, pixels(far, wide)), (0.0, 1.0, 0.0)), 0, move),
        "TranslateY": _Geometry(lambda far, high, wide: ((1.0, 0.0, 0.0), (0.0, 1.0, pixels(far, high))), 0, move),
        "Rotate": _Geometry(lambda angle, high, wide: about((wide / 2, high / 2), rotation(angle)), 0, rotate),
        "Posterize": _Colour(lambda image, kept: color.posterize(image, round(kept)), 8, bits),
        "Solarize": _Colour(color.solarize, 256, 0),
    }


RANDAUGMENT = _operations(blend=0.9, shear=0.3, move=150 / 331, of_side=True, rotate=30, bits=4)
TRIVIALAUGMENT = _operations(blend=0.99, shear=0.99, move=32, of_side=False, rotate=135, bits=2)


def rand_augment(
    picture: AnnotatedImage, *, operations: int, magnitude: float, options: AugmentOptions, mask_fill: int
) -> AnnotatedImage:
    """`operations` operations of RandAugment, drawn with replacement, at one magnitude from 0 to 30."""
    for which, sign in torch.rand(operations, 2).tolist():
        operation = _pick(RANDAUGMENT, which)
        picture = _apply(operation, picture, magnitude, negative=sign < 0.5, options=options, mask_fill=mask_fill)
    return picture


def trivial_augment(picture: AnnotatedImage, *, options: AugmentOptions, mask_fill: int) -> AnnotatedImage:
    """One operation of TrivialAugment at a magnitude that is drawn from 0, 1, ... 30."""
    which, level, sign = torch.rand(3).tolist()
    magnitude = int(level * (_STRONGEST + 1))
    operation = _pick(TRIVIALAUGMENT, which)
    return _apply(operation, picture, magnitude, negative=sign < 0.5, options=options, mask_fill=mask_fill)


def _pick(operations: dict[str, _Colour | _Geometry], share: float) -> _Colour | _Geometry:
    return list(operations.values())[int(share * len(operations))]


def _apply(
    operation: _Colour | _Geometry,
    picture: AnnotatedImage,
    magnitude: float,
    *,
    negative: bool,
    options: AugmentOptions,
    mask_fill: int,
) -> AnnotatedImage:
    strength = operation.least + (operation.greatest - operation.least) * magnitude / _STRONGEST
    if operation.signed and negative:
        strength = -strength
    if isinstance(operation, _Colour):
        return replace(picture, image=operation.change(picture.image, strength))
    matrix = operation.matrix(strength, *picture.size)
    if matrix == ((1, 0, 0), (0, 1, 0)):
        return picture
    return affine(picture, matrix, fill=options.fill, mask_fill=mask_fill, min_visible=options.min_visible)
