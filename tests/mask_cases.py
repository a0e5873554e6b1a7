"""Small pictures with masks of unevenly many valid pixels, and trainings of segmentation on ranks."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep import Trainer
from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions
from lockstep_recipes.tasks.vision.segmentation.task import Segmentation
from tests import runs
from tests.image_cases import killed_at

CLASSES = ("ground", "disc", "bar")
COLORS = ([0, 0, 0], [220, 40, 40], [40, 40, 220])
UNET = {"sizes": {"width": 8, "depth": 2, "stride": 2}}


def shapes_folder(root):
    """Pictures of different sizes with a bright disc and a dark bar on grey ground: 12 for training, 7 for evaluation.
    Every third has few valid pixels."""
    for part, count, seed in (("train", 12, 0), ("val", 7, 1)):
        for folder in ("images", "masks"):
            (Path(root) / part / folder).mkdir(parents=True)
        for number in range(count):
            pixels, mask = _shape(np.random.default_rng((seed, number)), number)
            Image.fromarray(pixels).save(Path(root) / part / "images" / f"shape-{number}.png")
            Image.fromarray(mask.astype(np.uint8)).save(Path(root) / part / "masks" / f"shape-{number}.png")
    colors = dict(zip(CLASSES, COLORS, strict=True))
    (Path(root) / "classes.json").write_text(json.dumps({"classes": list(CLASSES), "colors": colors, "ignore": 255}))
    return str(root)


def _shape(draw, number):
    height, width = draw.integers(24, 48, 2).tolist()
    mask = np.zeros((height, width), np.int64)
    rows, columns = np.mgrid[:height, :width]
    y, x = draw.integers(6, 18, 2)
    mask[(rows - y) ** 2 + (columns - x) ** 2 < 30] = 1
    mask[height - 8 : height - 4, 2:] = 2
    pixels = (np.array([110, 230, 20])[mask][..., None] + draw.normal(0, 12, (height, width, 3))).clip(0, 255)
    if number % 3 == 0:  # a picture of which a few pixels are valid
        mask[(rows + columns) % (5 + 40 * (number % 2)) > 0] = 255
    if number % 5 == 4:
        mask[:, : width // 2] = 255
    return pixels.astype(np.uint8), mask


def make_task(options, folder, *, double=True):
    """A segmentation of `shapes_folder`. With `double`, its model computes in float64."""
    options = {"scratch": UNET, "image_size": 32, **options}
    task = Segmentation(SegmentationOptions.model_validate(options), folder)
    if double:
        make = task.model
        task.model = lambda: make().double()
    return task


def fit(options, folder, settings, run_dir=None):
    """Weights and results of a training on this rank."""
    return runs.fit(make_task(options, folder), settings, run_dir)


def results_of(options, folder, settings):
    """The metrics of a model after a step, as it evaluates them in a training."""
    _, results = fit(options, folder, settings)
    return {name: value for name, value in results.items() if name.startswith("eval/")}


def described(options, folder, settings, run_dir, pictures):
    """Predictions of pictures after a short training."""
    trainer = Trainer(settings, run_dir=Path(run_dir), quiet=True)
    trainer.fit(make_task(options, folder))
    return trainer.describe([pictures], task=make_task(options, folder))


def fit_and_die(options, folder, settings, run_dir, step):
    """A training that is killed at a step."""
    with killed_at(step):
        Trainer(settings, run_dir=Path(run_dir), quiet=True).fit(make_task(options, folder, double=False))


def fit_to_the_end(options, folder, settings, run_dir):
    """Final weights of a training in a run directory, begun or gone on with."""
    return runs.fit(make_task(options, folder, double=False), settings, Path(run_dir))[0]
