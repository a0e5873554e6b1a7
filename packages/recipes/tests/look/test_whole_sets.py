"""`lockstep look` finds faults that only the whole set shows: colours, empty masks, ignored values."""

import json

import numpy as np
import pytest
from PIL import Image

from packages.recipes.tests.look import cases
from packages.recipes.tests.look.test_images import check, found_in


@pytest.fixture
def masked(tmp_path):
    return cases.masks(tmp_path, count=20)


def greyed(path):
    Image.open(path).convert("L").convert("RGB").save(path.with_suffix(".jpg"), quality=80)
    path.unlink()


def coloured(root):
    """Three classes of JPEG files in colour."""
    cases.classes(root)
    for number in range(12):
        cases.save(root / "train/owl" / f"{number:03}.png", cases.scene(number + 5000)[0])
    for number, path in enumerate(sorted((root / "train").rglob("*.png"))):
        pixels = np.asarray(Image.open(path)).copy()
        pixels[..., 0] //= 2
        cases.save(path.with_suffix(".jpg"), pixels, quality=80)
        path.unlink()
        yield number, path.with_suffix(".jpg")


def test_a_class_that_alone_is_grey_is_named(tmp_path):
    for _, path in coloured(tmp_path):
        if path.parent.name == "owl":
            Image.open(path).convert("L").convert("RGB").save(path, quality=80)
    fault = check("classification", tmp_path, "label-in-file", "", level="warning", only=False)
    assert "'owl'" in fault.first.what
    assert "are grey" in fault.first.what


def test_grey_images_of_all_classes_are_not_named(tmp_path):
    for number, path in coloured(tmp_path):
        if number % 4 == 0:
            Image.open(path).convert("L").convert("RGB").save(path, quality=80)
    assert "label-in-file" not in found_in("classification", tmp_path)


def ignore(root, chosen):
    (root / "classes.json").write_text(json.dumps({"classes": ["ground", "disc"], "ignore_index": 255}))
    for number in chosen:
        path = root / "train/masks" / f"{number:03}.png"
        mask = np.asarray(Image.open(path)).copy()
        mask[: np.nonzero(mask)[0].mean().astype(int)] *= 255
        cases.save(path, mask)


def test_a_value_that_few_masks_ignore_is_named(masked):
    ignore(masked, [3, 7])
    fault = check("segmentation", masked, "rarely-ignored", "003.png", level="warning")
    assert fault.count == 2


def test_a_value_that_most_masks_ignore_is_not_named(masked):
    ignore(masked, range(12))
    assert "rarely-ignored" not in found_in("segmentation", masked)


def empty(root, chosen, *, is_right):
    for number in chosen:
        image, mask = (root / "train" / kind / f"{number:03}.png" for kind in ("images", "masks"))
        if is_right:
            pixels, disc = np.asarray(Image.open(image)).copy(), np.asarray(Image.open(mask)) > 0
            pixels[disc] -= 100
            cases.save(image, pixels)
        cases.save(mask, np.zeros((cases.SIDE, cases.SIDE), np.uint8))


def test_many_empty_masks_of_images_with_objects_are_named(masked):
    empty(masked, range(6), is_right=False)
    fault = check("segmentation", masked, "unlabelled-objects", "003.png", level="warning")
    assert fault.count >= 4


def test_rightly_empty_masks_are_not_named(masked):
    empty(masked, range(3), is_right=True)
    assert not {"unlabelled-objects", "one-class-mask"} & found_in("segmentation", masked).keys()
