"""Folders of small pictures with coloured boxes, and trainings of detection on ranks."""

import json
from pathlib import Path

import numpy as np

from lockstep import Trainer
from lockstep_recipes.tasks.vision.detection.options import DetectionOptions
from lockstep_recipes.tasks.vision.detection.task import Detection
from tests import runs
from tests.image_cases import killed_at

CATEGORIES = {7: "red", 3: "green", 12: "blue"}  # ids with gaps, not sorted
COUNTS = (0, 9, 1, 0, 3, 0, 0, 14, 2, 0, 1, 5)  # boxes of each picture, very unevenly spread
SMALL = {"image_size": 64, "scratch": {"sizes": {"width": 16, "levels": 3}}, "augment": {"crop": "resize", "flip": 0.5}}


def box_folder(root, counts=COUNTS, seed=0, split="train", crowd=True):
    """Pictures of sizes around 60 pixels with filled boxes, and their COCO file. The colour tells the class."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    root, images, annotations = Path(root), [], []
    (root / "images" / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    for number, count in enumerate(counts):
        height, width = (int(side) for side in draw.integers(44, 80, 2))
        pixels = draw.integers(90, 130, (height, width, 3), dtype=np.uint8)
        for _ in range(count):
            across, down = (int(side) for side in draw.integers(6, 20, 2))
            left, top = int(draw.integers(0, width - across)), int(draw.integers(0, height - down))
            place = int(draw.integers(3))
            pixels[top : top + down, left : left + across] = 255 * np.eye(3, dtype=np.uint8)[place]
            annotations.append(
                {
                    "id": 100 + 3 * len(annotations),
                    "image_id": 1000 - 7 * number,
                    "category_id": list(CATEGORIES)[place],
                    "bbox": [left, top, across, down],
                    "area": across * down * 0.9,
                    "iscrowd": int(crowd and len(annotations) % 11 == 5),
                }
            )
        picture = Image.fromarray(pixels)
        (picture.convert("P") if number % 5 == 4 else picture).save(root / "images" / split / f"{number:03}.png")
        images.append({"id": 1000 - 7 * number, "file_name": f"{number:03}.png", "height": height, "width": width})
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES.items()],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return str(root)


def make_task(options, train, evaluation=None, double=True):
    """A detection. With `double`, its model computes in float64."""
    task = Detection(DetectionOptions.model_validate(SMALL | options), train, evaluation)
    if double:
        make = task.model
        task.model = lambda: make().double()
    return task


def fit(options, train, evaluation, settings, run_dir=None):
    """Weights and results of a training on this rank."""
    return runs.fit(make_task(options, train, evaluation), settings, run_dir)


def results_of(options, train, evaluation, settings):
    """The metrics of an evaluation after a training of a few steps."""
    _, results = fit(options, train, evaluation, settings)
    return {name: value for name, value in results.items() if name.startswith("eval/")}


def fit_and_die(options, train, settings, run_dir, step):
    """A training that is killed at a step."""
    with killed_at(step):
        Trainer(settings, run_dir=Path(run_dir), quiet=True).fit(make_task(options, train, double=False))


def fit_to_the_end(options, train, settings, run_dir):
    """Final weights of a training in a run directory, begun or gone on with."""
    return runs.fit(make_task(options, train, double=False), settings, Path(run_dir))[0]
