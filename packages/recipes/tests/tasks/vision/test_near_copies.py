"""Images that look alike on both sides of the split are found, others are not."""

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from lockstep_recipes.look.finding import ALL
from lockstep_recipes.look.look import look
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification


def picture(seed):
    """A smooth image with structure, another for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((96, 64), Image.Resampling.BICUBIC)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def folder(tmp_path):
    for part, seeds in (("train", range(20)), ("val", range(100, 110))):
        for seed in seeds:
            save(tmp_path / part / "ab"[seed % 2] / f"{seed}.png", picture(seed))
    return tmp_path


def found(path, **options):
    faults = look(Classification(ClassificationOptions(**options), str(path)), ALL)
    return {fault.first.code: [finding.file for finding in fault.findings] for fault in faults}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def test_different_images_are_not_alike(tmp_path):
    assert found(folder(tmp_path / "set")) == {}


def test_images_that_were_saved_again_are_found(tmp_path):
    path = folder(tmp_path / "set")
    compressed = io.BytesIO()
    picture(0).save(compressed, "JPEG", quality=60)
    changed = {
        "jpeg": Image.open(compressed),
        "small": picture(2).resize((48, 32)),
        "blurred": picture(4).filter(ImageFilter.GaussianBlur(1)),
    }
    for name, image in changed.items():
        save(path / "val" / "a" / f"{name}.png", image)
    faults = found(path)
    assert [file.rpartition("/")[2] for file in faults.pop("copies-across")] == sorted(
        f"{name}.png" for name in changed
    )
    assert faults == {}


def named(tmp_path, name):
    """Images of ten patients, two of each in training and one in evaluation, named by the patient and the image."""
    for part, numbers in (("train", (0, 1)), ("val", (2,))):
        for patient in range(10):
            for number in numbers:
                path = tmp_path / part / "ab"[(patient + number) % 2]
                save(path / f"{name(patient, number, part)}.png", picture(100 * patient + number))
    return tmp_path


@pytest.mark.parametrize("form", ["p{:03d}_img{}", "subject-{}-{:02d}", "BloodImage_{:05d}_{}"])
def test_ids_of_patients_in_both_splits_are_found(form, tmp_path):
    path = named(tmp_path / "set", lambda patient, number, part: form.format(patient, number))
    first = f"{form.format(0, 2)}.png"
    assert found(path) == {"group-across": [str(path / "val" / "a" / first)]}


@pytest.mark.parametrize(
    "name",
    [
        lambda patient, number, part: f"p{part}{patient}_{number}",  # patients are in one split each
        lambda patient, number, part: f"img_{3 * patient + number:04d}",  # a running number
        lambda patient, number, part: f"{3 * patient + number:04d}_photo",
        lambda patient, number, part: f"2024010{patient % 9 + 1}_{3 * patient + number:06d}",  # a date and a time
        lambda patient, number, part: f"{2010 + patient}_{3 * patient + number:06d}",  # a year
    ],
)
def test_names_without_shared_patients_are_no_faults(name, tmp_path):
    assert found(named(tmp_path / "set", name)) == {}


def test_a_group_before_the_number_of_a_frame_is_found(tmp_path):
    path = folder(tmp_path / "set")
    save(path / "train" / "a" / "clip7_frame_001.png", picture(1000))
    save(path / "val" / "a" / "clip7_frame_900.png", picture(1001))
    save(path / "val" / "a" / "clip8_frame_900.png", picture(1002))
    assert found(path) == {"group-across": [str(path / "val" / "a" / "clip7_frame_900.png")]}
