"""Images that tests make: smooth colours with an edge, so that a wrong turn, scale or channel is seen."""

import io

import numpy as np
import torch

from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage


def colours(height=48, width=64):
    """uint8 (height, width, 3): red grows to the right, green downwards, blue is noise."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    pixels[..., 2] = np.random.default_rng(0).integers(0, 256, (height, width))
    return pixels


def encode(image, kind, **options):
    """The bytes of a file of this kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rectangle(height=60, width=80, box=(20, 15, 50, 40)):
    """Image, mask and box show the same rectangle: the image is 200 in it, else 0; the mask is 3, else 1."""
    left, top, right, bottom = box
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[top:bottom, left:right] = 200
    mask = torch.ones(height, width, dtype=torch.int64)
    mask[top:bottom, left:right] = 3
    return AnnotatedImage.from_pixels(pixels, mask, torch.tensor([box], dtype=torch.float32))


def extent(inside):
    """left, top, right, bottom of the places where a tensor (height, width) is true."""
    lines, columns = inside.any(1).nonzero(), inside.any(0).nonzero()
    return [int(columns[0]), int(lines[0]), int(columns[-1]) + 1, int(lines[-1]) + 1]
