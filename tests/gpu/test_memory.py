"""Memory of one GPU: against arithmetic, and where it does not suffice."""

import gc
import json
import traceback

import pytest

from lockstep.core.errors import MemoryShortage
from tests import runs
from tests.gpu import cases

pytestmark = pytest.mark.gpu
SHARE = 0.01
FLOAT, MOMENTS = 4, 2
"""Bytes of a number, and numbers that Adam keeps for each weight."""


def width(place):
    """So large that the batches, and what libraries round up, are less than the share above."""
    return 4096 if place.kind == "cuda" else 256


def settings_of(place, **sections):
    return place.settings(**{"batch": {"global": 1}, "train": {"steps": 4}, **sections})


def test_device_holds_weights_gradients_and_moments_and_nothing_else(gpu):
    with cases.prepared(cases.Wide(64), settings_of(gpu)) as run:  # libraries take their own memory in their first step
        cases.take_steps(run, 2)
    del run
    task, held = cases.Wide(width(gpu)), {}
    gpu.free()
    before = gpu.adapter.allocated()

    def measure(name):
        held[name] = gpu.adapter.allocated() - before

    with cases.prepared(task, settings_of(gpu)) as run:
        measure("prepared")
        run.state.optimizer.register_step_post_hook(lambda *_: measure("updated"))
        cases.take_steps(run, 3)
        gc.collect()
        measure("after")
    size = task.parameters * FLOAT
    expected = {"prepared": size, "updated": size * (2 + MOMENTS), "after": size * (1 + MOMENTS)}
    assert held == pytest.approx(expected, rel=SHARE)


def test_log_says_how_much_the_states_take(place, tmp_path):
    task = cases.Wide(width(place))
    _, results = runs.fit(task, settings_of(place), tmp_path / "run")
    size = task.parameters * FLOAT / 2**20
    expected = {"parameters": size, "gradients": size, "optimizer": MOMENTS * size}
    assert {name: results[f"memory/{name}_mb"] for name in expected} == pytest.approx(expected, rel=SHARE)


def started_again(task, settings, folder):
    """Final weights of a training that begins again where memory did not suffice, as a launcher does."""
    for _ in range(5):
        try:
            return cases.weights(task, settings, folder)
        except MemoryShortage as error:
            traceback.clear_frames(error.__traceback__)
    raise AssertionError("it never fits")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_that_does_not_fit_begins_again_with_smaller_pieces(precision, gpu, tmp_path):
    task = cases.Hungry(2**20 if gpu.kind == "cuda" else 2**14)
    settings = gpu.settings(precision=precision, batch={"global": 16}, train={"steps": 4}, optim={"name": "SGD"})
    expected = cases.weights(task, settings, tmp_path / "whole")
    gpu.free()
    held = gpu.adapter.allocated()
    with cases.prepared(task, settings) as run:
        gpu.adapter.reset_peak()
        cases.take_steps(run, 2)
    needed = gpu.adapter.peak() - held
    del run
    with gpu.memory_limit(int(0.7 * needed)):
        found = started_again(task, settings, tmp_path / "limited")
    note = json.loads((tmp_path / "limited" / "micro.json").read_text())
    assert note["micro"] < 16
    assert "out of memory" in note["why"]
    assert runs.difference(found, expected) < (1e-4 if precision == "fp32" else 1e-2)


def test_one_sample_that_does_not_fit_ends_the_training_with_a_remedy(gpu, tmp_path):
    task = cases.Hungry(2**24 if gpu.kind == "cuda" else 2**16)
    bytes_of_a_sample = (2**24 if gpu.kind == "cuda" else 2**16) * FLOAT
    with gpu.memory_limit(bytes_of_a_sample), pytest.raises(Exception, match="memory") as error:
        started_again(task, gpu.settings(batch={"global": 4}, train={"steps": 2}), tmp_path / "run")
    assert "activation_checkpointing" in str(error.value)
    gpu.free()
    assert gpu.adapter.allocated() < 2**26, "the error holds what did not fit"
