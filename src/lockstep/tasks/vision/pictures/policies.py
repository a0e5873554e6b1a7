"""RandAugment and TrivialAugment: random operations of geometry and colour on a picture and its targets.

Both draw from the 14 operations of RandAugment's paper: Identity, AutoContrast, Equalize, Rotate, Solarize, Color,
Posterize, Contrast, Brightness, Sharpness, ShearX, ShearY, TranslateX, TranslateY. The operations of geometry move mask
and boxes with the image. As in the authors' code, rotations are about the centre, shears about the upper left corner.

Sources: Cubuk et al., RandAugment, arXiv:1909.13719; Müller and Hutter, TrivialAugment, arXiv:2103.10158, table 1
(wide). The ranges of RandAugment are those of torchvision's `RandAugment`, which has magnitudes from 0 to 30.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.tasks.vision.pictures import color
from lockstep.tasks.vision.pictures.geometry import Matrix, about, affine, rotation
from lockstep.tasks.vision.pictures.options import AugmentOptions
from lockstep.tasks.vision.pictures.picture import Picture

_STRONGEST = 30  # magnitudes are 0 to 30


class _Colour(NamedTuple):
    """An operation on the image alone."""

    change: Callable[[Tensor, float], Tensor]
    """(image, strength) -> image"""
    least: float
    greatest: float
    """Strengths at the magnitudes 0 and 30."""
    signed: bool = False
    """Whether the strength is negative half of the time."""


class _Geometry(NamedTuple):
    """An operation on image, mask and boxes. Its strength is negative half of the time."""

    matrix: Callable[[float, int, int], Matrix]
    """(strength, height, width) -> map"""
    least: float
    greatest: float
    signed: bool = True


def _rotate(degrees: float, height: int, width: int) -> Matrix:
    return about((width / 2, height / 2), rotation(degrees))


def _shear_x(share: float, height: int, width: int) -> Matrix:
    return (1.0, share, 0.0), (0.0, 1.0, 0.0)


def _shear_y(share: float, height: int, width: int) -> Matrix:
    return (1.0, 0.0, 0.0), (share, 1.0, 0.0)


def _move_x(pixels: float, height: int, width: int) -> Matrix:
    return (1.0, 0.0, float(int(pixels))), (0.0, 1.0, 0.0)


def _move_y(pixels: float, height: int, width: int) -> Matrix:
    return (1.0, 0.0, 0.0), (0.0, 1.0, float(int(pixels)))


def _move_x_by_share(share: float, height: int, width: int) -> Matrix:
    return _move_x(share * width, height, width)


def _move_y_by_share(share: float, height: int, width: int) -> Matrix:
    return _move_y(share * height, height, width)


def _blends(greatest: float) -> dict[str, _Colour | _Geometry]:
    """The four operations of which the factor is 1 plus or minus up to `greatest`."""
    return {
        "Brightness": _Colour(lambda image, more: color.brightness(image, 1 + more), 0, greatest, signed=True),
        "Color": _Colour(lambda image, more: color.saturation(image, 1 + more), 0, greatest, signed=True),
        "Contrast": _Colour(lambda image, more: color.contrast(image, 1 + more), 0, greatest, signed=True),
        "Sharpness": _Colour(lambda image, more: color.sharpness(image, 1 + more), 0, greatest, signed=True),
    }


_WITHOUT_STRENGTH: dict[str, _Colour | _Geometry] = {
    "Identity": _Colour(lambda image, _: image, 0, 0),
    "AutoContrast": _Colour(lambda image, _: color.auto_contrast(image), 0, 0),
    "Equalize": _Colour(lambda image, _: color.equalize(image), 0, 0),
}

RANDAUGMENT: dict[str, _Colour | _Geometry] = {
    **_WITHOUT_STRENGTH,
    **_blends(0.9),
    "ShearX": _Geometry(_shear_x, 0, 0.3),
    "ShearY": _Geometry(_shear_y, 0, 0.3),
    "TranslateX": _Geometry(_move_x_by_share, 0, 150 / 331),
    "TranslateY": _Geometry(_move_y_by_share, 0, 150 / 331),
    "Rotate": _Geometry(_rotate, 0, 30),
    "Posterize": _Colour(lambda image, bits: color.posterize(image, round(bits)), 8, 4),
    "Solarize": _Colour(color.solarize, 256, 0),
}
"""The operations by name."""

TRIVIALAUGMENT: dict[str, _Colour | _Geometry] = {
    **_WITHOUT_STRENGTH,
    **_blends(0.99),
    "ShearX": _Geometry(_shear_x, 0, 0.99),
    "ShearY": _Geometry(_shear_y, 0, 0.99),
    "TranslateX": _Geometry(_move_x, 0, 32),
    "TranslateY": _Geometry(_move_y, 0, 32),
    "Rotate": _Geometry(_rotate, 0, 135),
    "Posterize": _Colour(lambda image, bits: color.posterize(image, round(bits)), 8, 2),
    "Solarize": _Colour(color.solarize, 256, 0),
}
"""The operations by name."""


def rand_augment(
    picture: Picture, *, operations: int, magnitude: float, options: AugmentOptions, mask_fill: int
) -> Picture:
    """`operations` operations of RandAugment, drawn with replacement, at one magnitude from 0 to 30."""
    draws = torch.rand(operations, 2).tolist()
    for which, sign in draws:
        operation = _pick(RANDAUGMENT, which)
        picture = _apply(operation, picture, magnitude, negative=sign < 0.5, options=options, mask_fill=mask_fill)
    return picture


def trivial_augment(picture: Picture, *, options: AugmentOptions, mask_fill: int) -> Picture:
    """One operation of TrivialAugment at a magnitude that is drawn from 0, 1, ... 30."""
    which, level, sign = torch.rand(3).tolist()
    magnitude = int(level * (_STRONGEST + 1))
    operation = _pick(TRIVIALAUGMENT, which)
    return _apply(operation, picture, magnitude, negative=sign < 0.5, options=options, mask_fill=mask_fill)


def _pick(operations: dict[str, _Colour | _Geometry], share: float) -> _Colour | _Geometry:
    return list(operations.values())[int(share * len(operations))]


def _apply(
    operation: _Colour | _Geometry,
    picture: Picture,
    magnitude: float,
    *,
    negative: bool,
    options: AugmentOptions,
    mask_fill: int,
) -> Picture:
    strength = operation.least + (operation.greatest - operation.least) * magnitude / _STRONGEST
    if operation.signed and negative:
        strength = -strength
    if isinstance(operation, _Colour):
        return replace(picture, image=operation.change(picture.image, strength))
    matrix = operation.matrix(strength, *picture.size)
    if matrix == ((1, 0, 0), (0, 1, 0)):
        return picture
    return affine(picture, matrix, fill=options.fill, mask_fill=mask_fill, min_visible=options.min_visible)
