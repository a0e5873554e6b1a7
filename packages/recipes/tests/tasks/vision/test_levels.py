"""Grey images of 16 bits that hold fewer: their range is that of the training images, everywhere."""

import io
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision import use_images
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification
from lockstep_recipes.tasks.vision.images.decode import WHITE, decode, levels_of
from lockstep_recipes.tasks.vision.readers.image_records import read_image_records

SIDE = 64


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def ramp(most):
    return np.linspace(0, most, SIDE * SIDE).round().astype(np.uint16).reshape(SIDE, SIDE)


def folder(root, most, suffix="png", count=3):
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(ramp(most)).save(root / name / f"{number}.{suffix}")
    return root


def task(root, cache=None, **options):
    return Classification(ClassificationOptions(**options), str(root), cache=cache)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(("most", "white"), [(200, 255), (4000, 4095), (9000, 16383), (60000, 65535)])
def test_the_range_follows_the_training_images(tmp_path, suffix, most, white):
    made = task(folder(tmp_path / "a", most, suffix))
    assert made.about.levels == white
    pixels = made.train_data()[0].pixels
    assert pixels.max() == round(most * 255 / white)
    assert len(np.unique(pixels)) == pixels.max() + 1


def test_images_of_8_bits_have_the_usual_range(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray((ramp(255)).astype(np.uint8)).save(tmp_path / name / "a.png")
    assert task(tmp_path).about.levels == WHITE
    assert levels_of([]) == WHITE


def test_the_range_is_kept_with_the_run_and_used_for_evaluation_prediction_and_exports(tmp_path):
    root = folder(tmp_path / "train", 4000)
    made = task(root, eval_fraction=0)
    made.setup(tmp_path / "kept", trained=False)
    again = task(folder(tmp_path / "other", 1000), eval_fraction=0)  # whose own range would be 1023
    again.setup(tmp_path / "kept", trained=True)
    assert again.about.levels == 4095
    assert again.train_data()[0].pixels.max() == round(1000 * 255 / 4095)
    file = (root / "cat" / "0.png").read_bytes()
    expected = decode(file, levels=4095)
    torch.manual_seed(0)
    given = made.prepare((file, -1), 0, training=False)["images"]
    torch.testing.assert_close(given, made.prepare((expected, -1), 0, training=False)["images"], rtol=0, atol=0)
    exported = use_images.pixels_of(root / "cat" / "0.png", asdict(made.about) | {"channels": 3})
    np.testing.assert_array_equal(exported.permute(1, 2, 0).numpy(), expected)


def test_a_cache_belongs_to_a_range(tmp_path):
    root = folder(tmp_path / "a", 4000)
    found = [task(root, CacheOptions(), **given).train_data()[0].pixels.max() for given in ({}, {"levels": WHITE})]
    assert found == [249, 16]


def test_a_value_above_the_range_is_an_error_that_names_the_file_and_the_key(tmp_path):
    made = task(folder(tmp_path / "a", 5000), levels=4095)
    with pytest.raises(DataError, match=r"(?s)0\.png: the grey value 5000 is above 4095.*task\.levels=16383"):
        made.train_data()[0]
    file = io.BytesIO()
    Image.fromarray(ramp(5000)).save(file, "PNG")
    about = {"channels": 1, "levels": 4095}
    with pytest.raises(ValueError, match="5000 is above 4095"):
        use_images.pixels_of(Image.open(file), about)


def test_few_images_are_opened(tmp_path):
    records = read_image_records(str(folder(tmp_path / "a", 255, count=100)), "train", ClassificationOptions())
    read, counted = records.pictures.read, []
    records.pictures.read = lambda index: counted.append(index) or read(index)
    assert levels_of(records.pictures) == 255
    assert len(counted) == 8 + 64
