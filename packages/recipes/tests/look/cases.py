"""Small clean data sets of images, into which tests plant faults."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 48


def scene(seed, side=SIDE):
    """Pixels with a bright disc, noise and light from one side, so that no two are alike; and the mask of the disc."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side]
    y, x, radius = draw.integers(side // 4, 3 * side // 4), draw.integers(side // 4, 3 * side // 4), side // 6
    mask = ((rows - y) ** 2 + (columns - x) ** 2 < radius**2).astype(np.uint8)
    light = np.tensordot(draw.uniform(-50, 50, 2), [rows / side - 0.5, columns / side - 0.5], 1)
    pixels = 60 + 120 * mask[..., None] + light[..., None] + draw.normal(0, 6, (side, side, 3))
    return pixels.clip(0, 255).astype(np.uint8), mask


def save(path, pixels, **options):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def classes(root, count=12):
    for split, most in (("train", count), ("val", count // 3)):
        for number in range(most):
            for label, name in enumerate(("cat", "dog")):
                seed = number + 1000 * label + 100_000 * (split == "val")
                save(root / split / name / f"{number:03}.png", scene(seed)[0])
    return root


def masks(root, count=12):
    for split, most in (("train", count), ("val", count // 3)):
        for number in range(most):
            pixels, mask = scene(number + 1000 * (split == "val"))
            save(root / split / "images" / f"{number:03}.png", pixels)
            save(root / split / "masks" / f"{number:03}.png", mask)
    return root


def boxes(root, count=12):
    for split, most in (("train", count), ("val", count // 3)):
        images, rows = [], []
        for number in range(most):
            pixels, mask = scene(number + 1000 * (split == "val"), 64)
            save(root / "images" / split / f"{number:03}.png", pixels)
            images.append({"id": number + 1, "file_name": f"{number:03}.png", "height": 64, "width": 64})
            down, across = np.nonzero(mask)
            left, top = int(across.min()), int(down.min())
            box = [left, top, int(across.max()) + 1 - left, int(down.max()) + 1 - top]
            rows.append({"id": number + 1, "image_id": number + 1, "category_id": 1 + number % 2, "bbox": box})
        content = {"images": images, "annotations": rows}
        content["categories"] = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
        path = root / "annotations" / f"instances_{split}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return root


def change_boxes(root, change, split="train"):
    path = root / "annotations" / f"instances_{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
