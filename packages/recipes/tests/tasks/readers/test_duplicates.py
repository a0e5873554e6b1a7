"""Samples that are there twice, and evaluation samples that are training samples, are lines of the log."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep_recipes.tasks.readers import duplicates
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification
from lockstep_recipes.tasks.vision.detection.options import DetectionOptions
from lockstep_recipes.tasks.vision.readers.boxed_images import read_boxed_images
from lockstep_recipes.tasks.vision.readers.image_records import read_image_records
from lockstep_recipes.tasks.vision.readers.image_table import data_set_images
from packages.recipes.tests.tasks.vision.readers.test_boxed_images import coco
from packages.recipes.tests.tasks.vision.readers.test_image_records import jpeg, put, shard


def records(folder, **options):
    return read_image_records(str(folder), "train", ClassificationOptions(), **options)


def lines(training, evaluation=None):
    return duplicates.of_images(duplicates.samples_of(training), duplicates.samples_of(evaluation))


@pytest.fixture
def folder(tmp_path):
    """Six images of two classes, of equal size in pairs or not."""
    for number in range(6):
        put(tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg", jpeg(number))
    for number in range(6, 9):
        put(tmp_path / "val" / "ab"[number % 2] / f"{number}.jpg", jpeg(number))
    return tmp_path


def test_equal_pictures_are_found_within_training_and_between_training_and_evaluation(folder):
    train, evaluation = records(folder / "train"), records(folder / "val")
    assert lines(train, evaluation) == []
    put(folder / "train/b/copy.jpg", jpeg(2))  # of class a
    put(folder / "train/b/copy-3.jpg", jpeg(3))
    put(folder / "val/a/leak.jpg", jpeg(4))
    os.link(folder / "train/b/5.jpg", folder / "val/b/link.jpg")
    copies, leaks = lines(records(folder / "train"), records(folder / "val"))
    assert copies.startswith(
        "training: 2 images are copies of others, 1 of them with a different label (equal byte by byte)"
    )
    assert "b/copy.jpg = a/2.jpg" in copies
    assert "b/copy-3.jpg" in copies
    assert leaks.startswith("WARNING: evaluation: 2 images are also in the training data (equal byte by byte)")
    assert "a/leak.jpg = a/4.jpg" in leaks
    assert "b/link.jpg = b/5.jpg" in leaks


def test_parts_of_one_data_set_and_shards_are_compared_too(folder):
    put(folder / "train/b/copy.jpg", jpeg(2))
    train = records(folder / "train")
    names = [train[index].name for index in range(len(train))]
    held = [names.index("b/copy.jpg")]
    kept = [index for index in range(len(train)) if index not in held]
    (leak,) = lines(train.part(np.array(kept)), train.part(np.array(held)))  # as `task.eval_fraction` holds back
    assert "1 image is also in the training data" in leak
    members = [
        (f"{key}.{kind}", content)
        for key, number in (("x", 1), ("y", 2), ("z", 1))
        for kind, content in (("jpg", jpeg(number)), ("cls", b"0"))
    ]
    (copies,) = lines(records(shard(folder / "s.tar", members)))
    assert "1 image is a copy of others (equal byte by byte)" in copies


@pytest.mark.parametrize("embed", [True, False])
def test_pictures_in_columns_of_data_sets_are_compared(folder, embed):
    datasets = pytest.importorskip("datasets")
    put(folder / "val/a/leak.jpg", jpeg(4))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    for part in ("train", "val"):
        paths = sorted(str(path) for path in (folder / part).rglob("*.jpg"))
        cells = [{"bytes": Path(path).read_bytes() if embed else None, "path": path} for path in paths]
        data = datasets.Dataset.from_dict({"image": cells, "label": [path[-7] for path in paths]}, features)
        data.select(range(len(data) - 1, -1, -1)).save_to_disk(str(folder / f"saved-{part}"))
    train, evaluation = records(folder / "saved-train"), records(folder / "saved-val", classes=None)
    assert [train.pictures.size(row) for row in range(6)] == [len(train[row].data) for row in range(6)]
    (leak,) = lines(train, evaluation)
    assert "evaluation: 1 image is also in the training data" in leak
    assert "compared" not in leak
    turned = train.pictures.data.select([5, 0, 3])  # rows by their numbers, without a copy
    assert data_set_images(turned, "image", name="x").size(0) == train.pictures.size(5)


def test_the_search_is_limited_and_says_so(folder, monkeypatch):
    put(folder / "train/a/again.jpg", jpeg(0))
    train = records(folder / "train")
    monkeypatch.setattr(duplicates, "MOST_BYTES", 0)
    assert lines(train) == []
    monkeypatch.undo()
    put(folder / "val/a/0.jpg", jpeg(0))
    monkeypatch.setattr(duplicates, "MOST_IMAGES", 10)
    found = lines(train, records(folder / "val"))
    assert "compared 9 of 11" in found[-1] or "compared 10 of 11" in found[-1]
    (folder / "train/a/again.jpg").unlink()
    lines(train)  # what cannot be read is not compared


def test_a_file_under_two_ids_and_doubled_boxes_of_coco(tmp_path):
    file = coco(tmp_path)
    content = json.loads(file.read_text())
    content["images"].append(content["images"][0] | {"id": 999})
    content["annotations"].append(content["annotations"][0] | {"id": 500})
    file.write_text(json.dumps(content))
    data = read_boxed_images(str(file), "train", DetectionOptions())
    (line,) = lines(data)
    assert line.startswith("training: 1 file occurs more than once, under several ids or names: a.png = a.png")
    (line,) = duplicates.of_boxes(data.annotations)
    assert line.startswith("1 box is a duplicate (same image, class and coordinates), the first: ")
    assert "annotation 500" in line or "annotation 100" in line
    assert duplicates.of_boxes(read_boxed_images(str(coco(tmp_path)), "train", DetectionOptions()).annotations) == []


def test_names_that_differ_only_in_case_or_spaces():
    assert duplicates.of_names(["cat", "dog"]) == []
    (line,) = duplicates.of_names(["cat", "tea cup", "Cat ", "teacup", "dog"])
    assert "'cat' and 'Cat '; 'tea cup' and 'teacup'" in line
    for one, other in (
        ("7", "007"),
        ("1", "1.0"),
        ("4,5", "4.5"),
        ("1,0", "1"),
        ("\u00e9", "e\u0301"),
        ("True", "TRUE"),
    ):
        (line,) = duplicates.of_names([one, other, "2"])
        assert f"{one!r} and {other!r}" in line
    assert duplicates.of_names(["1", "1.5", "10", "1.1", "1.10", "1,000", "2,5", "2020-01-02", "a-b", "a", "b"]) == []


def test_names_that_are_several_names_or_none():
    (line,) = duplicates.of_names(["cat", "dog", "cat, dog", "cat|dog", "a, b"])
    assert line == "WARNING: 2 classes are several other classes in one name: 'cat, dog', 'cat|dog'"
    (line,) = duplicates.of_names(["cat", "nan", "None"])
    assert "called 'nan' and 'None', which usually means a missing label" in line


def texts(*rows):
    return duplicates.TextRows(
        len(rows),
        lambda index: rows[index][0].encode(),
        lambda index: rows[index][1].encode(),
        lambda index: f"row {index}",
    )


def test_equal_texts_are_found_within_training_and_between_training_and_evaluation(monkeypatch):
    training = texts(("good", "1"), ("bad", "0"), ("good", "1"), ("good", "0"))
    copies, leaks = duplicates.of_texts(training, texts(("fine", "1"), ("bad", "0")))
    assert copies == (
        "training: 2 texts are copies of others, 1 of them with a different label (identical text): "
        "row 2 = row 0, row 3 = row 0"
    )
    assert leaks == (
        "WARNING: evaluation: 1 text is also in the training data (identical text), so its results may be too good: "
        "row 1 = row 1"
    )
    monkeypatch.setattr(duplicates, "MOST_TEXTS", 4)
    found = duplicates.of_texts(training, texts(("good", "1"), ("bad", "0")))
    assert all("compared 4 of 6" in line for line in found)
    assert len(found) == 2


def test_the_head_of_the_log_has_these_lines(folder):
    put(folder / "val/a/leak.jpg", jpeg(4))
    for part in ("train", "val"):
        Image.new("RGB", (9, 9)).save(put(folder / part / "A" / f"{part}.png"))
    task = Classification(ClassificationOptions(), str(folder))
    header = "\n".join(task.presenter(task).log_header())
    assert "2 images are also in the training data" in header
    assert "'A' and 'a'" in header
