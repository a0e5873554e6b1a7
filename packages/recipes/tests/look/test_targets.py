"""`lockstep look` names faults of masks, boxes, and classes that differ from all others of their set."""

import numpy as np
import pytest
from PIL import Image

from packages.recipes.tests.look import cases
from packages.recipes.tests.look.test_images import changed_mask, check


@pytest.fixture
def masked(tmp_path):
    return cases.masks(tmp_path)


def test_a_mask_without_labelled_pixels_is_named(masked):
    (masked / "classes.json").write_text('{"classes": ["ground", "disc"], "ignore_index": 255}')
    changed_mask(masked, lambda mask: np.full_like(mask, 255))
    check("segmentation", masked, "nothing-labelled", "masks/003.png")


def test_a_mask_that_is_shifted_is_named(masked):
    changed_mask(masked, lambda mask: np.roll(mask, (9, 0), (0, 1)))
    check("segmentation", masked, "misfit-target", "003.png", level="warning")


def test_a_palette_that_numbers_colours_differently_is_named(masked):
    for path in sorted((masked / "train" / "masks").iterdir()) + sorted((masked / "val" / "masks").iterdir()):
        mask, colours = np.asarray(Image.open(path)), [(0, 0, 0), (250, 0, 0)]
        is_odd = path.parts[-3:] == ("train", "masks", "003.png")
        image = Image.fromarray(1 - mask if is_odd else mask, "P")
        image.putpalette([value for colour in (colours[::-1] if is_odd else colours) for value in colour])
        image.save(path)
    check("segmentation", masked, "other-palette", "masks/003.png", level="warning")


def test_a_box_over_the_edge_is_named(tmp_path):
    root = cases.boxes(tmp_path, count=60)
    cases.change_boxes(root, lambda content: content["annotations"][3].update(bbox=[50, 9, 30, 20]))
    check("detection", root, "over-the-edge", "003.png", level="warning", only=False)


def test_one_object_with_boxes_of_two_classes_is_named(tmp_path):
    root = cases.boxes(tmp_path)
    cases.change_boxes(
        root, lambda content: content["annotations"].append(content["annotations"][3] | {"id": 99, "category_id": 1})
    )
    check("detection", root, "two-classes", "003.png", level="warning")


def test_a_class_with_one_box_is_named(tmp_path):
    root = cases.boxes(tmp_path)

    def one_of_a_class(content):
        content["categories"].append({"id": 3, "name": "c"})
        content["annotations"][3]["category_id"] = 3

    cases.change_boxes(root, one_of_a_class)
    check("detection", root, "one-sample", "003.png", level="warning")


def test_an_image_in_cmyk_is_named(tmp_path):
    root = cases.classes(tmp_path)
    path = root / "train" / "cat" / "003.png"
    Image.open(path).convert("CMYK").save(path.with_suffix(".jpg"))
    path.unlink()
    check("classification", root, "cmyk", "003.jpg", level="warning")
