"""Made-up samples of the sizes that a recipe tells, for a plan without data on disk."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import UsageError

_COUNT = 8


@dataclass(frozen=True)
class MadeUp:
    """What is known of training data that are not here."""

    classes: int | None = None
    """None: 10."""
    samples: int | None = None
    """None: not known. Then a plan says nothing of epochs."""


def write(task: Mapping[str, Any], folder: Path, classes: int | None = None) -> Path | None:
    """Write a small data set for the config's section `task`. Returns `data.train`, or None for kinds without one.

    Args:
        task: `kind` and its options.
        folder: a new or empty folder.
        classes: None: 10.

    Raises:
        UsageError: the task itself tells its classes, or has none.
    """
    _check_classes(task, classes)
    writer = _WRITERS.get(str(task.get("kind")))
    return None if writer is None else writer(task, folder, _class_count(task, classes))


def assumption(task: Mapping[str, Any], classes: int | None = None) -> str:
    """What a plan on made-up samples assumes, for people."""
    count = _class_count(task, classes)
    assumed = {
        "classification": f"{count} classes",
        "segmentation": f"{count} classes",
        "detection": f"{count} classes, and 5 boxes in a picture",
        "text": f"{count} classes, and texts of task.max_length tokens; a new tokenizer knows only made-up words",
        "volume_risk": "3 questions, and volumes of task.max_slices slices",
    }
    return f"there are no data: made-up samples, with {assumed[str(task['kind'])]}"


def _check_classes(task: Mapping[str, Any], classes: int | None) -> None:
    if classes is None:
        return
    if task.get("kind") == "volume_risk":
        what = "this task has no classes: a plan without data takes 3 questions"
    elif task.get("kind") == "segmentation" and task.get("classes"):
        what = "task.classes tells the classes already"
    else:
        return
    raise UsageError(what, where=f"--classes {classes}", remedy="leave this option out")


def _class_count(task: Mapping[str, Any], classes: int | None) -> int:
    named = task.get("classes") if task.get("kind") == "segmentation" else None
    return len(named) if isinstance(named, list | dict) else 2 if named else classes or 10


def _side(task: Mapping[str, Any]) -> int:
    size = task.get("image_size") or 224
    return max(size.values()) if isinstance(size, Mapping) else int(size)


def _picture(path: Path, side: int, draw: np.random.Generator, channels: int = 3) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    noise = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise if channels == 3 else noise[..., 0]).save(path, compress_level=1)


def _classification(task: Mapping[str, Any], folder: Path, classes: int) -> Path:
    draw = np.random.default_rng(0)
    for number in range(classes):
        path = folder / f"class{number}" / "0.png"
        if number < _COUNT:
            _picture(path, _side(task), draw, int(task.get("channels", 3)))
        else:
            path.parent.mkdir(parents=True)
            os.link(folder / f"class{number % _COUNT}" / "0.png", path)
    return folder


def _segmentation(task: Mapping[str, Any], folder: Path, classes: int) -> Path:
    from PIL import Image

    draw, side = np.random.default_rng(0), _side(task)
    (folder / "masks").mkdir(parents=True)
    if not task.get("classes"):
        names = ", ".join(f"class{number}" for number in range(classes))
        (folder / "classes.yaml").write_text(f"[{names}]\n")
    for number in range(_COUNT):
        _picture(folder / "images" / f"{number}.png", side, draw, int(task.get("channels", 3)))
        mask = draw.integers(0, min(classes, 256), (side, side), dtype=np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    return folder


def _detection(task: Mapping[str, Any], folder: Path, classes: int) -> Path:
    draw, side = np.random.default_rng(0), _side(task)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(_COUNT):
        _picture(folder / "images" / "train" / f"{number}.png", side, draw, int(task.get("channels", 3)))
        images.append({"id": number, "file_name": f"{number}.png", "height": side, "width": side})
        for _ in range(5):
            box = side // 4
            left, top = (int(value) for value in draw.integers(0, side - box, 2))
            annotation = {"id": len(annotations), "image_id": number, "bbox": [left, top, box, box], "iscrowd": 0}
            category = len(annotations) % classes
            annotations.append({**annotation, "category_id": category, "area": box * box})
    categories = [{"id": number, "name": f"class{number}"} for number in range(classes)]
    (folder / "annotations").mkdir()
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return folder


def _text(task: Mapping[str, Any], folder: Path, classes: int) -> Path:
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(draw.choice(letters, 5)) for _ in range(2000)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "texts.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(_COUNT * classes):
            text = " ".join(draw.choice(words, int(task.get("max_length") or 128)))
            writer.writerow([text, f"class{number % classes}"])
    return path


def _volume_risk(task: Mapping[str, Any], folder: Path, classes: int) -> Path:
    draw, slices = np.random.default_rng(0), int(task.get("max_slices") or 32)
    side = int(task.get("image_size") or 448)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "patient", "death_1y", "death_3y", "death_5y"])
        for number in range(_COUNT):
            volume = draw.integers(-1000, 400, (slices, side, side), dtype=np.int16)
            np.save(folder / f"volume{number}.npy", volume)
            writer.writerow([f"volume{number}.npy", f"patient{number}", number % 2, number % 2, 1])
    return path


_WRITERS: dict[str, Callable[[Mapping[str, Any], Path, int], Path]] = {
    "classification": _classification,
    "segmentation": _segmentation,
    "detection": _detection,
    "text": _text,
    "volume_risk": _volume_risk,
}
