"""How far a reader has to go: the walk of one batch, in `tests/walk.py`, is what docs/architecture.md says."""

import re
from pathlib import Path

import pytest

from tests import walk
from tests.ranks import run_ranks

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
ENGINE = {
    "core/joined_parts.py",
    "core/data/loader.py",
    "core/data/order.py",
    "core/data/randomness.py",
    "core/data/tensors.py",
    "core/devices/device.py",
    "core/parallel/buffers.py",
    "core/parallel/ddp.py",
    "core/parallel/gradients.py",
    "core/parallel/precision.py",
    "core/parallel/single.py",
    "core/parallel/strategy.py",
    "core/parallel/world.py",
    "core/loop.py",
    "core/optimizer_class.py",
    "core/schedule.py",
    "core/step.py",
    "core/train_metrics.py",
}
TASK = {
    "tasks/vision/images/augment.py",
    "tasks/vision/images/geometry.py",
    "tasks/vision/images/normalise.py",
    "tasks/vision/images/annotated.py",
    "recipes/digits.py",
    "tasks/class_metrics.py",
    "tasks/class_weights.py",
    "tasks/vision/classification/convnet.py",
    "tasks/vision/classification/task.py",
    "tasks/counting.py",
    "tasks/vision/image_task.py",
    "tasks/vision/image_options.py",
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return run_ranks(2, walk.walk, tmp_path_factory.mktemp("walk"))[0]


def test_step_passes_these_files_of_the_engine_and_of_the_task(calls):
    assert {file for _, file, _ in calls} == ENGINE | TASK


def test_frames_below_the_loop(calls):
    names = [name for _, _, name in calls]
    step = calls[names.index("train_step") :]
    assert max(depth for depth, _, _ in step) == 10
    assert next(depth for depth, _, name in calls if name == "train_step") == 1
    assert max(depth for depth, _, _ in calls) == 11


def test_a_step_makes_few_calls(calls):
    assert len(calls) <= 454


def test_every_sample_is_prepared_and_gradients_are_clipped(calls):
    names = [name for _, _, name in calls]
    assert names.count("Classification.prepare") == 32  # of 64 on two ranks
    assert names.count("clip_grads") == names.count("train_step") == 1


def test_architecture_says_so(calls):
    text = ARCHITECTURE.read_text()
    section = text.partition("## The path of a batch\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", section))
    assert named == (ENGINE | TASK) - {"core/loop.py"}
    assert f"passes {len(ENGINE)} files of the core" in " ".join(section.split())
    assert f"and {len(TASK)} of the task" in section
    deepest = max(depth for depth, _, _ in calls)
    assert f"what it calls, {deepest}." in " ".join(section.split())
