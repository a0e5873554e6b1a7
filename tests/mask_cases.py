"""Small pictures with masks of unevenly many valid pixels, and trainings of segmentation on ranks."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep import Trainer
from lockstep.tasks.segmentation.options import SegmentationOptions
from lockstep.tasks.segmentation.task import Segmentation
from tests import runs
from tests.image_cases import killed_at

CLASSES = ("ground", "disc", "bar")
UNET = {"sizes": {"width": 8, "depth": 2, "stride": 2}}


class Sample(NamedTuple):
    pixels: np.ndarray
    mask: np.ndarray | None
    name: str


class Shapes:
    """Pictures of different sizes with a bright disc and a dark bar on grey ground. The first have few valid pixels."""

    classes, colors, notes = list(CLASSES), [[0, 0, 0], [220, 40, 40], [40, 40, 220]], []

    def __init__(self, count=12, seed=0, largest=48):
        self.samples = [_shape(np.random.default_rng((seed, number)), number, largest) for number in range(count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def sizes(self):
        return [sample.mask.shape for sample in self.samples]

    def pixel_counts(self):
        masks = [sample.mask[sample.mask >= 0] for sample in self.samples]
        return np.bincount(np.concatenate(masks), minlength=len(CLASSES))


def _shape(draw, number, largest):
    height, width = draw.integers(24, largest, 2).tolist()
    mask = np.zeros((height, width), np.int64)
    rows, columns = np.mgrid[:height, :width]
    y, x = draw.integers(6, 18, 2)
    mask[(rows - y) ** 2 + (columns - x) ** 2 < 30] = 1
    mask[height - 8 : height - 4, 2:] = 2
    pixels = (np.array([110, 230, 20])[mask][..., None] + draw.normal(0, 12, (height, width, 3))).clip(0, 255)
    if number % 3 == 0:  # a picture of which a few pixels are valid
        mask[(rows + columns) % (5 + 40 * (number % 2)) > 0] = -1
    if number % 5 == 4:
        mask[:, : width // 2] = -1
    return Sample(pixels.astype(np.uint8), mask, f"shape-{number}")


def make_task(options, *, double=True, evaluated=True, largest=48):
    """A segmentation of `Shapes`. With `double`, its model computes in float64."""
    task = Segmentation(SegmentationOptions.model_validate({"scratch": UNET, "image_size": 32, **options}), "shapes")
    data = {"train": Shapes(12, 0, largest), "eval": Shapes(7, 1, largest) if evaluated else None}
    task._read = lambda source, split: data[split]
    task.eval_source = "shapes" if evaluated else None
    if double:
        make = task.model
        task.model = lambda: make().double()
    return task


def fit(options, settings, run_dir=None):
    """Weights and results of a training on this rank."""
    return runs.fit(make_task(options), settings, run_dir)


def results_of(options, settings):
    """The metrics of a model after a step, as it evaluates them in a training."""
    _, results = fit(options, settings)
    return {name: value for name, value in results.items() if name.startswith("eval/")}


def fit_and_die(options, settings, run_dir, step):
    """A training that is killed at a step."""
    with killed_at(step):
        Trainer(settings, run_dir=Path(run_dir), quiet=True).fit(make_task(options, double=False))


def fit_to_the_end(options, settings, run_dir):
    """Final weights of a training in a run directory, begun or gone on with."""
    return runs.fit(make_task(options, double=False), settings, Path(run_dir))[0]
