"""Tables of small CT volumes with uneven labels, and trainings of risks on ranks."""

import os
from pathlib import Path

import numpy as np
import torch

from lockstep import Trainer
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.task import VolumeRisk
from tests import runs
from tests.image_cases import killed_at
from tests.volume_cases import VIT

QUESTIONS = ("death_1y", "death_3y", "relapse_2y")
OPTIONS = {
    "scratch": {"architecture": "vit", "sizes": VIT},
    "image_size": 16,
    "max_slices": 6,
    "aggregator": {"width": 16, "layers": 1, "heads": 2},
    "augment": {"scale": [0.5, 1.0], "flip": 0.0},
    "resamples": 0,
}
PHASES = [
    {"match": ["backbone.network.layers.1.*", "backbone.network.layernorm.*"], "epoch": 1},
    {"match": ["backbone.*"], "epoch": 2},
]
UNEVEN = [("1", "1", "1")] + [("0", "", "")] * 5 + [("", "0", "1"), ("0", "1", "")] * 2


def volume_table(folder, answers=UNEVEN, *, most=14, seed=0, split=None):
    """A CSV file of volumes with 2 to `most` slices; the first volume has the most slices.

    Args:
        answers: the labels of each row.
        split: the part of each row.
    """
    draw = np.random.default_rng(seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    head = ["patient_id", "image", *QUESTIONS] + (["split"] if split else [])
    lines = [",".join(head)]
    for row, labels in enumerate(answers):
        count = most if row == 0 else int(draw.integers(2, 6))
        voxels = draw.integers(-1000, 1000, (count, 12, 14)).astype(np.int16)
        np.savez(folder / f"{row:03}.npz", slices=voxels, spacing=[float(draw.uniform(1, 4)), 1.0, 1.0])
        lines.append(",".join([f"p{row}", f"{row:03}.npz", *labels] + ([split[row]] if split else [])))
    table = folder / "labels.csv"
    table.write_text("\n".join(lines) + "\n")
    return str(table)


def make_task(options, train, evaluation=None, *, double=True, fold=None):
    """A task of risks. With `double`, its model computes in float64."""
    task = VolumeRisk(VolumeRiskOptions.model_validate(OPTIONS | options), train, evaluation, fold)
    if double:
        make = task.model
        task.model = lambda: make().double()
    return task


def fit(options, train, evaluation, settings, run_dir=None):
    """Weights and results of a training on this rank."""
    return runs.fit(make_task(options, train, evaluation), settings, run_dir)


def fit_and_die(options, train, settings, run_dir, step, rank=0):
    """A training in which a rank is killed at a step, counted from 1."""
    task = make_task(options, train, double=False)
    trainer = Trainer(settings, run_dir=Path(run_dir), quiet=True)
    if int(os.environ["RANK"]) != rank:
        trainer.fit(task)
        return
    with killed_at(step):
        trainer.fit(task)


def fit_to_the_end(options, train, settings, run_dir):
    """Final weights and results of a training in a run directory, begun or gone on with."""
    return runs.fit(make_task(options, train, double=False), settings, Path(run_dir))


def gradient_by_hand(task, *, micro=None):
    """The gradient of the mean loss over all training samples in plain torch, in the order of the table.

    Augmentation and random slices must be off.
    """
    torch.manual_seed(0)
    model = task.model()
    data = task.train_data()
    samples = [task.prepare(data[index], 0, True) for index in range(len(data))]
    size = micro or len(samples)
    batches = [task.collate(samples[begin : begin + size]) for begin in range(0, len(samples), size)]
    units = sum(float(task.weight(batch)) for batch in batches)
    model.train()
    for batch in batches:
        (task.loss(model, batch)[0] / units).backward()
    return model
