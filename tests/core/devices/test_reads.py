"""In a step of the shipped tasks, the host does not wait for the device; in fp16, it asks once for an overflow."""

import collections
import contextlib

import pytest
import torch

from lockstep.core import build
from lockstep.core.parallel import world
from lockstep.trainer.trainer import Trainer
from tests import box_cases, image_cases, mask_cases, risk_cases, runs, text_cases
from tests.python_device import NAME
from tests.ranks import run_on_python_device

STEPS = 4


def make_task(kind, folder):
    if kind == "text":
        return text_cases.text_task(**text_cases.SMALL, class_weights={"email": 3.0})
    if kind == "classification":
        options = {"scratch": image_cases.RESNET, "image_size": 16, "class_weights": "balanced"}
        return image_cases.make_task(options, image_cases.picture_folder(folder), double=False)
    if kind == "segmentation":
        options = {"losses": {"cross_entropy": 1.0, "dice": 0.5, "focal": 0.3}, "class_weights": "balanced"}
        return mask_cases.make_task(options, mask_cases.shapes_folder(folder), double=False)
    if kind == "detection":
        return box_cases.make_task({}, box_cases.box_folder(folder), double=False)
    return risk_cases.make_task({}, risk_cases.volume_table(folder), double=False)


def reads_of_steps(device, kind, folder, precision):
    """The reads by the host in the steps of a training, after the first step: how often each line read in a step."""
    world.pick_device = lambda *_, **__: torch.device(NAME, 0)
    step, counts = build.train_step, []

    def watched(*arguments, **options):
        device.log.clear()
        result = step(*arguments, **options)
        counts.append(collections.Counter(device.reads()))
        return result

    settings = runs.config(
        device="auto",
        batch={"global": 4, "micro": 2},
        train={"steps": STEPS},
        log={"every_steps": 100, "writers": []},
        checkpoint={"every_minutes": None},
        precision=precision,
        data={"workers": 0},
    )
    build.train_step = watched
    try:
        with contextlib.chdir(folder):
            Trainer(settings, run_dir=f"{folder}/run", quiet=True).fit(make_task(kind, f"{folder}/data"))
    finally:
        build.train_step = step
    return [sorted(found.items()) for found in counts]


QUICK = {("classification", "fp16"), ("detection", "fp32")}
CASES = [
    pytest.param(kind, precision, marks=() if (kind, precision) in QUICK else pytest.mark.exhaustive)
    for kind in ("text", "classification", "segmentation", "detection", "volume_risk")
    for precision in ("fp32", "bf16", "fp16")
]


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_host_does_not_wait_for_the_device_in_a_step(tmp_path, kind, precision):
    _, *others = run_on_python_device(reads_of_steps, kind, str(tmp_path), precision)
    assert len(others) == STEPS - 1
    for reads in others:
        # A text model of transformers asks in each of the two passes whether there is padding.
        ours = [
            (what, count) for what, count in reads if kind != "text" or not what[1].startswith("tasks/text/task.py")
        ]
        assert sum(count for _, count in reads) <= (precision == "fp16") + 2 * (kind == "text"), reads
        assert sum(count for _, count in ours) <= (precision == "fp16"), reads
