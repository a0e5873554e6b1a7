"""Folders of small pictures, and trainings of classification on ranks."""

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import torch

from lockstep import Trainer
from lockstep.core import build
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification
from tests import runs

CLASSES = ("blue", "green", "red")
RESNET = {"architecture": "resnet", "sizes": {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}}
PHASES = {0: 12, 1: 16, 2: 20}  # image sizes by epoch


def picture_folder(root, count=10, seed=0):
    """`count` PNG files for each class, of sizes around 20 pixels. The colour tells the class."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for number, name in enumerate(CLASSES):
        folder = Path(root) / name
        folder.mkdir(parents=True)
        for index in range(count):
            height, width = draw.integers(16, 26, 2)
            pixels = draw.integers(0, 200, (height, width, 3), dtype=np.uint8)
            pixels[..., 2 - number] = np.minimum(255, pixels[..., 2 - number] + 55)
            Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return str(root)


def make_task(options, train, evaluation=None, double=True):
    """A classification. With `double`, its model computes in float64."""
    task = Classification(ClassificationOptions.model_validate(options), train, evaluation)
    if double:
        make = task.model
        task.model = lambda: make().double()
    return task


def fit(options, train, evaluation, settings, run_dir=None):
    """Weights and results of a training on this rank."""
    return runs.fit(make_task(options, train, evaluation), settings, run_dir)


def results_of(options, train, evaluation, settings):
    """The metrics of an untrained model on this rank, as it evaluates them in a training of one step."""
    _, results = fit(options, train, evaluation, settings)
    return {name: value for name, value in results.items() if name.startswith("eval/")}


@contextlib.contextmanager
def killed_at(step):
    """The process is killed at the beginning of a step, counted from 1."""
    original, taken = build.train_step, [0]

    def train_step(state, *arguments, **options):
        if state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        taken[0] += 1
        return original(state, *arguments, **options)

    build.train_step = train_step
    try:
        yield
    finally:
        build.train_step = original


def fit_and_die(options, train, settings, run_dir, step):
    """A training that is killed at a step."""
    with killed_at(step):
        Trainer(settings, run_dir=Path(run_dir), quiet=True).fit(make_task(options, train, double=False))


def fit_to_the_end(options, train, settings, run_dir):
    """Final weights of a training in a run directory, begun or gone on with."""
    return runs.fit(make_task(options, train, double=False), settings, Path(run_dir))[0]


def float32_weights(task):
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in task.model().state_dict().items()}
