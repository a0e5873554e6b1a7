"""Every recipe on one GPU, with a tiny model and tiny data: finite losses, and no wait for the device within a step."""

import json
import math

import pytest
import torch

from lockstep.configs import config_file
from lockstep.trainer.trainer import Trainer
from lockstep_recipes.tasks.lm import attention
from tests import box_cases, image_cases, lm_cases, mask_cases, risk_cases, text_cases
from tests.gpu import cases

pytestmark = pytest.mark.gpu
STEPS = 5
BERT = {"architecture": "bert", "sizes": text_cases.SIZES, "vocab_size": 500}
RISKS = {f"task.{key}": value for key, value in risk_cases.OPTIONS.items()} | {"task.model": None, "task.resamples": 0}
IMAGENET = {"task.scratch": image_cases.RESNET, "batch.global": 6, "batch.micro": 3, "data.workers": 0}
IMAGENET |= {"task.image_size": 16, "task.image_size_between": "step", "task.eval_size": 20, "task.eval_resize": 24}
TINY = {
    "ag_news": {"task.model": None, "task.scratch": BERT, "batch.per_rank": 4, "batch.accumulate": 2},
    "cifar": {"task.scratch": image_cases.RESNET, "task.image_size": 16, "task.augment.shift": 2, "data.workers": 0},
    "ct_small": RISKS | {"train.unfreeze": risk_cases.PHASES, "task.frozen_epochs": 1},
    "detection": {f"task.{key}": value for key, value in box_cases.SMALL.items()} | {"batch.global": 4},
    "digits": {},
    "docstrings": {"task.scratch": BERT},
    "image_folder": {"task.image_size": 16},
    "imagenet": IMAGENET,
    "imagenet_88": IMAGENET,
    "lm": {f"task.{key}": value for key, value in (lm_cases.SMALL | {"length": 32, "vocab_size": 300}).items()},
    "nlst": RISKS | {"train.unfreeze": risk_cases.PHASES, "task.slices_per_chunk": None, "data.workers": 0},
    "segmentation": {"task.scratch": mask_cases.UNET, "task.image_size": 32},
    "text": {},
    "toy": {},
}
"""What makes each recipe tiny, by dotted path."""
NOT_ON_PYTHON_DEVICE = {"ct_small", "nlst", "detection"}
"""Recipes that repeat rows by counts on the device (`torch.repeat_interleave`), which the device in Python cannot."""


def data_of(recipe, folder):
    """Where the recipe's tiny training data lie, and its evaluation data."""
    if recipe in ("digits", "toy", "docstrings"):
        return None
    if recipe in ("ag_news", "text"):
        table = folder / "texts.csv"
        rows = [f"{'good fine nice' if number % 2 else 'bad poor sad'} {number},{number % 2}" for number in range(40)]
        table.write_text("\n".join(["text,label", *rows]) + "\n")
        return str(table), str(table)
    if recipe in ("ct_small", "nlst"):
        answers = 2 * risk_cases.UNEVEN
        split = ["train"] * len(risk_cases.UNEVEN) + ["eval"] * len(risk_cases.UNEVEN)
        return risk_cases.volume_table(folder / "volumes", answers, split=split), None
    if recipe == "detection":
        return box_cases.box_folder(folder / "boxes"), box_cases.box_folder(folder / "eval", seed=1, split="val")
    if recipe == "lm":
        return lm_cases.corpus(folder), None
    if recipe == "segmentation":
        return mask_cases.shapes_folder(folder / "shapes"), None
    return image_cases.picture_folder(folder / "train"), image_cases.picture_folder(folder / "eval", seed=1)


def test_every_recipe_is_here():
    assert TINY.keys() == config_file.recipes().keys()


@pytest.mark.parametrize("recipe", TINY)
def test_recipe_trains_with_finite_losses_and_does_not_wait_for_the_device(recipe, place, tmp_path):
    changes = {
        "device": place.key,
        "train.epochs": None,
        "train.steps": STEPS,
        "train.eval_every_epochs": None,
        "train.eval_every_steps": STEPS,
        "log.every_steps": 100,
        "log.writers": ["json_lines"],
        "log.pictures": 0,
    }
    if place.python and recipe in NOT_ON_PYTHON_DEVICE:
        pytest.skip("the device in Python cannot repeat rows by counts")
    if place.python:  # it has no autocast, and no `tolist`, which the metrics of segmentation need
        changes |= {"precision": "fp32"} | ({"train.eval_every_steps": 0} if recipe == "segmentation" else {})
    found = data_of(recipe, tmp_path)
    if found is not None:
        changes |= {"data.train": found[0], "data.eval": found[1]}
    config = config_file.load(recipe, [f"{key}={json.dumps(value)}" for key, value in (changes | TINY[recipe]).items()])
    reads = cases.StepReads(place)
    results = Trainer(config, run_dir=tmp_path / "run", quiet=True).fit(recorder=reads)
    assert results
    assert all(math.isfinite(value) for name, value in results.items() if "loss" in name), results
    within = [line for step in reads.by_step[1:-1] for line in step]
    assert not within, "\n".join(within)


@pytest.mark.parametrize(("shared", "width"), [(4, 64), (2, 64), (1, 128)])
def test_flash_attention_over_documents_is_that_of_a_mask(cuda, shared, width):
    if torch.cuda.get_device_capability(cuda.device) < attention._CAPABILITY:
        pytest.skip("flash attention needs a GPU of compute capability 8.0")
    assert not attention._fault_of_flash(cuda.device, torch.bfloat16, 4, shared, width)
    assert max(attention._distances(cuda.device, torch.bfloat16, 4, shared, width)) < attention._APART
