"""The classification task on the embedded digits and on real image folders."""

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep import LockstepError, Trainer
from lockstep.sources.images import Digits, image_folder
from lockstep.tasks.classification.options import ClassificationOptions
from lockstep.tasks.classification.task import Classification
from tests import runs


def test_digits_are_the_uci_test_part_split_without_overlap():
    train, held_back = Digits(True), Digits(False)
    assert (len(train), len(held_back)) == (1437, 360)
    images = torch.cat([train.images, held_back.images])
    labels = train.labels + held_back.labels
    assert [labels.count(digit) for digit in range(10)] == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]  # as UCI counts them
    assert images.shape == (1797, 1, 8, 8)
    assert images.max() == 255
    pixel_sum = int((images.double() * 16 / 255).round().sum())
    assert pixel_sum == 561718  # of the original's integers 0 to 16


def test_digits_recipe_learns(tmp_path):
    results = Trainer("digits", run_dir=tmp_path, quiet=True).fit()
    assert results["eval/accuracy"] >= 0.97
    assert results["eval/samples"] == 360


def test_shift_moves_the_image_by_at_most_so_many_pixels():
    task = Classification(ClassificationOptions(shift=1, channels=1), "digits")
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    image[0, 4, 4] = 255
    places = set()
    for seed in range(200):
        torch.manual_seed(seed)
        moved, label = task.prepare((image, 3), 0, training=True)
        assert moved.shape == (1, 8, 8)
        assert label == 3
        ((_, row, column),) = (moved == 1).nonzero().tolist()
        places.add((row, column))
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert torch.equal(task.prepare((image, 3), 0, training=False)[0][0, 4, 4], torch.tensor(1.0))


@pytest.mark.parametrize("label", [10, 255, -2])
def test_label_out_of_range_is_an_error(label):
    task = Classification(ClassificationOptions(channels=1), "digits")
    with pytest.raises(LockstepError, match=f"label {label} is out of range"):
        task.prepare((torch.zeros(1, 8, 8), label), 0, training=True)


@pytest.mark.parametrize(
    ("name", "evaluation", "channels", "steps", "reference"),
    [
        pytest.param("fashion_mnist", "test", 1, 100, 0.7, marks=pytest.mark.exhaustive),
        ("bccd_cells", "val", 3, 60, 0.85),
    ],
)
def test_real_image_folders_train_and_predict_from_files(
    shared_data, tmp_path, name, evaluation, channels, steps, reference
):
    folder = shared_data / "classification" / name
    settings = runs.config(
        task={"kind": "classification", "channels": channels, "image_size": 28, "width": 16},
        schedule={"name": "cosine"},
        data={"train": str(folder / "train"), "eval": str(folder / evaluation)},
        batch={"global": 50},
        train={"steps": steps, "eval_every_steps": steps},
    )
    trainer = Trainer(settings, run_dir=tmp_path, quiet=True)
    results = trainer.fit()
    assert results["eval/accuracy"] > reference
    files = sorted((folder / evaluation).rglob("*.*"))[:3]
    rows = trainer.describe([str(path) for path in files])
    assert [row["input"] for row in rows] == [str(path) for path in files]
    assert all(row["prediction"] in {path.name for path in (folder / "train").iterdir()} for row in rows)


def test_image_that_is_none_is_named(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / name / "good.png")
    (tmp_path / "dog" / "bad.jpg").write_text("not an image")
    settings = runs.config(
        task={"kind": "classification"}, data={"train": str(tmp_path)}, batch={"global": 3}, train={"steps": 2}
    )
    with pytest.raises(LockstepError, match=r"dog/bad\.jpg.*cannot be read") as caught:
        Trainer(settings, run_dir=tmp_path / "run", quiet=True).fit()
    assert "UnidentifiedImageError" in str(caught.value)


def test_evaluation_class_unknown_to_training_is_an_error(tmp_path):
    for part, name in (("train", "cat"), ("train", "dog"), ("eval", "cow")):
        folder = tmp_path / part / name
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "image.png")
    _, classes = image_folder(tmp_path / "train", size=8, channels=3)
    assert classes == ["cat", "dog"]
    with pytest.raises(LockstepError, match="class 'cow' is not among the 2 training classes"):
        image_folder(tmp_path / "eval", size=8, channels=3, classes=classes)
