"""Colour operations against PIL's ImageEnhance and ImageOps."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from lockstep_recipes.tasks.vision.images import color
from packages.recipes.tests.tasks.vision.images.images import colours

FACTORS = [0.0, 0.1, 0.7, 1.0, 1.3, 1.9]


def enhanced(kind, factor):
    return lambda pil: kind(pil).enhance(factor)


CASES = {
    **{
        f"brightness {f}": (lambda i, f=f: color.brightness(i, f), enhanced(ImageEnhance.Brightness, f))
        for f in FACTORS
    },
    **{f"contrast {f}": (lambda i, f=f: color.contrast(i, f), enhanced(ImageEnhance.Contrast, f)) for f in FACTORS},
    **{f"saturation {f}": (lambda i, f=f: color.saturation(i, f), enhanced(ImageEnhance.Color, f)) for f in FACTORS},
    **{f"sharpness {f}": (lambda i, f=f: color.sharpness(i, f), enhanced(ImageEnhance.Sharpness, f)) for f in FACTORS},
    **{
        f"posterize {bits}": (lambda i, b=bits: color.posterize(i, b), lambda p, b=bits: ImageOps.posterize(p, b))
        for bits in (1, 4, 8)
    },
    **{
        f"solarize {level}": (lambda i, v=level: color.solarize(i, v), lambda p, v=level: ImageOps.solarize(p, v))
        for level in (0, 100, 200.5, 256)
    },
    "auto contrast": (color.auto_contrast, ImageOps.autocontrast),
    "equalize": (color.equalize, ImageOps.equalize),
}


def to_tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def apart(image, pil):
    return np.abs(image.permute(1, 2, 0).numpy().astype(int) - np.atleast_3d(np.asarray(pil)).astype(int)).max()


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", CASES)
def test_operations_are_pils(case, channels):
    ours, pils = CASES[case]
    pixels = np.ascontiguousarray(colours()[20:, 10:40, 3 - channels :] // 2 + 30)
    before = pixels.copy()
    image = ours(to_tensor(pixels))
    assert image.dtype == torch.uint8
    assert image.permute(1, 2, 0).is_contiguous()
    # Saturation and sharpness round twice in PIL: the grey or smooth image, and the result.
    bound = 2 if case.startswith(("saturation", "sharpness")) else 1
    assert apart(image, pils(Image.fromarray(pixels if channels == 3 else pixels[..., 0]))) <= bound
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("operation", [color.auto_contrast, color.equalize, lambda i: color.hue(i, 0.2)])
def test_an_image_of_one_colour_stays(operation):
    image = torch.full((3, 9, 9), 77, dtype=torch.uint8)
    assert torch.equal(operation(image), image)


def test_hue_turns_red_to_green_to_blue_and_keeps_grey():
    red = to_tensor(np.full((4, 4, 3), (200, 10, 10), np.uint8))
    green, blue = color.hue(red, 1 / 3), color.hue(red, -1 / 3)
    assert green[:, 0, 0].tolist() == pytest.approx([10, 200, 10], abs=3)
    assert blue[:, 0, 0].tolist() == pytest.approx([10, 10, 200], abs=6)
    image = to_tensor(colours())
    assert (color.hue(image, 0.0).int() - image.int()).abs().max() <= 8  # PIL's HSV has 8 bits
    grey = image[2:]
    assert color.hue(grey, 0.3) is grey


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (5, 2)])
def test_tiny_images_are_not_sharpened(shape):
    image = to_tensor(colours(*shape))
    assert torch.equal(color.sharpness(image, 1.9), image)
