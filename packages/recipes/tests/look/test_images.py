"""`lockstep look` names planted faults with their file, and nothing in clean data."""

import shutil

import numpy as np
import pytest
from PIL import Image

from lockstep.configs import registry
from lockstep_recipes.look.finding import ALL, HEAD
from lockstep_recipes.look.look import head, look
from packages.recipes.tests.look import cases

MAKE = {"classification": cases.classes, "segmentation": cases.masks, "detection": cases.boxes}


def task_of(kind, root):
    return registry.build_task({"kind": kind}, str(root), None)


def found_in(kind, root):
    return {fault.first.code: fault for fault in look(task_of(kind, root), ALL)}


def check(kind, root, code, file, *, level="error", only=True):
    found = found_in(kind, root)
    assert code in found, {code: fault.first for code, fault in found.items()}
    fault = found[code]
    assert any(file in finding.file for finding in fault.findings), fault.findings
    assert fault.first.level == level
    if only:
        others = {name for name in found if name not in (code, "cannot-be-used")}
        assert not others, {name: found[name].first for name in others}
    return fault


@pytest.mark.parametrize("kind", MAKE)
def test_nothing_is_found_in_clean_data(tmp_path, kind):
    root = MAKE[kind](tmp_path)
    task = task_of(kind, root)
    for extent in (ALL, HEAD):
        assert look(task, extent) == []
    assert head(task) == []


FILES = {"classification": "train/cat/003.png", "segmentation": "train/images/003.png"}


def truncated(path):
    path.write_bytes(path.read_bytes()[:-60])


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("<html>404</html>")


def one_pixel(path):
    cases.save(path, np.full((1, 1, 3), 9, np.uint8))


def blank(path):
    cases.save(path, np.full((48, 48, 3), 9, np.uint8))


@pytest.mark.parametrize("plant", [truncated, empty, text, one_pixel, blank])
@pytest.mark.parametrize("kind", FILES)
def test_files_that_hold_nothing_are_named(tmp_path, kind, plant):
    root = MAKE[kind](tmp_path)
    plant(root / FILES[kind])
    code = {"one_pixel": "one-pixel", "blank": "blank-image"}.get(plant.__name__, "unreadable")
    only = kind == "classification"  # a mask no longer has the size of its image
    check(kind, root, code, "003.png", level="warning" if plant is blank else "error", only=only)


def transparent(path):
    pixels = np.dstack([np.asarray(Image.open(path)), np.full((48, 48), 128, np.uint8)])
    cases.save(path, pixels)


def frames(path):
    image = Image.open(path)
    image.load()
    image.save(path, save_all=True, append_images=[image.rotate(90)])


@pytest.mark.parametrize(("plant", "code"), [(transparent, "transparent"), (frames, "several-frames")])
def test_formats_that_hide_something_are_named(tmp_path, plant, code):
    root = cases.classes(tmp_path)
    plant(root / "train/cat/003.png")
    check("classification", root, code, "003.png", level="warning")


def test_an_image_of_16_bits_out_of_the_range_of_the_others_is_named(tmp_path):
    root = cases.classes(tmp_path)
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        values = np.asarray(Image.open(path).convert("L")).astype(np.uint16) * 16  # 12 bits
        cases.save(path, values // (16 if number == 3 else 1))
    check("classification", root, "few-levels", "003.png", level="warning", only=False)
    path = root / "val/dog/001.png"
    cases.save(path, np.asarray(Image.open(path)) * 16)
    check("classification", root, "above-white", "001.png", only=False)


def test_copies_are_named(tmp_path):
    root = cases.classes(tmp_path)
    shutil.copy(root / "train/cat/003.png", root / "val/cat/009.png")
    check("classification", root, "train-in-eval", "val/cat/009.png")
    shutil.move(root / "val/cat/009.png", root / "train/dog/copy.png")
    check("classification", root, "label-conflict", "copy.png")
    (root / "train/dog/copy.png").unlink()
    (root / "train/dog/link.png").symlink_to(root / "train/cat/003.png")  # one file, not only equal bytes
    check("classification", root, "label-conflict", "link.png")
    (root / "train/dog/link.png").rename(root / "val/cat/link.png")
    check("classification", root, "train-in-eval", "link.png")


def test_a_class_that_the_files_give_away_is_named(tmp_path):
    root = cases.classes(tmp_path)
    for path in sorted((root / "train" / "dog").iterdir()):
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()
    fault = check("classification", root, "label-in-file", "", level="warning")
    assert "PNG: cat; JPEG: dog" in fault.first.what


def test_rare_classes_are_named(tmp_path):
    root = cases.classes(tmp_path)
    (root / "train" / "dgo").mkdir()
    shutil.move(root / "train/dog/003.png", root / "train/dgo/003.png")
    check("classification", root, "one-sample", "train/dgo/003.png", level="warning")


def test_a_refused_class_of_the_evaluation_does_not_shift_the_names_of_the_others(tmp_path):
    root = cases.classes(tmp_path)
    cases.save(root / "val/cot/000.png", cases.scene(77)[0])
    shutil.copy(root / "train/dog/003.png", root / "val/dog/900.png")
    found = found_in("classification", root)
    assert set(found) == {"cannot-be-used", "never-trained", "train-in-eval"}
    assert "class 'cot'" in found["never-trained"].first.what


# ---- masks


def changed_mask(root, change, name="003.png"):
    path = root / "train" / "masks" / name
    cases.save(path, change(np.asarray(Image.open(path)).copy()))


MASKS = {
    "inverted-mask": (lambda mask: 1 - mask, "error"),
    "unlabelled-objects": (lambda mask: 0 * mask, "warning"),
    "mirrored-target": (lambda mask: mask[:, ::-1], "error"),
    "bad-mask": (lambda mask: 7 * mask, "error"),
    "mask-size": (lambda mask: mask[:-2], "error"),
}


@pytest.mark.parametrize("code", MASKS)
def test_masks_that_are_wrong_are_named(tmp_path, code):
    root = cases.masks(tmp_path)
    change, level = MASKS[code]
    changed_mask(root, change)
    if code == "bad-mask":
        assert "masks/003.png contains 7" in found_in("segmentation", root)["cannot-be-used"].first.what
        (root / "classes.txt").write_text("background\nobject\n")
    check("segmentation", root, code, "masks/003.png" if "mask" in code else "003.png", level=level)


def test_a_mask_of_a_different_image_is_named(tmp_path):
    root = cases.masks(tmp_path)
    for number in (3, 4):
        pixels, mask = cases.scene(number, 160)
        cases.save(root / f"train/images/00{number}.png", pixels)
        cases.save(root / f"train/masks/00{number}.png", mask)
    shutil.copy(root / "train/masks/004.png", root / "train/masks/003.png")
    check("segmentation", root, "copied-mask", "masks/004.png", level="warning", only=False)


@pytest.mark.parametrize("kind", ["segmentation", "detection"])
def test_exif_that_turns_an_image_and_not_its_target_is_named(tmp_path, kind):
    root = MAKE[kind](tmp_path)
    path = min(root.rglob("003.png"))  # of an image, not of a mask
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.open(path).save(path, exif=exif)
    check(kind, root, "exif-turned", "003.png")
    upright = Image.open(path).convert("RGB").rotate(180)  # stored upside down, and annotated as people see it
    upright.save(path, exif=exif)
    assert found_in(kind, root) == {}


# ---- boxes


def box(content, *values):
    content["annotations"][3]["bbox"] = list(values)


BOXES = {
    "no area": (lambda content: box(content, 5, 5, 0, 9), "bad-box", "error"),
    "outside": (lambda content: box(content, 90, 5, 9, 9), "bad-box", "error"),
    "shares": (lambda content: box(content, 0.2, 0.3, 0.1, 0.1), "bad-box", "error"),
    "tiny": (lambda content: box(content, 9, 9, 1.5, 9), "tiny-box", "warning"),
    "whole": (lambda content: box(content, 0, 0, 64, 64), "whole-image", "warning"),
    "double": (
        lambda content: content["annotations"].append(content["annotations"][3] | {"id": 99}),
        "double-box",
        "warning",
    ),
    "size": (lambda content: content["images"][3].update(width=128, height=128), "other-size", "error"),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes_that_are_wrong_are_named(tmp_path, name):
    root = cases.boxes(tmp_path, count=60)
    change, code, level = BOXES[name]
    cases.change_boxes(root, change)
    check("detection", root, code, "003.png", level=level, only=name != "double")


def test_boxes_in_one_corner_are_named(tmp_path):
    root = cases.boxes(tmp_path, count=60)

    def halve(content):
        for row in content["annotations"]:
            row["bbox"] = [side / 2 for side in row["bbox"]]

    cases.change_boxes(root, halve)
    fault = check("detection", root, "in-one-corner", "", level="warning", only=False)
    assert fault.count == 60
    assert "of the width" in fault.first.what


def test_boxes_with_x_and_y_exchanged_are_named_once(tmp_path):
    root = cases.boxes(tmp_path, count=40)

    def exchange(content):
        for row in content["annotations"]:
            left, top, width, height = row["bbox"]
            row["bbox"] = [top, left, height, width]

    cases.change_boxes(root, exchange)
    fault = check("detection", root, "exchanged-axes", "train", level="error")
    assert len(fault.findings) == 1
